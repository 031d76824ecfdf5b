"""A feed as its file says it: typed, frozen and validated; secrets are masked wherever a feed is shown.

`load_feed` reads one file of `feeds/`, `load_feeds` the folder. What is wrong raises FeedError, which names
file, key and remedy, all problems at once, and never quotes a value. Each stage gets its own settings object.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    InstanceOf,
    ValidationInfo,
    field_serializer,
    model_validator,
)

from sluice.pipelines import units
from sluice.pipelines.contract.suite import CONTRACT, Contract, ContractError, read_contract
from sluice.pipelines.errors import FeedError
from sluice.pipelines.feed_errors import problems_of, raise_problems
from sluice.pipelines.kafka_settings import KafkaSettings
from sluice.pipelines.ports import FetchLimits
from sluice.pipelines.s3_settings import S3Settings, s3_address
from sluice.pipelines.settings import Count, Duration, GroupName, Name, Settings, Size, Text, below_root, number
from sluice.pipelines.shape import Shape
from sluice.pipelines.topics import TopicFilter, TopicName
from sluice.pipelines.typed.schema import Schema, parse_schema
from sluice.pipelines.units import DAY, HOUR, MINUTE
from sluice.pipelines.values import Isolation
from sluice.pipelines.yaml_file import Problem, YamlError, read_yaml

__all__ = [
    "Alerts",
    "CommitMode",
    "CompactionSettings",
    "Compression",
    "DeadLetters",
    "Feed",
    "FetchSettings",
    "Format",
    "KafkaSettings",
    "LandingSettings",
    "Limits",
    "OnDrift",
    "OnGroupMoved",
    "OnLoss",
    "OnUndecodable",
    "Policies",
    "PublishPolicy",
    "QuarantineLimit",
    "S3Settings",
    "SparkSettings",
    "Start",
    "StartKind",
    "TopicFilter",
    "load_feed",
    "load_feeds",
    "parse_start",
]


class StartKind(StrEnum):
    EARLIEST = "earliest"
    LATEST = "latest"
    TIME = "time"
    LOOK_BACK = "look-back"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Start:
    """Where a partition without committed offset begins. `ms`: the time since the epoch, or how far back."""

    kind: StartKind
    ms: int = 0

    def resolve(self, now: int) -> int:
        """The time (ms since the epoch) that a TIME or LOOK_BACK start names at `now`."""
        return max(0, now - self.ms) if self.kind is StartKind.LOOK_BACK else self.ms

    def __str__(self) -> str:
        match self.kind:
            case StartKind.TIME:
                return units.show_instant(self.ms)
            case StartKind.LOOK_BACK:
                return units.show_duration(self.ms)
            case kind:
                return str(kind)


def parse_start(value: object) -> Start:
    """`earliest`, `latest`, `fail`, a look-back such as `7d`, or an ISO time with zone. Raises ValueError."""
    if isinstance(value, Start):
        return value
    if value in ("earliest", "latest", "fail"):
        return Start(StartKind(value))
    for kind, parse in ((StartKind.LOOK_BACK, units.parse_duration), (StartKind.TIME, units.parse_instant)):
        try:
            return Start(kind, parse(value))
        except ValueError:
            continue
    raise ValueError("is no place to start")


class OnLoss(StrEnum):
    FAIL = "fail"
    ACCEPT = "accept"


class OnGroupMoved(StrEnum):
    REFUSE = "refuse"
    ADOPT = "adopt"
    OVERWRITE = "overwrite"


class OnUndecodable(StrEnum):
    QUARANTINE = "quarantine"
    FAIL = "fail"
    DROP = "drop"


class OnDrift(StrEnum):
    EXTRA = "extra"
    EVOLVE = "evolve"
    QUARANTINE = "quarantine"
    FAIL = "fail"


class Format(StrEnum):
    RAW = "raw"
    JSON = "json"


class CommitMode(StrEnum):
    TRANSACTIONAL = "transactional"
    PLAIN = "plain"
    NONE = "none"


class PublishPolicy(StrEnum):
    BY_PARTITION = "by_partition"
    ALL_OR_NOTHING = "all_or_nothing"


class Compression(StrEnum):
    ZSTD = "zstd"
    SNAPPY = "snappy"
    LZ4 = "lz4"
    GZIP = "gzip"
    NONE = "none"


class Layout(StrEnum):
    WINDOW = "window"
    RECORD_TIME = "record_time"


class LandingSettings(Settings):
    """How parts are written. `row_group_rows` bounds a row group, `target_file_bytes` a part."""

    layout: Layout = Layout.WINDOW
    compression: Compression = Compression.ZSTD
    compression_level: Annotated[int, BeforeValidator(number), Field(ge=1, le=22)] | None = Field(
        default_factory=lambda data: 1 if data["compression"] is Compression.ZSTD else None
    )
    row_group_rows: Annotated[Count, Field(le=1 << 24)] = 1 << 18
    target_file_bytes: Size = 256 << 20

    @model_validator(mode="after")
    def _level_fits(self) -> Self:
        highest = {Compression.ZSTD: 22, Compression.GZIP: 9}.get(self.compression)
        if self.compression_level is not None and (highest is None or self.compression_level > highest):
            raise ValueError("has a compression_level that this compression does not know (zstd 1-22, gzip 1-9)")
        return self


class CompactionSettings(Settings):
    """How small parts are merged: into files of about `target_file_bytes`, and not those that have half of that;
    `batch_bytes` of them are put in place at once, and `memory` is what that may take.
    """

    target_file_bytes: Size = 256 << 20
    batch_bytes: Size = 2 << 30
    memory: Size = 512 << 20


class Limits(Settings):
    """Bounds. `records` and `bytes` are for one run; the rest shapes slices and tasks."""

    records: Count | None = None
    bytes: Size | None = None
    slice_bytes: Size = 128 << 20
    task_bytes: Size = 512 << 20
    max_tasks: Annotated[Count, Field(le=100_000)] = 1000
    task_memory: Size = 512 << 20


class QuarantineLimit(Settings):
    """A batch fails before publishing once more than `share` of its records are bad, and `at_least` are; and once more
    than `at_most` are, whatever their share."""

    share: Annotated[float, BeforeValidator(number), Field(ge=0, le=1, allow_inf_nan=False)] = 0.01
    at_least: Annotated[int, BeforeValidator(number), Field(ge=0, lt=1 << 62)] = 100
    at_most: Annotated[int, BeforeValidator(number), Field(ge=0, lt=1 << 62)] | None = None


class Policies(Settings):
    """What to do about each event that has a name (DESIGN §8)."""

    on_loss: OnLoss = OnLoss.FAIL
    on_recreated: Literal["refuse"] = "refuse"
    on_truncated: Literal["refuse"] = "refuse"
    on_group_moved: OnGroupMoved = OnGroupMoved.REFUSE
    on_undecodable: OnUndecodable = OnUndecodable.QUARANTINE
    on_drift: OnDrift = OnDrift.EXTRA
    quarantine_limit: QuarantineLimit = QuarantineLimit()


class DeadLetters(Settings):
    """Where the records that are quarantined go, too, in the transaction that commits the offsets."""

    topic: TopicName


class Alerts(Settings):
    """From when on the sensor speaks up, in ms. `lag`: how old the oldest record that is owed may be; without it, two
    windows and what they settle. `partial`: how long after it closed a window may be landed in part. `transaction`: how
    long ago one that holds records back was last written to. `retention`: how long before Kafka deletes what is owed.
    """

    lag: Duration | None = None
    partial: Duration = 6 * HOUR
    transaction: Duration = 15 * MINUTE
    retention: Duration = DAY

    def late(self, window: WindowSettings) -> int:
        """The lag that is told of."""
        return 2 * window.length + window.settle if self.lag is None else self.lag


_FETCH = FetchLimits()


class FetchSettings(Settings):
    """Bounds of a task's reading, and the rack whose replicas it prefers."""

    request_bytes: Size = _FETCH.request_bytes
    partition_bytes: Size = _FETCH.partition_bytes
    ahead_bytes: Size = _FETCH.ahead_bytes
    active_slices: Annotated[Count, Field(le=10_000)] = _FETCH.active_slices
    rack: Text | None = None

    def limits(self) -> FetchLimits:
        return FetchLimits(self.active_slices, self.request_bytes, self.partition_bytes, self.ahead_bytes)


