"""The sections of a feed file: typed, frozen and validated. Secrets are masked wherever a section is shown.

docs/feeds.md explains every key. Sizes are in bytes, durations in ms.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import date
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Self
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SecretStr,
    StrictBool,
    StringConstraints,
    ValidationInfo,
    WithJsonSchema,
    field_serializer,
    field_validator,
    model_serializer,
    model_validator,
)

from sluice.pipelines.feed.topic_selection import TopicName
from sluice.pipelines.model.kafka import FetchLimits
from sluice.pipelines.model.plans import Assignor
from sluice.pipelines.schema.protection import DROPPED, LEAST_KEY, Action, Rule
from sluice.pipelines.util import units
from sluice.pipelines.util.local_days import find_day, start_of_day
from sluice.pipelines.util.units import (
    DAY,
    HOUR,
    MINUTE,
    parse_duration,
    parse_period,
    parse_size,
    sanitize,
    show_duration,
    show_window,
)


def number(value: object) -> object:
    """The value, unless it is true or false, which pydantic would take for a number. Raises ValueError."""
    if isinstance(value, bool):
        raise ValueError("is not a number")
    return value


def printable(text: str) -> str:
    """The text, if every character can be printed. Raises ValueError."""
    if not text.isprintable():
        raise ValueError("has characters that cannot be printed")
    return text


def below_root(text: str, info: ValidationInfo) -> str:
    """The path, relative to the project's root if the validation context names one. Raises ValueError."""
    root = (info.context or {}).get("root")
    try:
        return str(root / Path(text).expanduser()) if root else text
    except RuntimeError:
        raise ValueError("starts with ~ and a user that is not known here") from None


_SIZE = {"type": ["integer", "string"], "exclusiveMinimum": 0, "pattern": "^ *[0-9]+ *([KMGT]i?B|B)? *$"}
Size = Annotated[int, BeforeValidator(parse_size), Field(gt=0, lt=1 << 62), WithJsonSchema(_SIZE)]
Count = Annotated[int, BeforeValidator(number), Field(ge=1, lt=1 << 62)]
_DURATION = {"type": "string", "pattern": "^ *[0-9]+ *(ms|s|m|h|d) *$"}
Duration = Annotated[int, BeforeValidator(parse_duration), Field(lt=1 << 40), WithJsonSchema(_DURATION)]
"""Milliseconds."""
Millis = Annotated[int, BeforeValidator(number), Field(ge=1, lt=1 << 31)]
Secret = Annotated[SecretStr, Field(min_length=1)]
Text = Annotated[str, StringConstraints(min_length=1, max_length=1000), AfterValidator(printable)]
Description = Annotated[str, StringConstraints(min_length=1, max_length=500), AfterValidator(printable)]
NAME_PATTERN = "[a-z][a-z0-9_]{0,63}"
"""The whole name of a feed or report."""
Name = Annotated[str, StringConstraints(pattern=rf"^{NAME_PATTERN}\z")]
GroupName = Annotated[str, StringConstraints(min_length=1, max_length=249), AfterValidator(printable)]
Owner = Annotated[
    str, StringConstraints(pattern=r"^(team:.+|[A-Za-z0-9._%+-]+@[A-Za-z0-9.-]+\.[A-Za-z]{2,7})\z", max_length=200)
]
"""By Dagster's rules, like the following ones: an email address, or a team."""
TagKey = Annotated[str, StringConstraints(pattern=r"^([A-Za-z0-9_.-]{1,63}/)?[A-Za-z0-9_.-]{1,63}\z")]
TagValue = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.-]{0,63}\z")]
AssetGroup = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_]+\z", max_length=200)]
LocalFile = Annotated[Text, AfterValidator(below_root)]


