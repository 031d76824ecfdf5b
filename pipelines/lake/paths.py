"""Every path in the lake, in one place. All are relative, with `/`. None depends on the wall clock.

    data/<feed>/[<output>/][<folder>/]<part>            published rows
                [<output>/]_delta_log/…                 the log of its Delta table, which deltalake writes
    quarantine/<feed>/[<output>/][<folder>/]<part>      records that broke the contract, with raw bytes
    reports/<report>/<folder>/<report>.parquet          a report's result for a window
    tables/<feed>[.<output>]_windows/<name>.parquet     the table of complete windows
    tables/<feed>_current/<name>.parquet                a bucket of the table of current rows
                          deleted/<name>.parquet        the deleted keys of that bucket
    _sluice/<feed>/log/<20 digits>.json                 the ledger, an entry a file
                   checkpoints/<20 digits>.json         a fold of the ledger up to that number
                   segments/<first>-<end>.json          copies of the entries from `first` up to, not including, `end`
                   tip.json                             the newest ledger number known to be used
                   staging/<batch>/<attempt>/data|quarantine/[<output>/][<folder>/]<part>
                   staging/<batch>/<attempt>/<range>.receipt.json
                   staging/<batch>/<attempt>/<range>.receipts.json   those of ranges that share files, by the first
                   staging/<batch>/replaced.json        notes that replaced files may appear once more
                   owners/<token>.json                  a run's sign of life
                   windows/<month>/<window>.json        "this window is complete"
                   declared.json                        up to where complete windows were declared
                   schemas/<id>.json                    a writer's schema from its registry
                   compacted.json                       up to where small files were merged
                   audited.rows                         results of audits, in Parquet: not for globs of *.parquet
                   audited/<20 digits>.rows             the same of old entries, by the first one's number
                   table.json                           notes that a table names files of the feed
                   tables/<output>.json                 the same of one output
                   removals/<id>.json                   files that go once no snapshot of the table names them
                   reports/<thousand>/<batch>[-<attempt>].html   a batch's report; an attempt's if it was refused
                   relanded/<batch>/<range>.parquet     former reasons for quarantine of a replay's records
                   aside/<number>/<path>                files of lost entries, moved here from <path>
                   republished/<name>/plan.json         source and target of a republish
                   republished/<name>/run.json          the run that sends it
                   republished/<name>/progress.json     its minimum progress (lane 1: progress-1.json, …)
                   republished/<name>/lane-<n>.json     the end of a lane, and its files of the map
                   republished/<name>/done.json         the end of all lanes, and the files of the map
                   republished/<name>/map/<file>        old coordinates and new ones, a file for each transaction

`<range>` is `<topic>-<partition>-<start>-<end>` and `<part>` is `<range>-b<batch>.parquet`. The topic is encoded by
`encode_topic`, whose result holds no `-`. If a range is cut into several files by size, those after the first add `-1`,
`-2`, … to their names. A file that several ranges share has the name of its first one, with `-shared` after the batch.
`<folder>` is `kafka_window_date=…/kafka_window_hour=…`, or `date=…/hour=…` below a ledger that began with
these. `<output>` is an output of a feed with `split`. The same plan gives the same names.

Folders with a file for each window or batch have a level: the month in which the window begins, or `<batch> // 1000`.
Files from before this level stay where they are (`lake/receipt_files.py`).
"""

from __future__ import annotations

import re
from datetime import datetime, timedelta
from typing import Final, Literal, NamedTuple

from sluice.pipelines.model.kafka import encode_topic
from sluice.pipelines.model.plans import OffsetRange
from sluice.pipelines.model.receipts import PartKind
from sluice.pipelines.util.units import DAY, EPOCH, HOUR, parse_duration, parse_window, show_duration, show_window

_LEVELS = {
    "date": ("%Y-%m-%d", "[0-9]{4}-[0-9]{2}-[0-9]{2}"),
    "hour": ("%H", "[0-9]{2}"),
    "minute": ("%M", "[0-9]{2}"),
}
"""The levels of window folders: how each value is written, and read."""

