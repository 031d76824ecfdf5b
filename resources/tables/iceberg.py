"""A feed's table in Iceberg, by PyIceberg: any of its catalogs, over files that are in the lake already.

PyIceberg retries a commit by itself, on any newer snapshot, and so may add a file twice. Here it never does: its
retries are switched off on each handle. A commit is based on the snapshot that was read (the requirement
`assert-ref-snapshot-id`); a writer that finds a newer one decides again. Columns are found by name (the table's name
mapping), since the files carry no field ids.

PyIceberg takes times from this machine's clock, and Java's library refuses a table whose times go back by more than a
minute. So a commit is stamped later than everything in the metadata.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import cached_property, lru_cache
from itertools import compress, pairwise
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from sluice.pipelines.errors import CatalogUnavailable, PartUnreadable, SetupError, SluiceError, TableRefused
from sluice.pipelines.feed.feed import Feed
from sluice.pipelines.lake.parquet import is_misread_by_iceberg, read_bounds
from sluice.pipelines.model.tables import (
    BATCHES,
    COMPLETE,
    FEED,
    ICEBERG,
    LEDGER,
    MARK,
    Remedy,
    TableChange,
    TableFault,
    TableFile,
    TableHead,
    TableOperation,
    build_forged_mark,
)
from sluice.pipelines.ports import Lake
from sluice.pipelines.schema.schema import arrow_type
from sluice.pipelines.schema.wider import parse_type
from sluice.pipelines.util import extras
from sluice.pipelines.util.parallel import map_parallel
from sluice.resources.lake import open_client
from sluice.resources.tables.outcomes import Outcomes
from sluice.resources.web import limit_session

if TYPE_CHECKING:
    from pyiceberg.catalog import Catalog
    from pyiceberg.io import FileIO
    from pyiceberg.manifest import DataFile, ManifestEntry, ManifestFile
    from pyiceberg.schema import Schema
    from pyiceberg.table import Table, Transaction
    from pyiceberg.table.metadata import TableMetadata
    from pyiceberg.table.name_mapping import MappedField
    from pyiceberg.table.snapshots import Snapshot
    from pyiceberg.table.update import TableRequirement, TableUpdate

CATALOG_SECONDS = 120.0
"""The most time until a REST catalog's answer has its headers: commits take a catalog a while."""
_IMPORTING = Lock()
"""SQLAlchemy's modules import each other; two threads that begin at once find half of one."""
_COLUMNS = "sluice.columns"
_TOLERANCE = 60_000
"""How far (ms) times in a table's metadata may go back for Java's library."""
_RETRIES = "commit.retry.num-retries"
_GUARDS = {"gc.enabled": "false"}
"""With it, Spark refuses to remove files by `expire_snapshots`, `remove_orphan_files` and `DROP TABLE … PURGE`."""
_PROPERTIES = {
    **_GUARDS,
    "format-version": "2",
    _RETRIES: "0",
    # readers open a bounded number of manifests, however many commits there were
    "commit.manifest-merge.enabled": "true",
    # and a merge of manifests, each hundredth commit, rewrites a few thousand entries
    "commit.manifest.target-size-bytes": str(1 << 20),
    "write.metadata.delete-after-commit.enabled": "true",
    "write.metadata.previous-versions-max": "100",
}