class Settings(BaseModel):
    """Settings are frozen, forbid unknown keys, and keep values out of errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True, defer_build=True)


TUNING = {
    "range_bytes": "limits.slice_bytes",
    "task_bytes": "limits.task_bytes",
    "task_memory": "limits.task_memory",
    "max_tasks": "limits.max_tasks",
    "tasks_per_broker": "fetch.tasks_per_broker",
    "active_ranges": "fetch.active_slices",
    "request_bytes": "fetch.request_bytes",
    "partition_bytes": "fetch.partition_bytes",
    "ahead_bytes": "fetch.ahead_bytes",
    "row_group_rows": "landing.row_group_rows",
    "file_bytes": "landing.target_file_bytes",
    "compaction_file_bytes": "compaction.target_file_bytes",
    "compaction_batch_bytes": "compaction.batch_bytes",
    "compaction_memory": "compaction.memory",
    "s3_connect_timeout_ms": "s3.connect_timeout_ms",
    "s3_read_timeout_ms": "s3.read_timeout_ms",
    "s3_retries": "s3.retries",
    "s3_part_bytes": "s3.part_bytes",
    "s3_buffer_bytes": "s3.buffer_bytes",
    "spark_start_timeout": "spark.start_timeout",
}
"""Keys of a feed file's section `tuning`, each with its place in `Feed`, which feed files may use instead."""
MOVED_KEYS = {old_key: f"tuning.{key}" for key, old_key in TUNING.items()} | {
    "compaction": "tuning",
    "window.settle": "window.grace",
}
"""Deprecated keys and sections of a feed file, with those that replace them."""


class StartKind(StrEnum):
    """The ways to say where a partition begins."""

    EARLIEST = "earliest"
    LATEST = "latest"
    TIME = "time"
    LOOK_BACK = "look-back"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Start:
    """Where a partition without a committed offset begins.

    `ms` is a time since the epoch (TIME) or how far to look back (LOOK_BACK).
    """

    kind: StartKind
    ms: int = 0

    def resolve(self, now: int) -> int:
        """The time (ms since the epoch) that a TIME or LOOK_BACK start names at `now`."""
        return max(0, now - self.ms) if self.kind is StartKind.LOOK_BACK else self.ms

    def earliest(self, now: int) -> int | None:
        """The earliest time (ms since the epoch) of a feed that is begun at `now`; None where only Kafka knows."""
        if self.kind in (StartKind.TIME, StartKind.LOOK_BACK):
            return self.resolve(now)
        return now if self.kind is StartKind.LATEST else None

    def __str__(self) -> str:
        match self.kind:
            case StartKind.TIME:
                return units.show_instant(self.ms)
            case StartKind.LOOK_BACK:
                return units.show_duration(self.ms)
            case kind:
                return str(kind)


def parse_start(value: object) -> Start:
    """The start that a feed file names. Raises ValueError.

    One of `earliest`, `latest`, `fail`, a look-back such as `7d`, or an ISO time with zone.
    """
    if isinstance(value, Start):
        return value
    if value in ("earliest", "latest", "fail"):
        return Start(StartKind(value))
    for kind, parse in ((StartKind.LOOK_BACK, units.parse_duration), (StartKind.TIME, units.parse_instant)):
        try:
            return Start(kind, parse(value))
        except ValueError:
            continue
    raise ValueError("is not a place to start")


class OnLoss(StrEnum):
    """The policy for offsets that Kafka deleted before they landed."""

    FAIL = "fail"
    ACCEPT = "accept"


class OnGroupMoved(StrEnum):
    """The policy for committed offsets that somebody else moved."""

    REFUSE = "refuse"
    ADOPT = "adopt"
    OVERWRITE = "overwrite"


class OnUndecodable(StrEnum):
    """The policy for records that cannot become rows."""

    QUARANTINE = "quarantine"
    FAIL = "fail"
    DROP = "drop"


class OnDrift(StrEnum):
    """The policy for fields that the schema does not name or that outgrow it."""

    EXTRA = "extra"
    EVOLVE = "evolve"
    QUARANTINE = "quarantine"
    FAIL = "fail"


class RecordFormat(StrEnum):
    """The format of records: raw bytes, JSON that a schema types, or a format whose own schema gives the columns."""

    RAW = "raw"
    JSON = "json"
    AVRO = "avro"
    JSON_SCHEMA = "json_schema"
    PROTOBUF = "protobuf"


