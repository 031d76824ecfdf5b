"""A feed's table in Delta, by deltalake: its log lies next to the parts, and names them by relative paths.

deltalake retries a commit by itself, on any newer version, unless something conflicts; adding the same file twice is
no conflict to it. Here it never retries: a commit is the version after the one that was read, or fails. The mark is
an application's transaction in the same commit as the files. deltalake takes such a transaction also if its number is
not the next one, so the number is never relied on to refuse anything.

A new column, and the property that says up to when windows are complete, are commits of their own: they change no row.
Each of our commits carries the mark, which distinguishes it from others' commits.
"""

from __future__ import annotations

import json
import re
import time
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, unquote

import pyarrow as pa
import pyarrow.compute as pc

from sluice.pipelines.errors import CatalogUnavailable, NotAuthorized, SluiceError, TableDiffers, TableMoved
from sluice.pipelines.feed.feed import Feed
from sluice.pipelines.feed.stores import place
from sluice.pipelines.model.tables import (
    BATCHES,
    COMPLETE,
    DELTA,
    FEED,
    LEDGER,
    MARK,
    TableChange,
    TableFault,
    TableFile,
    TableHead,
    TableOperation,
    build_forged_mark,
)
from sluice.pipelines.ports import Lake
from sluice.pipelines.util import extras
from sluice.pipelines.util.parallel import map_parallel
from sluice.resources.lake import open_client
from sluice.resources.tables.delta_types import delta_field, grown, list_bounded, says_all, stats_of
from sluice.resources.tables.outcomes import Outcomes

if TYPE_CHECKING:
    from deltalake import CommitProperties, DeltaTable, PostCommitHookProperties
    from deltalake.transaction import AddAction, RemoveAction

_GUARDS = {"delta.deletedFileRetentionDuration": "interval 90 days"}
"""How long VACUUM leaves a landed file that another client took out, such as by OPTIMIZE. Each file that was taken out
stays in checkpoints as long."""
_PROPERTIES = {
    **_GUARDS,
    # versions expire by the feed's settings, not by a writer's checkpoint
    "delta.enableExpiredLogCleanup": "false",
    "delta.checkpointInterval": "50",
}
_WRITABLE = {
    *("appendOnly", "invariants", "checkConstraints", "generatedColumns", "changeDataFeed", "columnMapping"),
    *("deletionVectors", "timestampNtz", "v2Checkpoint", "variantType"),
}
"""Features of writers with which deltalake 1.6.6 commits."""
_BOUNDED = "delta.dataSkippingStatsColumns"
_OPERATION = "sluice.operation"
_COMMIT = re.compile(r"([0-9]{20})\.json")
_CHECKPOINT = re.compile(r"([0-9]{20})\.checkpoint\.(?:.*\.)?(?:parquet|json)")
_NAME = re.compile(r"`([^`]+)`|([^,`\s][^,`]*)")
_NUMBERED = re.compile(r"([0-9]{20})\.")
MANY_VERSIONS = 50
"""Number of versions that expire together, or fewer if that frees files: each time costs a checkpoint of the whole
table."""