class IcebergTable:
    """`ports.Table` in a catalog of Iceberg. Nothing is opened before the first call."""

    def __init__(
        self,
        name: str,
        properties: Mapping[str, str],
        defaults: Mapping[str, Any],
        feed: str = "FEED",
        output: str = "",
    ) -> None:
        self._identifier, self.output = name, output
        self._properties, self._defaults = dict(properties), dict(defaults)
        self._table: Table | None = None
        self._outcomes = Outcomes(self.name, "catalog", feed)

    @classmethod
    def of(cls, feed: Feed, lake: Lake, suffix: str = "", name: str = "") -> IcebergTable:
        """The table that the feed names, or the one that is called like it with a suffix, or by `name`. Its metadata
        lies in the lake, below `tables`, unless the catalog says where. Raises SetupError."""
        if feed.table is None or feed.table.iceberg is None:
            raise ValueError("the feed names no Iceberg table")
        extras.require("pyiceberg")
        settings = feed.table.iceberg
        defaults = {"warehouse": lake.locate("tables"), **_build_options(feed)}
        return cls(name or settings.name + suffix, settings.properties(), defaults, feed.stored_dataset, feed.output)

    @property
    def name(self) -> str:
        return f"table {self._identifier}"

    @property
    def format(self) -> str:
        return ICEBERG

    def __repr__(self) -> str:
        return f"IcebergTable({self._identifier!r})"

    def close(self) -> None:
        if "_catalog" in self.__dict__:
            self._catalog.close()

    def rows(self, columns: Sequence[str]) -> pa.Table:
        with self._asking():
            return self._known.scan(selected_fields=tuple(columns)).to_arrow()

    # -- asked

    def look(self) -> TableHead | None:
        from pyiceberg.exceptions import NoSuchNamespaceError, NoSuchTableError

        with self._asking():
            try:
                self._table = self._catalog.load_table(self._identifier)
            except (NoSuchTableError, NoSuchNamespaceError):
                self._table = None
                return None
        return _head(self._table)

    def files(self) -> Mapping[str, TableFile]:
        with self._asking():
            files: dict[str, TableFile] = {}
            for f in _list_live(self._known):  # a file that others added again counts as often as readers read it
                path, before = f.file_path, files.get(f.file_path, TableFile(f.file_path, 0, 0, 0))
                files[path] = TableFile(path, f.record_count + before.rows, f.file_size_in_bytes, before.listed + 1)
            return files

    def expiring(self, before: int) -> tuple[str, ...]:
        table = self._known
        if not any(s.timestamp_ms < before for s in table.metadata.snapshots):
            return ()
        with self._asking():
            ours = (s for s in table.metadata.snapshots if s.summary and s.summary.get("deleted-data-files"))
            removed = {e.data_file.file_path for s in ours for e in _entries(table, s) if not _is_live(e)}
        return tuple(sorted(removed - self.files().keys())) if removed else ()

    def find_named(self, addresses: Iterable[str]) -> frozenset[str]:
        table, wanted = self._known, frozenset(addresses)
        with self._asking():
            manifests = {m.manifest_path: m for s in table.metadata.snapshots for m in s.manifests(table.io)}
            live = (e for m in manifests.values() for e in m.fetch_manifest_entry(table.io, discard_deleted=True))
            return wanted & {e.data_file.file_path for e in live}

    def list_metadata(self) -> frozenset[str]:
        table = self._known
        with self._asking():
            snapshots = table.metadata.snapshots
            manifests = {m.manifest_path for s in snapshots for m in s.manifests(table.io)}
            return frozenset(manifests | {s.manifest_list for s in snapshots if s.manifest_list})

    def remove_metadata(self, addresses: Iterable[str]) -> None:
        io = self._known.io

        def remove(address: str) -> None:
            with suppress(FileNotFoundError):
                io.delete(address)

        with self._asking():
            map_parallel(remove, [*addresses])

    # -- changed

    def create(self, columns: Mapping[str, str], about: Mapping[str, str]) -> None:
        namespace, properties = self._identifier.rpartition(".")[0], {**_PROPERTIES, **about, MARK: "0"}
        with self._asking():
            catalog, schema = self._catalog, _arrow(columns)
            _make(
                lambda: catalog.create_namespace_if_not_exists(namespace), lambda: catalog.namespace_exists(namespace)
            )
            _make(
                lambda: catalog.create_table(self._identifier, schema, properties=properties),
                lambda: catalog.table_exists(self._identifier),
            )

    def commit(self, change: TableChange) -> int:
        table = self._known
        if change.add:
            self._check_unpartitioned()
        with self._changing(), without_history(table) as transaction:
            self._update_columns(transaction, change.columns)
            self._stage_files(transaction, change)
            properties = {COMPLETE: change.complete} if change.complete else {}
            transaction.set_properties({MARK: str(change.mark), **properties})
        return int(table.metadata.current_snapshot_id or 0)

    def tell(self, complete: str) -> None:
        table = self._known
        with self._changing(), without_history(table) as transaction:
            self._stage_base(transaction)
            transaction.set_properties({COMPLETE: complete})

    def find_faults(self, columns: Mapping[str, str]) -> tuple[TableFault, ...]:
        return tuple(self._find_faults(self._table, columns)) if self._table else ()

    def _find_faults(self, table: Table, columns: Mapping[str, str]) -> Iterator[TableFault]:
        metadata = table.metadata
        if metadata.format_version > 2:
            yield TableFault(f"it has format version {metadata.format_version}, which PyIceberg does not write")
        if spec := ", ".join(f.name for f in table.spec().fields):
            yield TableFault(f"it is partitioned by {spec}, and landed files have rows of several partitions")
        if (head := _head(table)).forged is not None:
            yield build_forged_mark(head.forged, head.mark)
        if _is_mapping_incomplete(metadata):
            yield TableFault("its name mapping is not complete, so readers find no values", Remedy.SYNC)
        transaction = without_history(table)
        with suppress(ValueError, TypeError):  # another type: a commit refuses it
            _evolve(transaction, columns)
        schema = transaction.table_metadata.schema()
        renamed = dict(_find_renamed(metadata, schema))
        for name, now in renamed.items():
            yield TableFault(f"column {name} was renamed to {now}, and landed files have it as {name}", Remedy.REPAIR)
        mapped = {name for name, _ in _list_names(metadata.name_mapping() or ())}
        if dropped := sorted({*schema.column_names}.difference(metadata.schema().column_names, renamed) & mapped):
            yield TableFault(f"{', '.join(dropped)} of its columns were dropped", Remedy.SYNC)
        for log in (metadata.snapshot_log, metadata.metadata_log):
            times = [*(entry.timestamp_ms for entry in log), metadata.last_updated_ms]
            if (back := max((a - b for a, b in pairwise(times)), default=0)) > _TOLERANCE:
                text = f"its times go back by {back // 1000} s, and Java's library refuses it (Spark, Trino, Flink)"
                yield TableFault(text, blocks=False)
                break

    def drop(self) -> None:
        from pyiceberg.exceptions import NoSuchNamespaceError, NoSuchTableError

        self._table = None
        with self._asking(), suppress(NoSuchTableError, NoSuchNamespaceError):
            self._catalog.drop_table(self._identifier)

    def misread(self) -> tuple[str, ...]:
        table, outcomes = self._known, self._outcomes
        partitioned = {number for number, spec in table.specs().items() if spec.fields}

        def is_misread(file: DataFile) -> bool:
            if file.spec_id in partitioned:
                return True
            try:
                return is_misread_by_iceberg(_footer(table.io, file.file_path, outcomes)[0])
            except PartUnreadable:  # an audit names it
                return False

        with self._asking():
            live = [*_list_live(table)]
            return tuple(f.file_path for f in compress(live, map_parallel(is_misread, live)))

    def repair(self, columns: Mapping[str, str], *, undo: bool = False) -> bool:
        """Bounds are in the files themselves, which `maintenance/compaction.py` writes again."""
        table, head = self._known, _head(self._known)
        lacking = {k: v for k, v in _GUARDS.items() if k not in table.properties}
        if head.forged is not None:
            lacking[MARK] = str(head.mark)
        with self._changing(), without_history(table) as transaction:
            if undo:
                # The files have these columns under their former names.
                before, trial = transaction.table_metadata, without_history(transaction._table)
                _evolve(trial, columns)
                if renamed := [*_find_renamed(before, trial.table_metadata.schema())]:
                    with transaction.update_schema() as update:
                        for name, now in renamed:
                            update.rename_column(now, name.rpartition(".")[2])
            self._update_columns(transaction, columns)
            if lacking:
                transaction.set_properties(lacking)
            changed: bool = transaction.has_updates
            if changed:
                self._stage_base(transaction)
        return changed

    def _stage_base(self, transaction: Transaction) -> None:
        """Require the snapshot that was read. A commit without a snapshot takes its time from the clock: where that
        is behind the table's times, it gets an empty snapshot."""
        from pyiceberg.table.update import AssertRefSnapshotId

        table = self._known
        if _is_clock_behind(table.metadata):
            with transaction.update_snapshot(
                snapshot_properties={MARK: table.properties.get(MARK, "0")}
            ).merge_append():
                pass
        else:
            read = table.metadata.current_snapshot_id
            transaction._stage((), (AssertRefSnapshotId.model_validate({"ref": "main", "snapshot-id": read}),))

    def _check_unpartitioned(self) -> None:
        """Raises TableRefused for a table with partitions: a file has rows of several, and readers would miss some."""
        if spec := ", ".join(f.name for f in self._known.spec().fields):
            raise TableRefused(
                f"{self.name} was partitioned by {spec}, and landed files have rows of several partitions",
                remedy=f"sluice table rebuild {self._outcomes.feed}",
            )

    def _update_columns(self, transaction: Transaction, columns: Mapping[str, str]) -> None:
        """Add the columns that the table lacks, and widen those that have become wider. Readers find them by name.

        Raises TableRefused for a renamed column: added again by its name in files, it would take the other's values.
        """
        before = transaction.table_metadata
        _evolve(transaction, columns)
        for name, now in _find_renamed(before, transaction.table_metadata.schema()):
            raise TableRefused(
                f"column {name} of {self.name} was renamed to {now}, and landed files have it as {name}",
                remedy=f"sluice table sync {self._outcomes.feed} --repair renames it back; a view may rename it",
            )

    def _stage_files(self, transaction: Transaction, change: TableChange) -> None:
        table, about = self._known, {**change.about, MARK: str(change.mark)}
        adding = describe_files(table.io, transaction.table_metadata, change.add, self._outcomes)
        with _producer(transaction, table, change.operation, about) as staged:
            if removed := frozenset(change.remove):  # listing the table's files takes long
                for file in (f for f in _list_live(table) if f.file_path in removed):
                    staged.delete_data_file(file)
            for file in adding:
                staged.append_data_file(file)

    def expire(self, before: int) -> int:
        from pyiceberg.table.update.snapshot import ExpireSnapshots

        table = self._known
        had = len(table.metadata.snapshots)
        old = any(s.timestamp_ms < before and s.snapshot_id not in _refs(table) for s in table.metadata.snapshots)
        if not old or _is_clock_behind(table.metadata):
            return 0
        with self._changing():
            moment = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(milliseconds=before)
            try:
                with table.transaction() as transaction:
                    self._stage_base(transaction)
                    ExpireSnapshots(transaction).older_than(moment).commit()
            except ValueError:  # PyIceberg then reports that one of them is missing
                there = {s.snapshot_id for s in self._catalog.load_table(self._identifier).metadata.snapshots}
                if there.issuperset(s.snapshot_id for s in table.metadata.snapshots):
                    raise
                raise self._outcomes.make_moved() from None
        return had - len(table.metadata.snapshots)

    # -- the catalog

    @property
    def _known(self) -> Table:
        if self._table is None:
            raise ValueError("look first")
        # PyIceberg's own retries do not check whether a file has been added since, regardless of the table's
        # settings.
        self._table.metadata.properties[_RETRIES] = "0"
        return self._table

    @cached_property
    def _catalog(self) -> Catalog:
        properties = {k: v for k, v in self._properties.items() if k != "name"}
        with extras.name_missing(), _IMPORTING:
            from pyiceberg.catalog import load_catalog

            if "sql" in properties.get("type", "") or "sql" in properties.get("uri", "").partition(":")[0]:
                import pyiceberg.catalog.sql  # noqa: F401 - else `load_catalog` imports it, without the lock
            _limit_rest_catalogs(CATALOG_SECONDS)
        logging.getLogger("pyiceberg").setLevel(logging.ERROR)
        name = self._properties.get("name", "sluice")
        if (path := properties.get("uri", "").removeprefix("sqlite:///")) and path != properties.get("uri", ""):
            Path(path).parent.mkdir(parents=True, exist_ok=True)
        try:
            return load_catalog(name, **{**self._defaults, **properties})
        except ModuleNotFoundError as error:
            raise extras.explain_import_error(error) or SetupError(
                f"the catalog of {self.name} needs {error.name}", remedy=f"pip install {error.name}"
            ) from None
        except ValueError:
            raise SetupError(
                f"the feed does not say enough about the catalog of {self.name}",
                remedy="PyIceberg's documentation lists the properties of each type of catalog",
            ) from None

    def _asking(self) -> AbstractContextManager[None]:
        return self._outcomes.asking()

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """Translate errors of a commit. Without a response of the catalog its outcome is Unknown."""
        from pyiceberg.exceptions import (
            BadRequestError,
            CommitFailedException,
            ValidationError,
            ValidationException,
        )

        try:
            yield
        except SluiceError:
            raise
        except (CommitFailedException, ValidationException):
            raise self._outcomes.make_moved() from None
        except (BadRequestError, ValidationError, ValueError, TypeError, pa.ArrowException) as error:
            raise self._outcomes.make_refused(error) from None
        except Exception as error:  # noqa: BLE001 - each catalog and store raises its own
            failure = self._outcomes.translate(error)
            raise (self._outcomes.unknown(error) if isinstance(failure, CatalogUnavailable) else failure) from None