class CommitMode(StrEnum):
    """How offsets are committed to the group."""

    TRANSACTIONAL = "transactional"
    PLAIN = "plain"
    NONE = "none"


class OffsetStore(StrEnum):
    """Where a group's committed offsets are kept."""

    KAFKA = "kafka"
    ZOOKEEPER = "zookeeper"


_ENSEMBLE = re.compile(r"[^\s,/@:]+:[0-9]{1,5}(,[^\s,/@:]+:[0-9]{1,5})*(/[^\s,]*[^\s,/])?")


def _ensemble(text: str) -> str:
    if not _ENSEMBLE.fullmatch(text) or "//" in text:
        raise ValueError("is no address of ZooKeeper")
    return text


class OffsetSettings(Settings):
    """Where the group's committed offsets are kept. How they are committed is `commit`'s to say.

    `connect` is the address of a ZooKeeper with the old consumers' layout: `host:2181,host:2181/chroot`. `dual_commit`,
    for offsets in Kafka, commits there too, and continues at the larger one. A run waits `patience` (ms) for other
    consumers that own its partitions in ZooKeeper.
    """

    store: OffsetStore = OffsetStore.KAFKA
    connect: Annotated[Text, AfterValidator(_ensemble)] | None = None
    dual_commit: StrictBool = False
    patience: Duration = 30_000

    @model_validator(mode="after")
    def _has_an_address(self) -> Self:
        if self.dual_commit and self.store is OffsetStore.ZOOKEEPER:
            raise ValueError("has `dual_commit`, which is for `store: kafka`: it commits in ZooKeeper as well")
        if self.in_zookeeper and self.connect is None:
            raise ValueError("needs `connect`, the address of ZooKeeper")
        return self

    @property
    def in_zookeeper(self) -> bool:
        """Returns whether the feed's offsets are in ZooKeeper, or there too."""
        return self.store is OffsetStore.ZOOKEEPER or self.dual_commit


class PublishPolicy(StrEnum):
    """The policy for a batch with failed offset ranges: publish the partitions that succeeded, or none."""

    BY_PARTITION = "by_partition"
    ALL_OR_NOTHING = "all_or_nothing"


class Compression(StrEnum):
    """Parquet compression."""

    ZSTD = "zstd"
    SNAPPY = "snappy"
    LZ4 = "lz4"
    GZIP = "gzip"
    NONE = "none"


class Layout(StrEnum):
    """Which folder a row goes to: that of its window, or that of its own time."""

    WINDOW = "window"
    RECORD_TIME = "record_time"


class LandingSettings(Settings):
    """How parts are written. A row group has at most `row_group_rows`; a part ends at about `target_file_bytes`.

    Small offset ranges of one task and window share files up to that size: with `shared_files` from two on, without it
    never; if it is left out, from `landing.sharing.MANY` on. The columns `bloom_filters`, or members such as
    `after.id`, have Bloom filters, by which readers skip row groups without a value.
    """

    layout: Layout = Layout.WINDOW
    compression: Compression = Compression.ZSTD
    compression_level: Annotated[int, BeforeValidator(number), Field(ge=1, le=22)] | None = Field(
        default_factory=lambda data: 1 if data["compression"] is Compression.ZSTD else None
    )
    row_group_rows: Annotated[Count, Field(le=1 << 24)] = 1 << 18
    target_file_bytes: Size = 256 << 20
    shared_files: bool | None = None
    bloom_filters: tuple[Text, ...] = ()

    @model_validator(mode="after")
    def _level_fits(self) -> Self:
        highest = {Compression.ZSTD: 22, Compression.GZIP: 9}.get(self.compression)
        if self.compression_level is not None and (highest is None or self.compression_level > highest):
            raise ValueError("has a compression_level that this compression does not know (zstd 1-22, gzip 1-9)")
        return self


class CompactionSettings(Settings):
    """How small parts are merged into files of about `target_file_bytes`. Parts of half that size are left alone.

    One compaction replaces at most `batch_bytes` of parts at once, and may use `memory`.
    """

    target_file_bytes: Size = 256 << 20
    batch_bytes: Size = 2 << 30
    memory: Size = 512 << 20