_SECRET = re.compile(
    r"password|passwd|secret|token|credential|jaas|private|access[._-]?key|(^|[._-])key$", re.IGNORECASE
)
MASK = "**********"


class SparkSettings(Settings):
    """Which Spark runs the tasks. `conf` goes to the session as it is; what looks secret in it is masked."""

    master: Text | None = None
    conf: dict[str, Annotated[str, BeforeValidator(lambda v: _conf_value(v))]] = Field(default_factory=dict)

    @field_serializer("conf")
    def _masked(self, conf: dict[str, str]) -> dict[str, str]:
        return {k: MASK if _SECRET.search(k) else v for k, v in conf.items()}

    def __repr_args__(self) -> Any:
        return [("master", self.master), ("conf", self._masked(self.conf))]


def _conf_value(value: object) -> object:
    if isinstance(value, bool):
        return str(value).lower()
    return str(value) if isinstance(value, int | float) else value


def _lake(text: str, info: ValidationInfo) -> str:
    if text.startswith("s3://"):
        return s3_address(text)
    if "://" in text:
        raise ValueError("is neither a folder nor s3://bucket/prefix")
    return below_root(text, info)


def _even_window(length: int) -> int:
    """Windows that a calendar has: every hour, and every day, holds a whole number of them."""
    if length < MINUTE or length % MINUTE or (HOUR % length and (length % HOUR or DAY % length)):
        raise ValueError("is no part of an hour in whole minutes, nor of a day in whole hours (15m, 1h, 6h, 1d)")
    return length