FolderPrefix = Literal["", "kafka_window_"]
FORMER_PREFIX: Final = ""
PREFIX: Final = "kafka_window_"
"""The prefix of the keys of window folders: `kafka_window_date=…/kafka_window_hour=…`. No column of a feed can have
it. A ledger that began before the prefix existed stays without it: `date=…/hour=…`."""

_NUMBERED = re.compile(r"(?:^|/)([0-9]{20})\.json$")

_SEGMENT = re.compile(r"_sluice/[^/]+/segments/([0-9]{20})-([0-9]{20})\.json")

_STAGED = re.compile(r"_sluice/[^/]+/staging/([0-9]+)/")

_RECEIPT = re.compile(r"_sluice/[^/]+/staging/[0-9]+/[^/]+/([^/]+)\.receipts?\.json")

_SEVERAL = ".receipts.json"

_RELANDED = re.compile(r"_sluice/[^/]+/relanded/([0-9]+)/[^-/]+-[0-9]+-[0-9]+-[0-9]+\.parquet")

_PAGE = re.compile(r"_sluice/[^/]+/reports/(?:[0-9]+/)?([0-9]+)(?:-[^/]+)?\.html")

_HOUR_PAGE = re.compile(r"_sluice/[^/]+/reports/hours/(?:[^/]+/)?([0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{4})\.html")

_MANIFEST = re.compile(r"_sluice/[^/]+/windows/(?:([0-9]{4}-[0-9]{2})/)?([0-9T-]+)-([0-9]+[a-z]+)\.json")

_TABLE_NOTE = re.compile(r"_sluice/[^/]+/tables/([^/.]+)\.json")

_OWNER = re.compile(r"_sluice/[^/]+/owners/([^/]+)\.json")

_REPUBLISH = re.compile(r"_sluice/[^/]+/republished/([^/]+)/plan\.json")

_PART = re.compile(r"([^-/]+)-([0-9]+)-([0-9]+)-([0-9]+)-b([0-9]+)(?:-([0-9]+))?(-shared)?\.parquet")

PROGRESS = "progress.json"
SLUICE = "_sluice"
"""The folder of everything that readers do not see."""

_ROOTS = {PartKind.LANDED: "data", PartKind.QUARANTINED: "quarantine"}

_DELTA_LOG = "_delta_log"

VISIBLE = frozenset(_ROOTS.values())
"""The names of the folders with published parts."""


def feed_root(feed: str) -> str:
    """The folder of everything of a feed that readers do not see."""
    return f"_sluice/{feed}"


def feed_of(path: str) -> str:
    """The name of the feed whose file the path is."""
    return path.split("/")[1]


def log_folder(feed: str) -> str:
    return f"_sluice/{feed}/log"


def log_path(feed: str, number: int) -> str:
    return f"{log_folder(feed)}/{number:020d}.json"


def log_number(path: str) -> int | None:
    """The number of the ledger entry at `path`; None if no entry belongs there."""
    return _number(path)


def checkpoint_folder(feed: str) -> str:
    return f"_sluice/{feed}/checkpoints"


def checkpoint_path(feed: str, number: int) -> str:
    """The path of the checkpoint over all entries below `number`."""
    return f"{checkpoint_folder(feed)}/{number:020d}.json"


def checkpoint_number(path: str) -> int | None:
    return _number(path)


def segment_folder(feed: str) -> str:
    return f"_sluice/{feed}/segments"


def segment_path(feed: str, first: int, end: int) -> str:
    """The path of the copies of the entries from `first` up to, not including, `end`."""
    return f"{segment_folder(feed)}/{first:020d}-{end:020d}.json"


def segment_numbers(path: str) -> tuple[int, int] | None:
    """`first` and `end` of the segment at `path`; None if no segment belongs there."""
    match = _SEGMENT.fullmatch(path)
    return (int(match[1]), int(match[2])) if match else None