def _make(make: Callable[[], object], there: Callable[[], bool]) -> None:
    """Create it unless another process was faster: catalogs report that differently, so existence decides."""
    try:
        make()
    except Exception:
        if not there():
            raise


def _refs(table: Table) -> set[int]:
    return {ref.snapshot_id for ref in table.metadata.refs.values()}


def _head(table: Table) -> TableHead:
    properties, snapshot = table.metadata.properties, table.current_snapshot()
    mark = properties.get(MARK, "")
    head = TableHead(
        properties.get(LEDGER, ""),
        int(mark) if mark.isdecimal() else 0,
        complete=properties.get(COMPLETE, ""),
        dataset=properties.get(FEED, ""),
    )
    if snapshot is None:
        return head
    summary = {} if snapshot.summary is None else snapshot.summary.additional_properties
    own = summary.get(MARK, "")
    marks = (s.summary.additional_properties.get(MARK) for s in table.metadata.snapshots if s.summary)
    forged = own.isdecimal() and mark not in marks
    return TableHead(
        head.ledger,
        int(own) if forged else head.mark,
        snapshot.snapshot_id,
        int(own) if own.isdecimal() else None,
        summary.get(BATCHES, "").rpartition(" ")[2],
        snapshot.timestamp_ms,
        int(summary.get("total-records", 0)),
        int(summary.get("total-data-files", 0)),
        len(table.metadata.snapshots),
        int(summary.get("total-delete-files", 0)),
        head.complete,
        head.mark if forged else None,
        head.dataset,
    )


