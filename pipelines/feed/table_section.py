"""A feed's section `table`: the table that also holds the landed rows, and the limits of its format."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, SecretStr, StrictBool, ValidationInfo, model_validator

from sluice.pipelines.feed.sections import Duration, Settings, Text
from sluice.pipelines.feed.stores import scheme
from sluice.pipelines.model.tables import DELTA, ICEBERG
from sluice.pipelines.schema.schema import Field as Column
from sluice.pipelines.schema.schema import Kind, Schema, Type, path_below
from sluice.pipelines.util.units import DAY, sanitize

_NAME = re.compile(r"[A-Za-z0-9_]+(\.[A-Za-z0-9_]+)+")
_SQLITE = "sqlite:///"
_LOGIN = re.compile(r"//[^/@]*@")
QUARANTINE_TABLE, WINDOWS_TABLE = "_quarantine", "_windows"
"""Suffixes of the other tables of a feed in its catalog."""


def _table_name(text: str) -> str:
    if not _NAME.fullmatch(text):
        raise ValueError("is not namespace.table")
    return text


def _catalog(value: object) -> object:
    """A name alone is a catalog that PyIceberg's own configuration describes."""
    settings = {"name": value} if isinstance(value, str) else value
    if not isinstance(settings, dict) or value == "":
        raise ValueError("is no catalog")
    if wrong := next((k for k, v in settings.items() if isinstance(v, (dict, list))), None):
        raise ValueError(f"has a list or a section as {sanitize(str(wrong))}: a property is one value")
    return {k: str(v) for k, v in settings.items()}


def _below_root(catalog: dict[str, SecretStr], info: ValidationInfo) -> dict[str, SecretStr]:
    """A file of SQLite is named from the project's folder on."""
    uri, root = catalog["uri"].get_secret_value() if "uri" in catalog else "", (info.context or {}).get("root")
    path = uri.removeprefix(_SQLITE)
    if root is None or not uri.startswith(_SQLITE) or path.startswith("/"):
        return catalog
    return catalog | {"uri": SecretStr(f"{_SQLITE}{root / path}")}


def _project_catalog() -> Any:
    return {"type": "sql", "uri": f"{_SQLITE}.sluice/catalog.db"}


class IcebergSettings(Settings):
    """An Iceberg table, `namespace.table`. `catalog` holds PyIceberg's properties of a catalog, or its name in
    PyIceberg's own configuration; without it, it is a file of SQLite in the project. All values are secrets: an address
    may hold a password."""

    name: Annotated[Text, AfterValidator(_table_name)]
    catalog: Annotated[
        dict[str, SecretStr], BeforeValidator(_catalog), AfterValidator(_below_root), Field(min_length=1)
    ] = Field(default_factory=_project_catalog, validate_default=True)

    def properties(self) -> dict[str, str]:
        """The catalog's properties, in the clear."""
        return {k: v.get_secret_value() for k, v in self.catalog.items()}

    @property
    def where(self) -> str:
        """Returns the properties that identify the catalog, without credentials."""
        properties = self.properties()
        sql = properties.get("type") == "sql" or "sql" in properties.get("uri", "").partition(":")[0]
        which = ("name", "uri") if sql else ("name", "type", "uri", "warehouse", "prefix", "glue.id", "glue.region")
        return repr([_LOGIN.sub("//", properties.get(k, "")) for k in which])

    @property
    def address(self) -> str:
        """Returns the catalog's address, without credentials; without one, its type or name."""
        properties = self.properties()
        address = _LOGIN.sub("//", properties.get("uri", "")).partition("?")[0]
        return address or properties.get("type") or properties.get("name", "")

    def __repr_args__(self) -> Any:
        return [("name", self.name)]


class DeltaSettings(Settings):
    """A Delta table. Its log lies in the folder of the feed's parts, since it names files relative to itself."""


class TableSettings(Settings):
    """The table of a feed, in one format; with `quarantine`, the quarantine's rows have one, too. Snapshots older than
    `keep_snapshots` (ms) expire, and then the files that they alone name are removed."""

    iceberg: IcebergSettings | None = None
    delta: DeltaSettings | None = None
    quarantine: bool = False
    current: Annotated[str, AfterValidator(_table_name)] | StrictBool = False
    """The table of current rows of a feed with `changes`: its name in Iceberg, `true` in Delta."""
    keep_snapshots: Duration = 5 * DAY

    @model_validator(mode="after")
    def _check_one_format(self) -> TableSettings:
        if (self.iceberg is None) is (self.delta is None):
            raise ValueError(f"names {'no format' if self.iceberg is None else 'two formats'}")
        if self.iceberg and self.current is True:
            raise UnusableTable("has no name for the table of current rows", "such as `current: db.customers_now`")
        if self.delta and isinstance(self.current, str):
            raise UnusableTable("has a name for the table of current rows, which is a folder", "write `current: true`")
        if self.iceberg and isinstance(self.current, str) and self.names.count(self.current) > 1:
            raise UnusableTable(
                "names another table of the feed for current rows", "such as `current: db.customers_now`"
            )
        return self

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the feed's tables in an Iceberg catalog: of its rows, its windows, its quarantine, its current
        rows."""
        if not self.iceberg:
            return ()
        suffixes = ("", WINDOWS_TABLE, *([QUARANTINE_TABLE] if self.quarantine else []))
        current = [self.current] if isinstance(self.current, str) else []
        return (*(self.iceberg.name + suffix for suffix in suffixes), *current)

    @property
    def format(self) -> str:
        """The format's name, as people write it."""
        return ICEBERG if self.iceberg else DELTA


