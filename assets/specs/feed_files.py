"""The project's feed files for Dagster. Each is read by itself, so that a broken one does not take the others down.

Reading files opens no socket. The first window of a feed, and the topics that its patterns matched, are in its ledger.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from difflib import get_close_matches
from itertools import islice
from pathlib import Path
from queue import Empty, SimpleQueue

from sluice.pipelines.errors import Failed, FeedError, LakeUnavailable, SluiceError
from sluice.pipelines.feed.feed import Feed
from sluice.pipelines.feed.load import choose_feed, clashes, demand_feed, find_output, list_feed_files, load_feed
from sluice.pipelines.feed.problems import raise_problems
from sluice.pipelines.feed.sections import BOOTSTRAP
from sluice.pipelines.feed.stores import STORES
from sluice.pipelines.lake import paths
from sluice.pipelines.ledger.tip import Facts, Tip
from sluice.pipelines.model.kafka import is_topic_name
from sluice.pipelines.ports import Lake
from sluice.resources.project import NOWHERE, Project


@dataclass(frozen=True, slots=True)
class Recalled:
    """A feed as its ledger has it: the topics that its patterns matched, the start (ms) of its first window, and the
    topics that its rows were republished to."""

    topics: tuple[str, ...] = ()
    first_window: int | None = None
    targets: tuple[str, ...] = ()


OpenLake = Callable[[Feed], Lake]
RECALL_SECONDS = 10.0
"""Seconds after which definitions load without the ledgers that were not read."""
_READERS = 8
_MAX_TARGETS = 50
"""Republishes of a feed whose targets count."""


def open_real_lake(feed: Feed) -> Lake:
    """The feed's lake, imported late: a command that reads none needs none."""
    from sluice.resources.lake import open_lake

    return open_lake(feed)


def recall(feed: Feed, lake: Lake) -> Recalled:
    """Ask the feed's ledger. Costs a request and a listing; an older ledger, or one without a tip, is read.

    Raises LakeUnavailable, LedgerCorrupt, EntriesLost.
    """
    tip = Tip.parse(lake.get(paths.tip_path(feed.stored)))
    facts = tip.facts if tip else None
    if facts is None or (facts.topics is None and not feed.topics.names):
        from sluice.pipelines.ledger import Ledger  # late: completion reads tips only

        facts = Facts.of(Ledger(lake, feed.stored, lambda: 0, checkpoints=False).read())
    names = islice(lake.folders(paths.republish_root(feed.stored)), _MAX_TARGETS)
    plans = (lake.get(paths.republish_plan_path(feed.stored, name)) for name in names)
    return Recalled(
        facts.topics or (),
        facts.first_window,
        tuple(sorted({topic for plan in plans if (topic := _parse_target(plan))})),
    )


def _parse_target(plan: bytes | None) -> str | None:
    try:
        topic = json.loads(plan or b"")["wishes"]["to"]
    except (ValueError, LookupError, TypeError, RecursionError):
        return None
    return topic if isinstance(topic, str) and is_topic_name(topic) else None


def recall_feeds(
    files: FeedFiles, open_lake: OpenLake = open_real_lake, seconds: float = RECALL_SECONDS
) -> tuple[dict[str, Recalled], dict[str, SluiceError]]:
    """Ask the ledger of each feed, several at once. Returns what each has, and the errors of the others.

    Takes at most `seconds`. A lake that has not answered by then counts as unavailable.
    """
    recalled, errors = dict[str, Recalled](), dict[str, SluiceError]()
    errors |= {name: error for name, error in files.without_lake.items() if name in files.feeds}
    waiting = [feed for name, feed in files.feeds.items() if name not in errors]
    todo, finished = iter(waiting), SimpleQueue[None]()
    lock = threading.Lock()

    def read_rest() -> None:
        while True:
            with lock:
                feed = next(todo, None)
            if feed is None:
                return
            try:
                recalled[feed.name] = recall(feed, open_lake(feed))
            except SluiceError as error:
                errors[feed.name] = error
            except Exception as error:  # noqa: BLE001 - the thread continues with other feeds
                text = f"the ledger could not be read: unforeseen {type(error).__name__}"
                errors[feed.name] = Failed(text, remedy=f"see the error: sluice status {feed.name} --debug")
            finally:
                finished.put(None)

    for _ in range(min(_READERS, len(waiting))):
        # No pool: its threads would keep this process from ending while a lake does not answer.
        threading.Thread(target=read_rest, name="sluice-recall", daemon=True).start()
    until = time.monotonic() + seconds
    with suppress(Empty):
        for _ in waiting:
            finished.get(timeout=max(0.0, until - time.monotonic()))
    late = LakeUnavailable(f"the lake did not answer within {seconds:.0f} s", remedy="check the lake and its address")
    answers, failures = dict(recalled), dict(errors)  # a late thread may still write to the others
    return answers, failures | {f.name: late for f in waiting if f.name not in answers and f.name not in failures}