def _entries(table: Table, snapshot: Snapshot | None) -> Iterator[ManifestEntry]:
    """The entries of a snapshot's manifests of data files; those of files that it took out, too."""
    from pyiceberg.manifest import ManifestContent

    manifests: list[ManifestFile] = snapshot.manifests(table.io) if snapshot else []
    for manifest in manifests:
        if manifest.content == ManifestContent.DATA:
            yield from manifest.fetch_manifest_entry(table.io, discard_deleted=False)


def _list_live(table: Table) -> Iterator[DataFile]:
    """Yields the files that the table's current snapshot names."""
    return (e.data_file for e in _entries(table, table.current_snapshot()) if _is_live(e))


def _is_live(entry: ManifestEntry) -> bool:
    from pyiceberg.manifest import ManifestEntryStatus

    return bool(entry.status != ManifestEntryStatus.DELETED)


def _arrow(columns: Mapping[str, str]) -> pa.Schema:
    return pa.schema(
        [pa.field(name, arrow_type(parse_type(text.removesuffix(" not null")))) for name, text in columns.items()]
    )


def _evolve(transaction: Transaction, columns: Mapping[str, str]) -> None:
    """Add the columns that the table lacks, and widen those that have become wider. Readers find them by name."""
    from pyiceberg.table import TableProperties

    metadata, digest = transaction.table_metadata, hashlib.sha256(json.dumps(dict(columns)).encode()).hexdigest()[:16]
    unmapped = _is_mapping_incomplete(metadata)
    if metadata.properties.get(_COLUMNS) == f"{digest}/{metadata.current_schema_id}" and not unmapped:
        return  # looking takes PyIceberg longer than adding files
    if unmapped:
        mapping = metadata.schema().name_mapping.model_dump_json()
        transaction.set_properties({TableProperties.DEFAULT_NAME_MAPPING: mapping})
    with transaction.update_schema() as update:
        update.union_by_name(_arrow(columns))
    transaction.set_properties({_COLUMNS: f"{digest}/{transaction.table_metadata.current_schema_id}"})