class Limits(Settings):
    """Bounds of a run (`records`, `bytes`), and of its offset ranges and tasks."""

    records: Count | None = None
    bytes: Size | None = None
    slice_bytes: Size = 128 << 20
    task_bytes: Size = 512 << 20
    max_tasks: Annotated[Count, Field(le=100_000)] = 1000
    task_memory: Size = 512 << 20


class QuarantineLimit(Settings):
    """How many bad records a batch may have. Beyond that it fails before it is published.

    A batch fails when more than `share` of its records are bad and `at_least` of them are, or when more than `at_most`
    are bad, whatever their share.
    """

    share: Annotated[float, BeforeValidator(number), Field(ge=0, le=1, allow_inf_nan=False)] = 0.01
    at_least: Annotated[int, BeforeValidator(number), Field(ge=0, lt=1 << 62)] = 100
    at_most: Annotated[int, BeforeValidator(number), Field(ge=0, lt=1 << 62)] | None = None


class Policies(Settings):
    """The policy for each named event (docs/developers/design/failures.md)."""

    on_loss: OnLoss = OnLoss.FAIL
    on_group_moved: OnGroupMoved = OnGroupMoved.REFUSE
    on_undecodable: OnUndecodable = OnUndecodable.QUARANTINE
    on_drift: OnDrift = OnDrift.EXTRA
    quarantine_limit: QuarantineLimit = QuarantineLimit()


class DeadLetters(Settings):
    """The topic to which quarantined records are published as well, in the transaction that commits the offsets."""

    topic: TopicName


def _check_length(key: SecretStr) -> SecretStr:
    if len(key.get_secret_value().encode()) < LEAST_KEY:
        raise ValueError(f"is shorter than {LEAST_KEY} bytes, and could be guessed from hashes")
    return key


class FieldProtection(Settings):
    """The rule of a field's values before they are written: `drop`, or one of these keys."""

    hmac: Annotated[Secret, AfterValidator(_check_length)] | None = None
    encrypt: Annotated[Secret, AfterValidator(_check_length)] | None = None
    keep_last: Annotated[int, BeforeValidator(number), Field(ge=1, le=64)] | None = None

    @model_validator(mode="before")
    @classmethod
    def _accept_drop(cls, value: object) -> object:
        if value != Action.DROP and (not isinstance(value, dict) or len(value) != 1):
            raise ValueError("is none of `drop`, `{hmac: KEY}`, `{keep_last: N}` and `{encrypt: KEY}`")
        return {} if value == Action.DROP else value

    @model_serializer
    def _as_written(self) -> Any:
        if self.hmac is not None:
            return {"hmac": MASK}
        if self.encrypt is not None:
            return {"encrypt": MASK}
        return {"keep_last": self.keep_last} if self.keep_last else str(Action.DROP)

    @property
    def rule(self) -> Rule:
        """The rule as formats apply it."""
        if self.hmac is not None:
            return Rule.of_key(self.hmac)
        if self.encrypt is not None:
            return Rule.of_key(self.encrypt, Action.ENCRYPT)
        return Rule(Action.KEEP_LAST, keep=self.keep_last) if self.keep_last else DROPPED


class Alerts(Settings):
    """When the sensor raises an alarm. All in ms.

    `lag`: the oldest pending record is older than this (None: two windows and the grace period). `partial`: a window
    closed this long ago is landed only in part. `transaction`: a transaction that holds records back was last written
    to this long ago. `retention`: Kafka will delete pending records within this time.
    """

    lag: Duration | None = None
    partial: Duration = 6 * HOUR
    transaction: Duration = 15 * MINUTE
    retention: Duration = DAY

    def late(self, window: WindowSettings) -> int:
        """The lag (ms) beyond which the sensor raises an alarm."""
        return 2 * window.length + window.grace if self.lag is None else self.lag


_FETCH = FetchLimits()