def tip_path(feed: str) -> str:
    """The path of the file with the newest ledger number known to be used."""
    return f"_sluice/{feed}/tip.json"


def _number(path: str) -> int | None:
    match = _NUMBERED.search(path)
    return int(match[1]) if match else None


def owners_folder(feed: str) -> str:
    return f"_sluice/{feed}/owners"


def owner_path(feed: str, token: str) -> str:
    return f"{owners_folder(feed)}/{token}.json"


def owner_token(path: str) -> str | None:
    """Returns the token of the owner whose sign of life is at `path`; None for another path."""
    match = _OWNER.fullmatch(path)
    return match[1] if match else None


def manifest_folder(feed: str) -> str:
    return f"_sluice/{feed}/windows"


def declared_path(feed: str) -> str:
    """Returns the path of the note on windows with manifests."""
    return f"_sluice/{feed}/declared.json"


def compacted_path(feed: str) -> str:
    """Returns the path of the note on windows that compaction has checked."""
    return f"_sluice/{feed}/compacted.json"


def audited_path(feed: str) -> str:
    """Returns the path of the results of audits."""
    return f"_sluice/{feed}/audited.rows"


def settled_path(feed: str, first: int) -> str:
    """Returns the path of the audit results of old publish entries from `first` on."""
    return f"_sluice/{feed}/audited/{first:020d}.rows"


def schema_path(feed: str, id: int | str) -> str:
    """Returns the path of a writer's schema, by its number in the registry or its GUID."""
    return join(feed_root(feed), "schemas", f"{id}.json")


def window_path(feed: str, window: int, length: int) -> str:
    """The path of the manifest of the window that begins at `window` and lasts `length` (ms)."""
    return f"{manifest_folder(feed)}/{_utc(window):%Y-%m}/{_window_file(window, length)}"


def former_window_path(feed: str, window: int, length: int) -> str:
    """Returns the former path of that manifest, without a folder for each month."""
    return f"{manifest_folder(feed)}/{_window_file(window, length)}"


def _window_file(window: int, length: int) -> str:
    return f"{_utc(window):%Y-%m-%dT%H%M}-{show_duration(length)}.json"  # not every file system takes a colon


def manifest_window(path: str) -> tuple[int, int] | None:
    """Returns start and length (ms) of the window whose manifest is at `path`; None for another path."""
    if (match := _MANIFEST.fullmatch(path)) is None or not match[2].startswith(match[1] or ""):
        return None
    try:
        return parse_window(match[2]), parse_duration(match[3])
    except ValueError:
        return None


def delta_root(feed: str, kind: PartKind = PartKind.LANDED, output: str = "") -> str:
    """The folder of a Delta table, which names files relative to itself: that of the parts of this kind."""
    return join(_ROOTS[kind], feed, output)


def windows_table_root(dataset: str) -> str:
    """Returns the folder of the files of the table of complete windows, by the feed's name or `feed.output`."""
    return f"tables/{dataset}_windows"


def get_current_table_root(dataset: str) -> str:
    """Returns the folder of the files of the table of current rows."""
    return f"tables/{dataset}_current"


def table_note_path(feed: str, output: str = "") -> str:
    return f"{get_table_notes_folder(feed)}/{output}.json" if output else f"_sluice/{feed}/table.json"


def get_table_notes_folder(feed: str) -> str:
    return f"_sluice/{feed}/tables"


def parse_table_note(path: str) -> str | None:
    """Returns the output whose table's note is at `path`; None for another path."""
    match = _TABLE_NOTE.fullmatch(path)
    return match[1] if match else None


def get_removals_folder(feed: str) -> str:
    return f"_sluice/{feed}/removals"


def build_removals_path(feed: str, name: str) -> str:
    """The path of a note of files that go once no snapshot of the feed's table names them."""
    return f"{get_removals_folder(feed)}/{name}.json"