class DeltaLakeTable:
    """`ports.Table` in the Delta table of a folder of the lake. Nothing is opened before the first call."""

    def __init__(self, lake: Lake, root: str, options: Mapping[str, str], feed: str = "FEED", output: str = "") -> None:
        self._lake, self._root, self._options, self.output = lake, root, dict(options), output
        self._table: DeltaTable | None = None
        self._version, self._mark = -1, 0
        self._forged: int | None = None
        self._listed: frozenset[str] | None = None
        self._outcomes = Outcomes(self.name, "log", feed)

    @classmethod
    def of(cls, feed: Feed, lake: Lake, root: str) -> DeltaLakeTable:
        """The table of the feed in this folder of the lake. Raises SetupError."""
        extras.require("deltalake")
        options = open_client(feed.lake, feed.store).build_delta_options() if feed.store else {}
        return cls(lake, root, options, feed.stored_dataset, feed.output)

    @property
    def name(self) -> str:
        return f"table {self._root}"

    @property
    def format(self) -> str:
        return DELTA

    @cached_property
    def address(self) -> str:
        """Where readers find it."""
        return self._lake.locate(self._root)

    @cached_property
    def _url(self) -> str:
        """The address for deltalake, which takes `#` and `?` for the end of a path, and `%20` for a blank."""
        if self._options:
            root = place(self.address).root
            return f"{root}/{quote(self.address.removeprefix(f'{root}/'))}"
        return Path(self.address).as_uri()

    def __repr__(self) -> str:
        return f"DeltaLakeTable({self._root!r})"

    def close(self) -> None:
        """No-op: nothing is held open."""

    def rows(self, columns: Sequence[str]) -> pa.Table:
        with self._asking():
            return self._known.to_pyarrow_table(columns=list(columns))

    # -- asked

    def look(self) -> TableHead | None:
        try:
            return self._load_head()
        except TableMoved:  # while it was read: the newest version can be read without the deleted files
            return self._load_head()

    def _load_head(self) -> TableHead | None:
        with self._asking():
            self._table = self._open_table()
            self._version = -1 if self._table is None else self._table.version()
            if self._table is None:
                return None
            head = self._head(self._table)
            self._mark, self._forged = head.mark, head.forged
            return head

    def files(self) -> Mapping[str, TableFile]:
        with self._asking():
            live = _live(self._known)
            columns = (live.column(name).to_pylist() for name in ("path", "num_records", "size_bytes"))
            entries = ((self._address(path), rows or 0, size) for path, rows, size in zip(*columns, strict=True))
            return {address: TableFile(address, rows, size) for address, rows, size in entries}

    def expiring(self, before: int) -> tuple[str, ...]:
        with self._asking():
            log = self._log()
            end = log.first_kept(before)
            removed = {path for v in range(log.oldest + 1, end + 1) for path in log.list_removed(v)}
            removed |= {path for v in range(log.oldest, end) for path in log.changes(v)}
            return tuple(sorted({self._address(path) for path in removed} - self.files().keys())) if removed else ()

    def find_named(self, addresses: Iterable[str]) -> frozenset[str]:
        wanted = frozenset(addresses)
        with self._asking():
            log = self._log()
            oldest = self._open_table(log.oldest)
            before = set() if oldest is None else set(_live(oldest).column("path").to_pylist())
            later = {path for v in range(log.oldest + 1, self._version + 1) for path in log.list_added(v)}
            later |= {path for v in range(log.oldest, self._version + 1) for path in log.changes(v)}
            if (oldest and _count_deletes(oldest)) or any(map(log.has_vectors, range(log.oldest, self._version + 1))):
                later |= {self._path(address) for address in wanted if "/deletion_vector_" in address}
            if not log.names <= self._log().names:  # deleted entries may have named a later version's file, too
                raise self._outcomes.make_moved()
            return wanted & {self._address(path) for path in before | later}

    def list_metadata(self) -> frozenset[str]:
        return frozenset()  # `expire` removes the log's own files

    def remove_metadata(self, addresses: Iterable[str]) -> None: ...

    # -- changed

    def create(self, columns: Mapping[str, str], about: Mapping[str, str]) -> None:
        from deltalake import DeltaTable, Schema

        fields = [delta_field(*c) for c in columns.items()]
        schema = Schema.from_json(json.dumps({"type": "struct", "fields": fields}))
        with self._asking():
            if not self._options:
                Path(self.address).mkdir(parents=True, exist_ok=True)
            try:
                DeltaTable.create(
                    self._url,
                    schema,
                    configuration={**_PROPERTIES, _BOUNDED: _join_columns(list_bounded(fields)), **about},
                    storage_options=self._options or None,
                    commit_properties=_commit({MARK: "0"}),
                    raise_if_key_not_exists=False,
                )
            except Exception:
                if self._open_table() is None:
                    raise

    def commit(self, change: TableChange) -> int:
        about = {**change.about, MARK: str(change.mark), _OPERATION: str(change.operation)}
        self.repair({})
        table = self._known
        names = _NAME.findall(table.metadata().configuration.get(_BOUNDED, ""))
        columns = tuple(quoted or plain.strip() for quoted, plain in names)
        adding = map_parallel(lambda a: self._action(a, columns, changes=_changes_rows(change)), change.add)
        with self._changing():
            self._evolve(table, change)
            committed = int(table.version()) + 1
            mark = (_application(table), change.mark)
            self._write(table, [*adding, *self._removing(change)], _commit(about, mark))
        self._load(table, committed)
        self._mark = change.mark
        return committed

    def tell(self, complete: str) -> None:
        with self._changing():
            self._put({COMPLETE: complete})

    def find_faults(self, columns: Mapping[str, str]) -> tuple[TableFault, ...]:
        return tuple(self._find_faults(self._table, columns)) if self._table else ()

    def _find_faults(self, table: DeltaTable, columns: Mapping[str, str]) -> Iterator[TableFault]:
        protocol, properties = table.protocol(), table.metadata().configuration
        if self._forged is not None:
            yield build_forged_mark(self._forged, self._mark)
        if unknown := sorted({*(protocol.writer_features or ())} - _WRITABLE):
            yield TableFault(f"it has {', '.join(unknown)}, which deltalake does not write")
        if properties.get("delta.appendOnly") == "true":
            yield TableFault("it is append-only, so no file of it can be replaced")
        lacking = sorted(columns.keys() - {f.name for f in table.schema().fields})
        if lacking and properties.get("delta.columnMapping.mode", "none") != "none":
            yield TableFault(f"it maps columns to other names, and lacks {', '.join(lacking)}")

    def drop(self) -> None:
        with self._asking():
            for files in self._log().below(None):
                map_parallel(self._lake.remove, files)
        self._table = None

    def misread(self) -> tuple[str, ...]:
        return () if _BOUNDED in self._known.metadata().configuration else tuple(self.files())

    def repair(self, columns: Mapping[str, str], *, undo: bool = False) -> bool:
        """Earlier tables do not name the columns that have bounds, and deltalake takes it that all have. Files that
        lack some of these bounds are described again, and then the columns are named. Nor do they guard files. A mark
        that another client set becomes that of our newest commit again."""
        table = self._known
        if forged := self._forged is not None:
            with self._changing():
                self._write(table, [], _commit({MARK: str(self._mark)}, (_application(table), self._mark)))
            self._load(table, self._version + 1)
            self._forged = None
        if guards := {k: v for k, v in _GUARDS.items() if k not in table.metadata().configuration}:
            with self._changing():
                self._put(guards)
                self._load(table, self._version + 1)
        if _BOUNDED in table.metadata().configuration:
            return bool(guards) or forged
        bounded = list_bounded(json.loads(table.schema().to_json())["fields"])
        with self._changing():
            lacking = [f for f in _live(table).to_pylist() if not says_all(f, bounded)]
            if lacking:
                actions = [self._action(self._address(f["path"]), bounded, changes=False) for f in lacking]
                self._write(table, actions, _commit({MARK: str(self._mark)}))
                self._load(table, self._version + 1)
            self._put({_BOUNDED: _join_columns(bounded)})
            self._load(table, self._version + 1)
        return True

    def _put(self, properties: Mapping[str, str]) -> None:
        """Set properties in a commit of their own."""
        table = self._known
        entries = _commit({MARK: str(self._mark)})
        table.alter.set_table_properties(dict(properties), raise_if_not_exists=False, commit_properties=entries)

    def _load(self, table: DeltaTable, version: int) -> None:
        with self._asking():
            table.load_as_version(version)  # the next change is based on this one, regardless of later writers
        self._version = version

    def expire(self, before: int) -> int:
        table = self._known
        with self._asking():
            log = self._log()
            end = log.first_kept(before)
        if end == log.oldest or not (end - log.oldest >= MANY_VERSIONS or self.expiring(before)):
            return 0
        with self._asking():
            if end not in log.checkpoints:
                (self._open_table(end) or table).create_checkpoint()
        for files in log.below(end):
            map_parallel(self._lake.remove, files)
        return end - log.oldest

    def _write(self, table: DeltaTable, actions: Sequence[AddAction | RemoveAction], about: CommitProperties) -> None:
        table.create_write_transaction(
            list(actions),
            mode="append",
            schema=table.schema(),
            partition_by=[],
            commit_properties=about,
            post_commithook_properties=_build_hooks(),
        )

    def _action(self, address: str, columns: Sequence[str], *, changes: bool) -> AddAction:
        """The action that adds the file. `changes`: readers that follow the table must read it."""
        from deltalake.transaction import AddAction

        path = self._path(address)
        with self._outcomes.reading(address), self._lake.open(f"{self._root}/{path}") as file:
            size, stats = stats_of(file, columns)
        return AddAction(path, size, {}, time.time_ns() // 1_000_000, changes, stats)

    def _removing(self, change: TableChange) -> list[RemoveAction]:
        from deltalake.transaction import RemoveAction

        if not change.remove:
            return []
        now, live = time.time_ns() // 1_000_000, self.files()
        going = {*change.remove}.difference(change.add)  # a file that is added again takes its own place
        removed = (live[address] for address in sorted(going) if address in live)
        changes = _changes_rows(change)
        return [RemoveAction(self._path(f.address), changes, now, f.bytes, {}) for f in removed]

    def _evolve(self, table: DeltaTable, change: TableChange) -> None:
        """Add the columns, and the members of structs, that the table lacks."""
        from deltalake import Field

        have = {f["name"]: f for f in json.loads(table.schema().to_json())["fields"]}
        wanted = {name: delta_field(name, text) for name, text in change.columns.items()}
        try:
            lacking = [f for name, f in wanted.items() if name not in have or grown(have[name], f)]
        except ValueError as error:
            raise self._outcomes.make_refused(str(error)) from None
        if lacking:
            properties = {MARK: str(self._mark)}
            fields = [Field.from_json(json.dumps(f)) for f in lacking]
            table.alter.add_columns(
                fields, commit_properties=_commit(properties), post_commithook_properties=_build_hooks()
            )

    # -- the log

    @property
    def _known(self) -> DeltaTable:
        if self._table is None:
            raise ValueError("look first")
        return self._table

    def _open_table(self, version: int | None = None) -> DeltaTable | None:
        with extras.name_missing():
            from deltalake import DeltaTable
        from deltalake.exceptions import TableNotFoundError

        try:
            return DeltaTable(self._url, version, storage_options=self._options or None)
        except TableNotFoundError:
            return None

    def _head(self, table: DeltaTable) -> TableHead:
        properties, log, live = table.metadata().configuration, self._log(), _live(table)
        newest = log.of_rows(self._version)
        own = str(newest.get(MARK, ""))
        mark = int(table.transaction_version(_application(table)) or 0)
        ours = str(log.read_own_commit(self._version).get(MARK, mark))
        is_forged = ours.isdecimal() and int(ours) != mark
        return TableHead(
            properties.get(LEDGER, ""),
            int(ours) if is_forged else mark,
            self._version,
            int(own) if own.isdecimal() else None,
            str(newest.get(BATCHES, "")).rpartition(" ")[2],
            newest.get("timestamp"),
            pc.sum(live.column("num_records")).as_py() or 0,
            live.num_rows,
            self._version - log.oldest + 1,
            _count_deletes(table),
            properties.get(COMPLETE, ""),
            mark if is_forged else None,
            properties.get(FEED, ""),
        )

    def _log(self) -> _Log:
        log = _Log(self._lake, f"{self._root}/_delta_log", self._version)
        self._listed = log.names
        return log

    @contextmanager
    def _asking(self) -> Iterator[None]:
        """As `Outcomes.asking`. But a file of the log may be missing because another publisher let old versions go
        since this one listed it: that is TableMoved."""
        try:
            with self._outcomes.asking():
                yield
        except TableDiffers:
            before = self._listed
            with self._outcomes.asking():
                now = self._log().names
            if before is not None and before <= now:
                raise
            raise self._outcomes.make_moved() from None

    def _address(self, path: str) -> str:
        return path if "://" in path or path.startswith("/") else f"{self.address}/{path}"

    def _path(self, address: str) -> str:
        return address.removeprefix(f"{self.address}/")

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """Errors of a commit, by our names. deltalake says in words only whether somebody was faster, and a commit may
        have taken effect before what follows it failed: so the log is asked for its newest version."""
        try:
            yield
        except SluiceError:
            raise
        except Exception as error:  # noqa: BLE001 - the log shows the outcome
            try:
                now = self._open_table()
            except Exception:  # noqa: BLE001 - it does not answer
                raise self._outcomes.unknown(error) from None
            if now is None or now.version() != self._version:
                raise self._outcomes.make_moved() from None
            failure = self._outcomes.translate(error)
            if isinstance(failure, CatalogUnavailable):
                raise self._outcomes.unknown(error) from None
            raise (failure if isinstance(failure, NotAuthorized) else self._outcomes.make_refused(error)) from None


class _Log:
    """Files in the folder of a table's log: commits and checkpoints, by version."""

    def __init__(self, lake: Lake, folder: str, newest: int) -> None:
        self._lake, self._folder, self._newest = lake, folder, newest
        self.names = frozenset(path.rpartition("/")[2] for path in lake.list(folder))
        self.checkpoints = {int(match[1]) for n in self.names if (match := _CHECKPOINT.fullmatch(n))}
        self._commits = {int(match[1]) for n in self.names if (match := _COMMIT.fullmatch(n))}
        self._read: dict[int, list[dict[str, Any]]] = {}

    @property
    def oldest(self) -> int:
        """The oldest version that can still be read."""
        return 0 if 0 in self._commits else min(self.checkpoints, default=self._newest)

    def first_kept(self, before: int) -> int:
        """The oldest version from that time (ms) or after it; the newest one where none is."""
        versions = range(self.oldest, self._newest)
        return self.oldest + bisect_left(versions, before, key=self._at)

    def read_commit_info(self, version: int) -> dict[str, Any]:
        """Returns the commit information of the version; empty if it has none or was deleted."""
        return next((a["commitInfo"] for a in self._actions(version) if "commitInfo" in a), {})

    def of_rows(self, version: int) -> dict[str, Any]:
        """Returns the commit information of the newest commit up to the version that changed files or is ours.
        Another writer's new property is a version, too, and changes no row. Empty if a commit in between was
        deleted."""
        while (done := self._actions(version)) and version > self.oldest:
            if MARK in self.read_commit_info(version) or any(a.keys() & {"add", "remove"} for a in done):
                break
            version -= 1
        return self.read_commit_info(version)

    def read_own_commit(self, version: int) -> dict[str, Any]:
        """Returns the commit information of our newest commit up to the version; empty if it was deleted."""
        while self._actions(version) and version > self.oldest and MARK not in self.read_commit_info(version):
            version -= 1
        return self.read_commit_info(version)

    def _at(self, version: int) -> int:
        return int(self.read_commit_info(version).get("timestamp", 0))

    def list_removed(self, version: int) -> list[str]:
        """The files that the version took out, relative to the table."""
        return [unquote(a["remove"]["path"]) for a in self._actions(version) if "remove" in a]

    def list_added(self, version: int) -> list[str]:
        return [unquote(a["add"]["path"]) for a in self._actions(version) if "add" in a]

    def has_vectors(self, version: int) -> bool:
        """Returns whether the version has files with deletion vectors."""
        return any("deletionVector" in a.get("add", {}) for a in self._actions(version))

    def changes(self, version: int) -> list[str]:
        """The files with the version's change data. Another writer makes them, if the table has such a property."""
        return [unquote(a["cdc"]["path"]) for a in self._actions(version) if "cdc" in a]

    def below(self, version: int | None) -> tuple[list[str], list[str]]:
        """The lake paths of everything about versions before that one (None: of the whole log): the files from which
        reading begins, and all others. Removed in this order, the log has no gap, whatever ends the removal."""
        old = [
            n
            for n in sorted(self.names)
            if version is None or ((match := _NUMBERED.match(n)) and int(match[1]) < version)
        ]
        begins = [n for n in old if n == f"{0:020d}.json" or _CHECKPOINT.fullmatch(n)]
        others = [n for n in old if n not in begins]
        return [f"{self._folder}/{n}" for n in begins], [f"{self._folder}/{n}" for n in others]

    def _actions(self, version: int) -> list[dict[str, Any]]:
        if version not in self._read:
            data = self._lake.get(f"{self._folder}/{version:020d}.json") or b""
            self._read[version] = [json.loads(line) for line in data.splitlines() if line.strip()]
        return self._read[version]


def _changes_rows(change: TableChange) -> bool:
    """Returns whether readers that follow the table must read the added and removed files of the change."""
    return change.operation is not TableOperation.REPLACE


def _live(table: DeltaTable) -> pa.Table:
    """The files of a version: `path`, `num_records`, `size_bytes`, and more."""
    return _to_arrow(table.get_add_actions(flatten=True))


def _count_deletes(table: DeltaTable) -> int:
    """Returns the number of files with deletion vectors."""
    if "deletionVectors" not in (table.protocol().reader_features or ()):
        return 0
    return int(_to_arrow(table.deletion_vectors()).num_rows)


def _to_arrow(rows: Any) -> pa.Table:
    # Not pa.table(rows), which imports pandas: a second and 60 MB.
    return pa.RecordBatchReader.from_stream(rows).read_all()


def _join_columns(columns: Iterable[str]) -> str:
    """The columns as the property of a table lists them."""
    return ",".join(f"`{name}`" for name in columns)


def _application(table: DeltaTable) -> str:
    """The application whose transactions tell the mark: this ledger's."""
    return f"sluice/{table.metadata().configuration.get(LEDGER, '')}"


def _commit(about: Mapping[str, str], mark: tuple[str, int] | None = None) -> CommitProperties:
    from deltalake import CommitProperties, Transaction

    marks = [Transaction(*mark)] if mark else None
    return CommitProperties(custom_metadata=dict(about), max_commit_retries=0, app_transactions=marks)


def _build_hooks() -> PostCommitHookProperties:
    from deltalake import PostCommitHookProperties

    return PostCommitHookProperties(create_checkpoint=True, cleanup_expired_logs=False)