class FetchSettings(Settings):
    """Bounds of a task's fetches, the preferred rack, and the assignment of offset ranges to tasks.

    At most `tasks_per_broker` tasks of a run read from one broker at once (None: no bound).
    """

    request_bytes: Size = _FETCH.request_bytes
    partition_bytes: Size = _FETCH.partition_bytes
    ahead_bytes: Size = _FETCH.ahead_bytes
    active_slices: Annotated[Count, Field(le=10_000)] = _FETCH.active_ranges
    rack: Text | None = None
    assignor: Assignor = Assignor.LEADER_BYTES
    tasks_per_broker: Annotated[Count, Field(le=10_000)] | None = None

    def limits(self) -> FetchLimits:
        """The bounds as the fetcher takes them."""
        return FetchLimits(self.active_slices, self.request_bytes, self.partition_bytes, self.ahead_bytes)


LAUNCHING = re.compile(
    r"spark\.(master|app\.name|local\.dir|files|archives|jars(\.\w+)?|kerberos\.(keytab|principal)|submit\.\w+"
    r"|driver\.(memory\w*|cores|host|bindAddress|(extra|default)JavaOptions|extraClassPath|extraLibraryPath)"
    r"|hadoop\.fs\.s3a\.(endpoint(\.region)?|path\.style\.access|aws\.credentials\.provider))"
)
"""Settings that Spark reads before its JVM runs: they stand in its command line, which every user may read."""
_SHOWN = re.compile(
    r"spark\.(app\.name|cores\.max|default\.parallelism|serializer|network\.timeout|ui\.(enabled|port)"
    r"|(driver|executor)\.(memory\w*|cores|instances|host|port|bindAddress|maxResultSize)"
    r"|(task|speculation|dynamicAllocation|shuffle|memory|locality|scheduler|excludeOnFailure)(\.\w+)*"
    r"|sql\.(shuffle|adaptive|files|parquet|ansi|session|execution)(\.\w+)*)"
)
"""Settings known to hold no secret. All others are masked when shown."""
_LOGIN = re.compile(r"://[^/@\s,]*:[^/@\s,]*@")

MASK = "**********"


PACK, INSTALLED = "pack", "installed"


def _resolve_environment(text: str, info: ValidationInfo) -> str:
    return text if text in (PACK, INSTALLED) or "://" in text or text.startswith("local:") else below_root(text, info)


def _check_master(text: str) -> str:
    if re.search(r";\s*token=", text, re.IGNORECASE):
        raise ValueError("has a token, and messages show the master")
    return text


