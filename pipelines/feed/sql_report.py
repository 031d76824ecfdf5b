"""A report: SQL over the rows of one complete window of a feed, from a file `reports/<name>.sql`.

    -- Revenue by hour and currency.
    -- feed: orders
    SELECT currency, sum(amount) AS revenue FROM orders GROUP BY currency

The comment at its head names the feed, which is also the table's name. The rest of it describes the report. The
window's start and end are the parameters `:window_start` and `:window_end`.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

from sluice.pipelines.errors import FeedError
from sluice.pipelines.feed.sections import NAME_PATTERN

MAX_BYTES = 1 << 20
_NAME = re.compile(NAME_PATTERN)
_FEED = re.compile(r"feed:\s*(\S*)")
_TAKEN = frozenset({"landed", "quarantined", "committed"})


@dataclass(frozen=True, slots=True)
class Report:
    """One report. `feed` names the feed whose windows it reads; `sql` is the whole file."""

    name: str
    feed: str
    sql: str
    description: str

    @property
    def version(self) -> str:
        """A hash of the text: the same text has the same version."""
        return hashlib.sha256(self.sql.encode()).hexdigest()[:12]


def load_report(path: Path) -> Report:
    """The report in the file. Raises FeedError."""
    if not _NAME.fullmatch(path.stem) or path.stem in _TAKEN:
        raise FeedError(
            f"{path}: {path.stem!r} is not a name for a report", remedy="a-z, 0-9 and _, such as revenue.sql"
        )
    sql = _text(path)
    lines = (line.strip() for line in sql.strip().splitlines())
    head = [line[2:].strip() for line in takewhile(lambda line: line.startswith("--"), lines)]
    feeds = [match[1] for line in head if (match := _FEED.fullmatch(line))]
    if len(feeds) != 1 or not _NAME.fullmatch(feeds[0]):
        raise FeedError(f"{path}: does not say whose rows it reads", remedy="begin it with a line `-- feed: NAME`")
    if all(not line.strip() or line.strip().startswith("--") for line in sql.splitlines()):
        raise FeedError(f"{path}: holds no SQL", remedy=f"a SELECT over the table `{feeds[0]}`")
    return Report(path.stem, feeds[0], sql, " ".join(line for line in head if not _FEED.fullmatch(line)))


def _text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
        if len(data) <= MAX_BYTES:
            return data.decode()
    except (OSError, UnicodeDecodeError) as error:
        raise FeedError(f"{path}: cannot be read ({type(error).__name__})", remedy="a text file in UTF-8") from None
    raise FeedError(f"{path}: is larger than 1 MiB", remedy="a report is one statement")