def _is_mapping_incomplete(metadata: TableMetadata) -> bool:
    """Returns whether readers miss columns in files, since the name mapping lacks them."""
    return not {*_list_names(metadata.schema().name_mapping)}.issubset(_list_names(metadata.name_mapping() or ()))


def _find_renamed(before: TableMetadata, schema: Schema) -> Iterator[tuple[str, str]]:
    """Yields each new column of the schema that the table already had under another name, with that name."""
    former = before.schema()
    if schema.schema_id == former.schema_id:
        return
    added = {*schema.column_names}.difference(former.column_names)
    for name, id in _list_names(before.name_mapping() or ()):
        if name in added and id is not None and (now := former.find_column_name(id)):
            yield name, now


def _list_names(fields: Iterable[MappedField], above: str = "") -> Iterator[tuple[str, int | None]]:
    """Yields each name of a mapping, with those of its parents, and the id of its column."""
    for field in fields:
        for name in field.names:
            yield above + name, field.field_id
            yield from _list_names(field.fields, f"{above}{name}.")


def describe_files(io: FileIO, metadata: TableMetadata, addresses: Sequence[str], outcomes: Outcomes) -> list[DataFile]:
    """The files, as a manifest names them, from their footers. Whether the table can hold a file is found once for
    each shape, which takes PyIceberg longer than all the rest."""
    from pyiceberg.io.pyarrow import (
        _check_pyarrow_schema_compatible,
        data_file_statistics_from_parquet_metadata,
        parquet_path_to_id_mapping,
    )
    from pyiceberg.manifest import DataFile, DataFileContent, FileFormat

    schema, schemas = metadata.schema(), set[pa.Schema]()
    columns, wanted = parquet_path_to_id_mapping(schema), _statistics(metadata)

    def of(address: str) -> DataFile:
        footer, size = _footer(io, address, outcomes)
        # Thousands of files have a handful of schemas: each is checked once.
        if (shape := footer.schema.to_arrow_schema().remove_metadata()) not in schemas:
            _check_pyarrow_schema_compatible(schema, shape, format_version=metadata.format_version)
            schemas.add(shape)
        stats = data_file_statistics_from_parquet_metadata(footer, wanted, columns)
        return DataFile.from_args(
            content=DataFileContent.DATA,
            file_path=address,
            file_format=FileFormat.PARQUET,
            partition=stats.partition(metadata.spec(), schema),
            file_size_in_bytes=size,
            sort_order_id=None,
            spec_id=metadata.default_spec_id,
            equality_ids=None,
            key_metadata=None,
            **_with_bounds(stats.to_serialized_dict(), footer, columns),
        )

    return map_parallel(of, addresses)


