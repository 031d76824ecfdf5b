"""The sections of a feed file: typed, frozen and validated; secrets are masked wherever one is shown."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    field_serializer,
    model_validator,
)

from sluice.pipelines.feed.settings import Count, Duration, Settings, Size, Text, number
from sluice.pipelines.feed.topics import TopicName
from sluice.pipelines.vocabulary import units
from sluice.pipelines.vocabulary.kafka import FetchLimits
from sluice.pipelines.vocabulary.units import DAY, HOUR, MINUTE


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


class RecordFormat(StrEnum):
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


BOOTSTRAP, LOCAL_KAFKA = "KAFKA_BOOTSTRAP", "SLUICE_LOCAL_KAFKA"
"""Variables of the environment: where Kafka is for feeds that do not say so, the second where the first is not set."""