class WindowSettings(Settings):
    """All in ms: a window's `length`, how long to `settle` after its end, how far ahead of the clock a stamp may be."""

    length: Annotated[Duration, AfterValidator(_even_window)] = HOUR
    settle: Duration = 600_000
    max_skew: Duration = 300_000

    @model_validator(mode="before")
    @classmethod
    def _spelled(cls, value: object) -> object:
        """`window: 15m` says the length alone."""
        return {"length": value} if isinstance(value, str) else value

    def start_of(self, time: int) -> int:
        """The start of the window that holds `time`; windows are aligned to the epoch, in UTC."""
        return time - time % self.length

    def last_boundary(self, now: int) -> int:
        """The newest boundary that may be resolved at `now`."""
        return self.start_of(now - self.settle)

    def closed(self, window: int, now: int) -> bool:
        """Whether the window that starts at `window` has ended, and settled."""
        return window + self.length <= self.last_boundary(now)


def _sent(letters: DeadLetters | None, info: ValidationInfo) -> DeadLetters | None:
    commit, topics = info.data.get("commit"), info.data.get("topics")
    if letters and commit not in (CommitMode.TRANSACTIONAL, None):
        raise ValueError("need the transaction of `commit: transactional`")
    if letters and topics and topics.takes(letters.topic):
        raise ValueError("go to a topic that this feed reads")
    return letters


class Feed(Settings):
    """One dataset: its topics, its group, and how they are landed and committed."""

    name: Name = Field(alias="feed")
    kafka: KafkaSettings
    topics: TopicFilter
    group: GroupName = Field(default_factory=lambda data: f"sluice-{data['name']}")
    start: Annotated[Start, BeforeValidator(parse_start)]
    isolation: Isolation = Isolation.READ_COMMITTED
    format: Format = Format.RAW
    columns: Annotated[InstanceOf[Schema], BeforeValidator(parse_schema)] | None = Field(default=None, alias="schema")
    lake: Annotated[Text, AfterValidator(_lake)] = Field(default=".sluice/lake", validate_default=True)
    s3: S3Settings = S3Settings()
    window: WindowSettings = WindowSettings()
    publish: PublishPolicy = PublishPolicy.BY_PARTITION
    commit: CommitMode = CommitMode.TRANSACTIONAL
    transactional_id: GroupName = Field(default_factory=lambda data: f"sluice-{data['group']}-{data['name']}")
    dead_letters: Annotated[DeadLetters | None, AfterValidator(_sent)] = None
    landing: LandingSettings = LandingSettings()
    compaction: CompactionSettings = CompactionSettings()
    limits: Limits = Limits()
    policies: Policies = Policies()
    alerts: Alerts = Alerts()
    contract: InstanceOf[Contract] | None = Field(default=None, exclude=True)
    fetch: FetchSettings = FetchSettings()
    spark: SparkSettings = SparkSettings()

    @field_serializer("columns")
    def _said(self, columns: Schema | None) -> dict[str, str] | None:
        return columns.texts() if columns else None

    @property
    def shape(self) -> Shape:
        """What its files say that records are made to."""
        dropping = self.policies.on_undecodable is OnUndecodable.DROP
        closed = self.columns is not None and self.policies.on_drift is OnDrift.QUARANTINE
        return Shape(self.columns, self.contract, dropping, closed)

    @model_validator(mode="after")
    def _typed_has_columns(self) -> Self:
        if (self.columns is None) is (self.format is Format.JSON):
            raise ValueError("has a schema without `format: json`, or `format: json` without a schema")
        if self.columns is None and self.policies.on_drift is not OnDrift.EXTRA:
            raise ValueError("has policies.on_drift without a schema that records could drift from")
        return self


def load_feed(path: Path, environ: Mapping[str, str]) -> Feed:
    """The feed in the file; its relative paths count from the parent of the file's folder.

    With the contract in the file beside it, if there is one. Raises FeedError.
    """
    found = _load(path, environ)
    if isinstance(found, Feed):
        return found
    raise_problems(found)