def _footer(io: FileIO, address: str, outcomes: Outcomes) -> tuple[pq.FileMetaData, int]:
    """The file's footer, and its size."""
    with outcomes.reading(address), io.new_input(address).open() as stream:
        return pq.read_metadata(stream), stream.seek(0, 2)


def _statistics(metadata: TableMetadata) -> dict[int, Any]:
    """Statistics that PyIceberg takes from footers: of times only how many there are, since Python has not all of
    them, and of decimals, since it refuses files with fewer digits than the table."""
    from pyiceberg.io.pyarrow import MetricModeTypes, MetricsMode, compute_statistics_plan
    from pyiceberg.types import DateType, DecimalType, TimestampType, TimestamptzType

    counted = (DateType, DecimalType, TimestampType, TimestamptzType)
    counts = MetricsMode(MetricModeTypes.COUNTS)
    plan = compute_statistics_plan(metadata.schema(), metadata.properties).items()
    return {id: replace(c, mode=counts) if isinstance(c.iceberg_type, counted) else c for id, c in plan}


def _with_bounds(stats: dict[str, Any], footer: pq.FileMetaData, columns: Mapping[str, int]) -> dict[str, Any]:
    """A file's statistics, completed by the bounds of its times and decimals. Times that microseconds cannot hold have
    none."""
    for name, bounds in read_bounds(footer).items():
        if not (pa.types.is_temporal(bounds.kind) or pa.types.is_decimal(bounds.kind)):
            continue
        stats["null_value_counts"][columns[name]] = bounds.nulls
        packed = [_pack(bounds.kind, value) for value in (bounds.low, bounds.high) if value is not None]
        if packed and None not in packed:
            stats["lower_bounds"][columns[name]], stats["upper_bounds"][columns[name]] = packed
    return stats