class SparkSettings(Settings):
    """Which Spark runs the tasks. `conf` goes to the session unchanged; only settings known to be harmless are shown.

    The others are for a Spark elsewhere. `environment` says where executors have Sluice from: PACK (it is made here and
    sent to them), INSTALLED (their Python has it), or an archive as `sluice pack` makes it, by path or URI. `modules`
    are the user's own, packed together with Sluice. `python` is their interpreter. A run that waits for executors gives
    up after `start_timeout` (ms).
    """

    master: Annotated[Text, AfterValidator(_check_master)] | None = None
    environment: Annotated[Text, AfterValidator(_resolve_environment)] = PACK
    modules: tuple[Annotated[str, StringConstraints(pattern=r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*\z")], ...] = ()
    python: Text | None = None
    start_timeout: Duration = 5 * MINUTE
    conf: dict[str, Annotated[str, BeforeValidator(lambda v: _conf_value(v))]] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _modules_are_packed(self) -> Self:
        if self.modules and self.environment != PACK:
            raise ValueError(
                "has modules, which go into the pack that a run makes: leave `environment` out, or make an archive by"
                " sluice pack --with MODULE --output FILE and leave `modules` out"
            )
        return self

    @field_validator("conf")
    @classmethod
    def _secrets_reach_no_command_line(cls, conf: dict[str, str], info: ValidationInfo) -> dict[str, str]:
        from_files = {k.removeprefix("spark.conf.") for k in (info.context or {}).get("filled_from_files", ())}
        exposed = (k for k in conf if LAUNCHING.fullmatch(k) and (k in from_files or _LOGIN.search(conf[k])))
        if names := ", ".join(map(sanitize, sorted(exposed))):
            raise ValueError(f"has a password, or a value from a file, in {names}: a command line would show it")
        return conf

    @field_serializer("conf")
    def _mask_secrets(self, conf: dict[str, str]) -> dict[str, str]:
        return {k: v if _SHOWN.fullmatch(k) and not _LOGIN.search(v) else MASK for k, v in conf.items()}

    def __repr_args__(self) -> Any:
        arguments = {name: getattr(self, name) for name in type(self).model_fields} | {
            "conf": self._mask_secrets(self.conf)
        }
        return list(arguments.items())


def _conf_value(value: object) -> object:
    if isinstance(value, bool):
        return str(value).lower()
    return str(value) if isinstance(value, int | float) else value


_DATE = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}")
_EPOCH_DAY = date(1970, 1, 1).toordinal()


def _even_window(length: int) -> int:
    """Checks that an hour, or else a day, holds a whole number of windows. Raises ValueError."""
    if length < MINUTE or length % MINUTE or (HOUR % length and (length % HOUR or DAY % length)):
        raise ValueError("does not divide an hour in whole minutes, nor a day in whole hours (15m, 1h, 6h, 1d)")
    return length


def _known_zone(name: str) -> str | None:
    """The name of a time zone; None for UTC. Raises ValueError."""
    try:
        return None if ZoneInfo(name).key in ("UTC", "Etc/UTC") else name
    except (ZoneInfoNotFoundError, ValueError, OSError):
        raise ValueError("is no time zone of the IANA database, such as Europe/Berlin") from None


class WindowSettings(Settings):
    """How a feed is cut into windows. All in ms.

    A window lasts `length`, from the epoch on; in a `timezone`, it is a day of the calendar there. Its boundaries are
    resolved `grace` after its end. A record stamped more than `max_skew` ahead of the clock does not decide a boundary.
    """

    length: Annotated[Duration, AfterValidator(_even_window)] = HOUR
    timezone: Annotated[str, AfterValidator(_known_zone)] | None = None
    grace: Duration = 600_000
    max_skew: Duration = 300_000

    @model_validator(mode="before")
    @classmethod
    def _accept_length(cls, value: object) -> object:
        """Accept `window: 15m`, which gives the length alone, and `settle`, the name of `grace` in version 0.1."""
        if isinstance(value, str):
            return {"length": value}
        if isinstance(value, dict) and "settle" in value:
            if "grace" in value:
                raise ValueError("`settle` is the old name of `grace`: remove it")
            return {("grace" if key == "settle" else key): one for key, one in value.items()}
        return value

    @model_validator(mode="after")
    def _check_days(self) -> Self:
        if self.timezone and self.length != DAY:
            raise ValueError("`timezone` needs `length: 1d`: shorter windows begin at instants in UTC")
        return self

    def number_of(self, time: int) -> int:
        """The number of the window that holds `time` (ms). The epoch lies in window 0."""
        if self.timezone is None:
            return time // self.length
        return find_day(self.timezone, time) - find_day(self.timezone, 0)

    def start_at(self, number: int) -> int:
        """The start (ms) of the window of that number. No window starts before the epoch."""
        if self.timezone is None:
            return number * self.length
        return start_of_day(self.timezone, find_day(self.timezone, 0) + number)

    def start_of(self, time: int) -> int:
        """The start of the window that holds `time`."""
        return self.start_at(self.number_of(time))

    def end_of(self, time: int) -> int:
        """The end of the window that holds `time`, where the next one starts."""
        return self.start_at(self.number_of(time) + 1)

    def before(self, window: int) -> int:
        """The start of the window before the one that starts at `window`."""
        return self.start_of(window - 1)

    def is_start(self, time: int) -> bool:
        """Returns whether a window starts at `time`."""
        return self.start_of(time) == time

    def length_of(self, window: int) -> int:
        """How long (ms) the window that starts at `window` lasts."""
        return self.end_of(window) - window

    def list_starts(self, first: int, end: int) -> Sequence[int]:
        """The starts of the windows from `first`, a start, up to those before `end`."""
        if self.timezone is None:
            return range(first, end, self.length)
        starts, days = [], itertools.count(find_day(self.timezone, first))
        while first < end:
            starts.append(first)
            first = next(start for day in days if (start := start_of_day(self.timezone, day)) > first)
        return tuple(starts)

    def join(self, starts: Iterable[int]) -> list[tuple[int, int]]:
        """Returns the spans [start, end) of windows in a row, in order, of windows by their starts."""
        spans: list[tuple[int, int]] = []
        for start in sorted(starts):
            first = spans.pop()[0] if spans and spans[-1][1] == start else start
            spans.append((first, self.end_of(start)))
        return spans

    def list_named(self, text: object) -> Sequence[int]:
        """Returns the windows (their starts, ms) that text names: those of its day, of its hour, or one.

        Raises ValueError. The first may not be aligned.
        """
        if self.timezone and isinstance(text, str) and _DATE.fullmatch(text.strip()):
            return (self._start_of_date(self.timezone, text.strip()),)
        start, length = parse_period(text)
        return self.list_starts(start, max(start + length, self.end_of(start)))

    def _start_of_date(self, zone: str, text: str) -> int:
        try:
            day = date.fromisoformat(text).toordinal()
            start, end = start_of_day(zone, day), start_of_day(zone, day + 1)
        except (ValueError, OverflowError):
            start = end = 0
        if start == end:
            raise ValueError(f"is not a day that {zone} has, from 1970 on")
        return start

    def parse_name(self, text: object) -> int:
        """Returns the start (ms) of the first window that text names. Raises ValueError. It may not be aligned."""
        return self.list_named(text)[0]

    def name(self, window: int) -> str:
        """The name of the window that starts at `window`, which `parse_name` reads back: `2026-11-20T14:00`, in UTC;
        in a time zone, its date. A time at which no window starts is in UTC."""
        return show_window(self.local(window))[:10] if self.timezone and self.is_start(window) else show_window(window)

    def local(self, window: int) -> int:
        """The start as folders show it: in a time zone, midnight of the date, as if that were in UTC."""
        return window if self.timezone is None else (find_day(self.timezone, window) - _EPOCH_DAY) * DAY

    @property
    def grain(self) -> int | str:
        """The length or, in a time zone, that: notes about windows hold while it is the same."""
        return self.timezone or self.length

    @property
    def words(self) -> str:
        """`1h`; `1d in Europe/Berlin`"""
        return show_duration(self.length) + (f" in {self.timezone}" if self.timezone else "")

    @property
    def cron(self) -> str:
        """When windows begin, in their time zone, as a cron expression."""
        if self.length < HOUR:
            return f"*/{self.length // MINUTE} * * * *"
        return {HOUR: "0 * * * *", DAY: "0 0 * * *"}.get(self.length, f"0 */{self.length // HOUR} * * *")

    def last_boundary(self, now: int) -> int:
        """The newest boundary that may be resolved at `now`."""
        return self.start_of(now - self.grace)

    def is_closed(self, window: int, now: int) -> bool:
        """Returns whether the window that starts at `window` is past its grace period."""
        return self.end_of(window) <= self.last_boundary(now)


BOOTSTRAP, LOCAL_KAFKA = "KAFKA_BOOTSTRAP", "SLUICE_LOCAL_KAFKA"
"""Environment variables with Kafka's address, for feeds that name none. The second serves if the first is not set."""

UNKNOWN_KAFKA = "unknown.invalid:9"
"""Kafka's address in a feed that was loaded without the section `kafka`."""

REGISTRY, LOCAL_REGISTRY = "SCHEMA_REGISTRY_URL", "SLUICE_LOCAL_REGISTRY"
"""Environment variables with a schema registry's address, for sections `registry` that name none."""

LOCAL_LOGIN = "SLUICE_LOCAL_KAFKA_LOGIN"
"""A file of settings, as JSON, by which feeds without a login of their own log in to the local Kafka."""