def get_erasing_folder(feed: str) -> str:
    """The folder of notes of unfinished erasures."""
    return f"_sluice/{feed}/erasing"


def build_erasing_path(feed: str, number: int, token: str) -> str:
    """The path of the note of a process that erases by a ledger of this number."""
    return f"{get_erasing_folder(feed)}/{number:012d}-{token}"


def parse_erasing_path(path: str) -> tuple[int, str] | None:
    """Returns the number and the token in the path of a note; None for any other file."""
    number, dash, token = path.rpartition("/")[2].partition("-")
    return (int(number), token) if dash and len(number) == 12 and number.isdecimal() and number.isascii() else None


def get_forgetting_path(feed: str, output: str) -> str:
    """The path of the note of files of metadata that go once no snapshot of the tables names them."""
    return f"_sluice/{feed}/forgetting{f'-{output}' if output else ''}.json"


def relanded_folder(feed: str) -> str:
    return f"_sluice/{feed}/relanded"


def relanded_path(feed: str, batch: int, s: OffsetRange) -> str:
    """Returns the path where a replay notes the former reasons for quarantine of its records."""
    return f"{relanded_folder(feed)}/{batch}/{name_range(s)}.parquet"


def relanded_batch(path: str) -> int | None:
    """Returns the batch of the replay whose note is at `path`; None for another path."""
    match = _RELANDED.fullmatch(path)
    return int(match[1]) if match else None


def republish_root(feed: str) -> str:
    return f"_sluice/{feed}/republished"


def republish_plan_path(feed: str, name: str) -> str:
    return f"{republish_root(feed)}/{name}/plan.json"


def republish_run_path(feed: str, name: str) -> str:
    return f"{republish_root(feed)}/{name}/run.json"


def republish_progress_path(feed: str, name: str, lane: int) -> str:
    return f"{republish_root(feed)}/{name}/progress{f'-{lane}' if lane else ''}.json"


def republish_lane_path(feed: str, name: str, lane: int) -> str:
    return f"{republish_root(feed)}/{name}/lane-{lane}.json"


def republish_done_path(feed: str, name: str) -> str:
    return f"{republish_root(feed)}/{name}/done.json"


def republish_map_folder(feed: str, name: str) -> str:
    return f"{republish_root(feed)}/{name}/map"


def republish_name(path: str) -> str | None:
    """Returns the republish whose plan is at `path`; None for another path."""
    match = _REPUBLISH.fullmatch(path)
    return match[1] if match else None


def batch_page_folder(feed: str) -> str:
    return f"_sluice/{feed}/reports"


def batch_page_path(feed: str, batch: int, attempt: str = "") -> str:
    """The path of a batch's HTML report, or of the report of an `attempt` that was not published."""
    return f"{batch_page_folder(feed)}/{batch // 1000}/{_page_file(batch, attempt)}"


def former_batch_page_path(feed: str, batch: int, attempt: str = "") -> str:
    """Returns the former path of that report, without a folder for a thousand ledger numbers."""
    return f"{batch_page_folder(feed)}/{_page_file(batch, attempt)}"


def _page_file(batch: int, attempt: str) -> str:
    return f"{batch}{f'-{attempt}' if attempt else ''}.html"


def page_batch(path: str) -> int | None:
    """Returns the batch whose HTML report is at `path`; None for another path."""
    match = _PAGE.fullmatch(path)
    return int(match[1]) if match else None


def aside_path(feed: str, number: int, path: str) -> str:
    """The path to which `path` is moved once the entries below `number` that name it are lost."""
    return f"_sluice/{feed}/aside/{number}/{path}"


def staging_root(feed: str) -> str:
    return f"_sluice/{feed}/staging"


def staging_folder(feed: str, batch: int) -> str:
    return f"{staging_root(feed)}/{batch}"


def attempt_folder(feed: str, batch: int, attempt: str) -> str:
    """The folder of one execution of one task. No other execution ever writes there."""
    return f"{staging_folder(feed, batch)}/{attempt}"