def _pack(kind: pa.DataType, value: int) -> bytes | None:
    """A day, a time or a decimal as Iceberg keeps it; None for a time that it does not have."""
    if pa.types.is_decimal(kind):
        return value.to_bytes(max(value, ~value).bit_length() // 8 + 1, "big", signed=True)
    if pa.types.is_date(kind):
        return value.to_bytes(4, "little", signed=True)
    in_us = value * {"s": 1_000_000, "ms": 1000, "us": 1}[kind.unit]
    return in_us.to_bytes(8, "little", signed=True) if -(1 << 63) <= in_us < 1 << 63 else None


def _find_newest_time(metadata: TableMetadata) -> int:
    """Returns the latest time (ms) in the table's metadata."""
    times = [s.timestamp_ms for s in metadata.snapshots] + [e.timestamp_ms for e in metadata.snapshot_log]
    return max([metadata.last_updated_ms, *times, *(e.timestamp_ms for e in metadata.metadata_log)])


def _is_clock_behind(metadata: TableMetadata) -> bool:
    return time.time_ns() // 1_000_000 <= _find_newest_time(metadata)


def without_history(table: Table) -> Any:
    """A transaction on the table without its history. PyIceberg copies the metadata, with all snapshots,
    whenever a step asks for it, and no step asks for a snapshot that no branch or tag names. Its snapshot is newer than
    all times in the table."""
    from pyiceberg.table import Transaction
    from pyiceberg.table.update import AddSnapshotUpdate, update_table_metadata

    # A clock that runs behind the newest snapshot's would put the log out of order, which Iceberg's Java refuses.
    earliest = _find_newest_time(table.metadata) + 1
    # Snapshots that a branch or a tag names stay, since a step may look them up; of the others only the times matter.
    refs = _refs(table)
    snapshots = [s for s in table.metadata.snapshots if s.snapshot_id in refs]
    metadata = table.metadata.model_copy(update={"snapshots": snapshots, "snapshot_log": [], "metadata_log": []})

    class Sparing(Transaction):  # type: ignore[misc, unused-ignore]
        _copied: tuple[int, Any] = (-1, None)

        @property
        def table_metadata(self) -> Any:
            if self._copied[0] != len(self._updates):
                self._copied = len(self._updates), update_table_metadata(metadata, self._updates)
            return self._copied[1]

        @property
        def has_updates(self) -> bool:
            return bool(self._updates)

        def _stage(self, updates: tuple[TableUpdate, ...], requirements: tuple[TableRequirement, ...] = ()) -> Any:
            return super()._stage(tuple(map(self._stamp_snapshot, updates)), requirements)

        def _stamp_snapshot(self, update: TableUpdate) -> TableUpdate:
            if not isinstance(update, AddSnapshotUpdate) or update.snapshot.timestamp_ms >= earliest:
                return update
            return AddSnapshotUpdate(snapshot=update.snapshot.model_copy(update={"timestamp_ms": earliest}))

    return Sparing(table)


def _producer(transaction: Transaction, table: Table, operation: TableOperation, about: dict[str, str]) -> Any:
    from pyiceberg.table.snapshots import Operation, Summary
    from pyiceberg.table.update.snapshot import _OverwriteFiles

    if operation is TableOperation.APPEND:
        update = transaction.update_snapshot(snapshot_properties=about)
        return update.merge_append()

    class Replacing(_OverwriteFiles):  # type: ignore[misc, unused-ignore]
        """PyIceberg sums up appends, overwrites and deletes, and no replacements."""

        def _summary(self, snapshot_properties: dict[str, str] = about) -> Summary:
            summary = super()._summary(snapshot_properties)
            return Summary(Operation(str(operation)), **summary.additional_properties)

    return Replacing(operation=Operation.OVERWRITE, transaction=transaction, io=table.io, snapshot_properties=about)


@lru_cache(maxsize=1)
def _limit_rest_catalogs(seconds: float) -> None:
    """Limit the requests of PyIceberg's REST catalogs, which have no public way to it, once in a process."""
    import requests
    from pyiceberg.catalog import rest

    rest.Session = limit_session(requests.Session, seconds)  # type: ignore[attr-defined]


def _build_options(feed: Feed) -> dict[str, Any]:
    """How PyIceberg reaches the feed's lake in a store: as the feed itself does."""
    if feed.store is None:
        return {}
    from sluice.resources.tables.iceberg_files import build_properties

    return open_client(feed.lake, feed.store).build_iceberg_options() or build_properties(feed.store)