def load_feeds(folder: Path, environ: Mapping[str, str]) -> dict[str, Feed]:
    """Every feed of the folder's `*.yaml`, by name. Raises one FeedError with all problems of all files."""
    if not folder.is_dir():
        raise FeedError(f"no folder {folder}", remedy="run in the project's folder, where feeds/ is, or name it")
    feeds: dict[str, tuple[Path, Feed]] = {}
    problems = _orphans(folder)
    for path in sorted(p for p in folder.iterdir() if p.suffix in (".yaml", ".yml") and not p.name.startswith(".")):
        found = _load(path, environ)
        if isinstance(found, tuple):
            problems += found
            continue
        problems += [(str(path), p) for p in _clashes(found, feeds)]
        feeds.setdefault(found.name, (path, found))
    if problems:
        raise_problems(problems)
    return {name: feed for name, (_, feed) in feeds.items()}


def _load(path: Path, environ: Mapping[str, str]) -> Feed | tuple[tuple[str, Problem], ...]:
    found = _read(path, environ)
    if isinstance(found, Feed):
        return _under_contract(found, path.with_suffix(CONTRACT))
    return tuple((str(path), p) for p in found)


def _under_contract(feed: Feed, path: Path) -> Feed | tuple[tuple[str, Problem], ...]:
    try:
        contract = read_contract(path, feed.columns)
    except ContractError as error:
        return tuple((str(path), Problem(p.place, p.what, p.remedy)) for p in error.problems)
    return feed.model_copy(update={"contract": contract}) if contract else feed


def _orphans(folder: Path) -> list[tuple[str, Problem]]:
    """Contracts of no feed: somebody believes that they are kept."""
    found = sorted(p for p in folder.glob(f"*{CONTRACT}") if not p.name.startswith("."))
    names = [(p, f"{p.name.removesuffix(CONTRACT)}.yaml") for p in found]
    missing = [(p, name) for p, name in names if not (folder / name).exists()]
    return [(str(p), Problem("", f"has no {name} beside it", "name it as the feed's file")) for p, name in missing]


def _read(path: Path, environ: Mapping[str, str]) -> Feed | tuple[Problem, ...]:
    if not path.exists():
        near = ", ".join(sorted(p.name for p in path.parent.glob("*.yaml"))[:10])
        return (Problem("", "does not exist", f"feeds there: {near}" if near else "create it; see docs/feeds.md"),)
    if path.suffix != ".yaml":
        return (Problem("", "does not end in .yaml", "rename it"),)
    try:
        data = {"feed": path.stem} | read_yaml(path, environ)
    except YamlError as error:
        return error.problems
    if "contract" in data:
        return (Problem("contract", "is unknown", f"a contract is a file of its own, {path.stem}{CONTRACT}"),)
    return _validated(reaching_kafka(data, environ), path.resolve().parent.parent)


BOOTSTRAP, LOCAL_KAFKA = "KAFKA_BOOTSTRAP", "SLUICE_LOCAL_KAFKA"
"""Variables of the environment: where Kafka is for feeds that do not say so, the second where the first is not set."""


def reaching_kafka(data: dict[str, Any], environ: Mapping[str, str]) -> dict[str, Any]:
    """The feed with where Kafka is, from the environment where the file does not say so."""
    kafka, known = data.get("kafka", {}), environ.get(BOOTSTRAP) or environ.get(LOCAL_KAFKA)
    if not known or not isinstance(kafka, dict) or kafka.get("bootstrap") is not None:
        return data
    return data | {"kafka": kafka | {"bootstrap": known}}


def _validated(data: dict[str, Any], root: Path) -> Feed | tuple[Problem, ...]:
    found: Feed | None = None
    problems: tuple[Problem, ...] = ()
    try:
        found = Feed.model_validate(data, context={"root": root})
    except ValueError as error:
        problems = problems_of(error, Feed)
    return found or problems


def _clashes(feed: Feed, others: Mapping[str, tuple[Path, Feed]]) -> tuple[Problem, ...]:
    """What two feeds must not share: their name, and on one Kafka their group and transactional id."""
    out = []
    for path, other in others.values():
        if other.name == feed.name:
            out.append(Problem("feed", f"is `{feed.name}` in {path.name} too", "give each feed a name of its own"))
        elif other.kafka.bootstrap == feed.kafka.bootstrap and other.group == feed.group:
            out.append(
                Problem("group", f"is shared with feed `{other.name}`", "each feed commits for a group of its own")
            )
        elif other.kafka.bootstrap == feed.kafka.bootstrap and other.transactional_id == feed.transactional_id:
            out.append(
                Problem("transactional_id", f"is shared with feed `{other.name}`", "they would fence each other")
            )
    return tuple(out)