def staged_batch(path: str) -> int | None:
    """The batch to whose staging the file at `path` belongs; None if it is no staged file."""
    match = _STAGED.match(path)
    return int(match[1]) if match else None


def build_replaced_note_path(feed: str, batch: int) -> str:
    """The path of the note that files which the batch replaced may appear once more."""
    return f"{staging_folder(feed, batch)}/replaced.json"


def staged_path(feed: str, batch: int, attempt: str, kind: PartKind, folder: str, part: str) -> str:
    """The path where an attempt writes a part before it is published."""
    return join(attempt_folder(feed, batch, attempt), _ROOTS[kind], folder, part)


def get_progress_path(feed: str, batch: int, attempt: str) -> str:
    """The path of an attempt's note on ranges that it has begun. It is removed when the attempt ends."""
    return f"{attempt_folder(feed, batch, attempt)}/{PROGRESS}"


def receipt_path(feed: str, batch: int, attempt: str, s: OffsetRange) -> str:
    return f"{attempt_folder(feed, batch, attempt)}/{name_range(s)}.receipt.json"


def receipts_path(feed: str, batch: int, attempt: str, first: OffsetRange) -> str:
    """The path of the receipts of offset ranges that share files, by the first of them."""
    return f"{attempt_folder(feed, batch, attempt)}/{name_range(first)}{_SEVERAL}"


def holds_several(path: str) -> bool:
    """Returns whether a path of receipts is that of offset ranges that share files."""
    return path.endswith(_SEVERAL)


def parse_receipt_path(path: str) -> str | None:
    """Returns the name of the (first) range whose receipt is at `path`; None for another path."""
    match = _RECEIPT.fullmatch(path)
    return match[1] if match else None


def visible_roots(feed: str) -> tuple[str, ...]:
    """The folders that hold the feed's published parts. Other files there are strangers, unless `is_ignored`."""
    return tuple(f"{root}/{feed}" for root in _ROOTS.values())


def is_ignored(path: str) -> bool:
    """Returns whether no reader takes the path, below a visible root, for rows: the log of a Delta table, or a hidden
    file of the system, such as `.DS_Store` and `.nfs…`."""
    hidden = path.rpartition("/")[2].startswith(".") and not path.endswith(".parquet")
    return hidden or _DELTA_LOG in path.split("/", 4)[2:4]


def part_path(feed: str, kind: PartKind, folder: str, part: str) -> str:
    """The path of a published part."""
    return join(_ROOTS[kind], feed, folder, part)


def folder_keys(length: int, prefix: str) -> tuple[str, ...]:
    """The keys of window folders, which readers of a folder add to the rows as columns."""
    return tuple(f"{prefix}{level}" for level in [*_LEVELS][: (1 if length >= DAY else 2 if length >= HOUR else 3)])


def window_folder(window: int | None, length: int, prefix: str) -> str:
    """The folder of a window that begins at `window` and lasts `length` (ms), in UTC. Its keys begin with `prefix`.

    It has levels for day, hour and minute, as many as the length of windows needs. Outside windows (None) the levels
    are Hive's null, so that every reader finds the same columns.
    """
    keys = folder_keys(length, prefix)
    if window is None:
        return "/".join(f"{key}=__HIVE_DEFAULT_PARTITION__" for key in keys)
    spellings = (spelling for spelling, _ in _LEVELS.values())
    return _utc(window).strftime("/".join(map("{}={}".format, keys, spellings)))


def is_window_folder(folder: str, length: int, prefix: str) -> bool:
    """Returns whether `window_folder` could make this folder for windows of that length (ms)."""
    patterns = (pattern for _, pattern in _LEVELS.values())
    pattern = "/".join(map("{}={}".format, folder_keys(length, prefix), patterns))
    return folder == window_folder(None, length, prefix) or bool(re.fullmatch(pattern, folder))


def prefix_of(folder: str) -> FolderPrefix:
    """The prefix of the keys of a window's folder."""
    return PREFIX if folder.startswith(PREFIX) else FORMER_PREFIX