AT_RUN = frozenset({"kafka", "spark", "fetch"})
"""The sections that only runs need. Their variables and files may be missing where definitions load."""
LAKE = frozenset({"lake", *(store.section for store in STORES.values())})
"""The sections that say where the ledger is. Without them, definitions load without it."""
_NAMED = 10
"""A message names no more feeds than these."""


@dataclass(frozen=True, slots=True)
class FeedFiles:
    """The folder's contents: feeds by name, and problems of the other files. `without_lake`: why the address of a
    feed's lake is unknown here. `retired` feeds land nothing; commands take their names."""

    feeds: Mapping[str, Feed]
    broken: Mapping[Path, FeedError]
    without_lake: Mapping[str, FeedError] = field(default_factory=dict)
    retired: Mapping[str, Feed] = field(default_factory=dict)

    @property
    def every(self) -> dict[str, Feed]:
        """The feeds and the retired ones."""
        return {**self.feeds, **self.retired}

    def feed(self, name: str) -> Feed:
        """One feed. Raises FeedError: the error of its file, or that there is no feed of that name."""
        return demand_feed(name, self.find_dataset(name))

    def find_dataset(self, name: str) -> Feed:
        """One feed, or one output of a split feed by `feed.output`. Raises FeedError as `feed`."""
        feed, _, output = name.partition(".")
        return find_output(self._find(feed), output)

    def _find(self, name: str) -> Feed:
        if feed := choose_feed(name, self.every):
            return feed
        for path, error in self.broken.items():
            if path.stem == name:
                raise error
        raise FeedError(f"no feed `{name}`", remedy=self.instead_of(name))

    def instead_of(self, name: str) -> str:
        """Returns a suggestion for an unknown feed: similar names, or all feeds."""
        if near := get_close_matches(Path(name).stem, self.feeds):
            return f"did you mean {' or '.join(f'`{n}`' for n in near)}?"
        if len(self.feeds) > _NAMED:
            return f"sluice feeds list shows the {len(self.feeds)} feeds here"
        return f"feeds here: {', '.join(sorted(self.feeds)) or 'none'}"


def read_shapes(project: Project) -> FeedFiles:
    """Every feed file, as definitions need it: without what only runs need, where that is not known here."""
    return read_feeds(project, offline_environ(), shapes=True)


def read_feeds(project: Project, environ: Mapping[str, str], *, shapes: bool = False) -> FeedFiles:
    """Every feed file of the project, sound or broken. If two files clash, the later one is broken.

    `shapes`: sections that definitions do not need stay unknown where a variable of theirs is not set.
    """
    feeds: dict[str, tuple[Path, Feed]] = {}
    broken: dict[Path, FeedError] = {}
    without_lake: dict[str, FeedError] = {}
    folder = project.feeds_folder
    for path in list_feed_files(folder):
        try:
            feed, error = _load_shape(path, environ, folder) if shapes else (load_feed(path, environ, (), folder), None)
            if problems := clashes(feed, feeds.values()):
                raise_problems([(str(path), p) for p in problems])
            feeds[feed.name] = path, feed
            if error:
                without_lake[feed.name] = error
        except FeedError as error:
            broken[path] = error
    landing, retired = ({n: f for n, (_, f) in feeds.items() if f.retired is ended} for ended in (False, True))
    return FeedFiles(landing, broken, without_lake, retired)


def _load_shape(path: Path, environ: Mapping[str, str], folder: Path) -> tuple[Feed, FeedError | None]:
    """Returns the feed, and why the address of its lake is unknown. Raises FeedError."""
    try:
        return load_feed(path, environ, AT_RUN, folder), None
    except FeedError as error:
        return load_feed(path, environ, AT_RUN | LAKE, folder), error


def offline_environ() -> dict[str, str]:
    """The environment for loading definitions, which need no address of Kafka."""
    return {BOOTSTRAP: NOWHERE, **os.environ}


def topics_of(feed: Feed, recalled: Recalled) -> tuple[str, ...]:
    """The feed's topics as far as known without asking Kafka, sorted."""
    return tuple(sorted(set(feed.topics.names))) or recalled.topics