def unfit(columns: Mapping[str, Type], format: str) -> Iterator[tuple[str, str, str]]:
    """Yields (path, type, replacement) of each value that a table of this format would change or does not have.

    Readers take uint32 for int and uint64 for long, and so large values for negative ones. Spark's reader of Iceberg
    knows no unsigned type in a file. Delta has no times in nanoseconds; Iceberg's are of a version of the format that
    few read.
    """
    instead = _INSTEAD | (_IN_ICEBERG if format == ICEBERG else {})
    for name, t in columns.items():
        yield from _unfit(name, t, instead)


def _unfit(path: str, t: Type, instead: Mapping[Kind, str]) -> Iterator[tuple[str, str, str]]:
    if t.kind in instead:
        yield path, str(t), instead[t.kind]
    if t.unit == "ns":
        yield path, str(t), f"{t.kind}(us)"
    for f in t.fields:
        yield from _unfit(path_below(path, t.kind, f.name), f.type, instead)


_INSTEAD = {Kind.UINT32: "int64", Kind.UINT64: "decimal(20,0)"}
_IN_ICEBERG = {Kind.UINT8: "int16", Kind.UINT16: "int32"}


_METADATA = frozenset(
    {"_deleted", "_file", "_last_updated_sequence_number", "_partition", "_pos", "_row_id", "_spec_id"}
)
"""Columns that every Iceberg table has by itself: Spark fails on another of such a name, and on `SELECT *`."""
_NO_NAME_IN_DELTA = frozenset(" ,;{}()=")
_SPARK_S_OWN = ("__delta_internal_", "_tmp_metadata_")
"""How columns begin that Spark adds to those of a Delta table while it reads."""


def find_invalid_names(columns: Mapping[str, Type], format: str) -> Iterator[tuple[str, str]]:
    """(path, why not) of each name that a table of this format cannot have: Spark would not read or alter the table."""
    for name, t in columns.items():
        if format == ICEBERG and name in _METADATA:
            yield name, "it is the name of a metadata column, and Spark reads no other column of that name"
        elif format == DELTA and name.startswith(_SPARK_S_OWN):
            yield name, "Spark has a column of that name while it reads a Delta table, and reads no other one"
        elif format == DELTA:
            yield from _unnameable(name, Column(name, t))


def _unnameable(path: str, f: Column) -> Iterator[tuple[str, str]]:
    if not _NO_NAME_IN_DELTA.isdisjoint(f.name):
        yield path, "its name has a blank or one of `,;{}()=`, and Spark alters no Delta table with such a column"
    for below in f.type.fields:
        yield from _unnameable(path_below(path, f.type.kind, below.name), below)


def names_fit(table: TableSettings | None, before: Schema, after: Schema) -> bool:
    """Returns whether `after` has only names that the feed's table can have, or that `before` has too."""
    if table is None:
        return True
    old, new = (set(find_invalid_names({f.name: f.type for f in s.fields}, table.format)) for s in (before, after))
    return new <= old


class UnusableTable(ValueError):
    """A table that the feed cannot have."""

    def __init__(self, what: str, remedy: str) -> None:
        super().__init__(what)
        self.remedy = remedy


_ANOTHER_NAME = (
    "leave it out of the schema (what JSON has under that name stays in _extra), or give it another name, in `schema` "
    'as in `net_price: float64 from "net price"`, in Avro by an alias'
)


def check_holds(table: TableSettings, columns: Schema | None) -> None:
    """Raises ValueError if the table cannot hold a column of the schema."""
    types = {f.name: f.type for f in columns.fields} if columns else {}
    for path, type_text, instead in unfit(types, table.format):
        raise UnusableTable(
            f"cannot hold {path}, which is {type_text}: {table.format} does not have that type", f"write {instead}"
        )
    for path, why in find_invalid_names(types, table.format):
        raise UnusableTable(f"cannot hold {path}: {why}", _ANOTHER_NAME)


_ESCAPE = re.compile("%[0-9A-Fa-f]{2}")


def check_address(table: TableSettings, lake: str) -> None:
    """Raises ValueError if the format's library would write outside of the lake at this address."""
    in_store, wrong = bool(scheme(lake)), ""
    if table.delta and (escape := _ESCAPE.search(lake)):
        wrong = f"deltalake takes {escape[0]} for another character"
    elif table.delta and not in_store and "\\" in lake:
        wrong = "deltalake takes \\ for /"
    elif table.iceberg and in_store and (sign := next((c for c in "#?" if c in lake), "")):
        wrong = f"PyIceberg takes {sign} for the end of the address"
    if wrong:
        raise ValueError(f"cannot lie in the lake {lake}: {wrong}; give the lake another name")