def folder_of(path: str, feed: str, kind: PartKind) -> str:
    """The folder of the part at `path`, below the feed's data; empty if it lies elsewhere."""
    root = f"{join(_ROOTS[kind], feed)}/"
    return path.removeprefix(root).rpartition("/")[0] if path.startswith(root) else ""


def report_path(report: str, window: int, length: int, prefix: str) -> str:
    """The path of a report's result for a window. Its folder has the keys of the feed's."""
    return f"reports/{report}/{window_folder(window, length, prefix)}/{report}.parquet"


class PartName(NamedTuple):
    """The parts of a file name. `topic` is encoded; `sequence` is 0 for an offset range's first file. A `shared` file
    has the name of its first range.
    """

    topic: str
    partition: int
    start: int
    end: int
    batch: int
    sequence: int = 0
    shared: bool = False


def name_range(s: OffsetRange) -> str:
    return f"{encode_topic(s.topic)}-{s.partition}-{s.start}-{s.end}"


def part_name(s: OffsetRange, batch: int, sequence: int = 0) -> str:
    suffix = f"-{sequence}" if sequence else ""
    return f"{name_range(s)}-b{batch}{suffix}.parquet"


def shared_name(first: OffsetRange, batch: int) -> str:
    """Returns the name of a file that several offset ranges share, from the first of them.

    A range has at most one live file in a batch, so the name is unique.
    """
    return f"{name_range(first)}-b{batch}-shared.parquet"


def parse_part(path: str) -> PartName | None:
    """The file name at `path`, taken apart; None if it is no part's name."""
    if (match := _PART.fullmatch(path.rpartition("/")[2])) is None:
        return None
    partition, start, end, batch, sequence = (int(n or 0) for n in match.groups()[1:6])
    return PartName(match[1], partition, start, end, batch, sequence, bool(match[7]))


def find_remedy(path: str) -> str:
    """Returns the remedy for the file at `path`, whose name does not have the topic's life."""
    root, _, rest = path.partition("/")
    if root not in VISIBLE or parse_part(path) is None:
        return "bring it back from a backup; one in staging is written again by the next run"
    return find_part_remedy(rest.partition("/")[0])


def find_part_remedy(feed: str) -> str:
    """Returns the remedy for a published file: an audit asks Kafka for the records, and knows the topic's lives."""
    return f"see the command that restores it, by what Kafka still has: sluice audit {feed} --all --hashes"


def landing_remedy(feed: str, offsets: str) -> str:
    """Returns the command that lands these offsets again."""
    return (
        f"while Kafka still has its records: sluice run {feed} --offsets {offsets} --replace; else bring the file back"
        " from a backup"
    )


def join(*parts: str) -> str:
    """Returns the path of these parts, without the empty ones."""
    return "/".join(p for p in parts if p)


def _utc(ms: int) -> datetime:
    return EPOCH + timedelta(milliseconds=ms)


def get_hour_page_path(feed: str, window: int, output: str = "") -> str:
    """The path of the HTML page of a window (its start, ms), or of one output's."""
    return join(f"{batch_page_folder(feed)}/hours", output, f"{show_window(window).replace(':', '')}.html")


def parse_page_window(path: str) -> int | None:
    """Returns the start (ms) of the window whose HTML page is at `path`; None for another path."""
    match = _HOUR_PAGE.fullmatch(path)
    return parse_window(f"{match[1][:-2]}:{match[1][-2:]}") if match else None


PROJECT_PAGE: Final = "_sluice/report.html"
"""The HTML page of all feeds of the lake."""


def get_feed_row_path(feed: str) -> str:
    """The path of a feed's row on that page."""
    return f"{batch_page_folder(feed)}/row.json"


def link_hour_page(feed: str, window: int) -> str:
    """Returns the link from that page to a window's."""
    return get_hour_page_path(feed, window).removeprefix("_sluice/")
