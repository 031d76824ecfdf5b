"""Forecasts: the age of pending offsets, the time until they land, and the offsets that retention deletes before."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.pipelines.ledger import Batch, BatchStatus, State
from sluice.pipelines.ledger.batches import Batches
from sluice.pipelines.ledger.entries import (
    Boundaries,
    BoundaryEntry,
    KeyRange,
    OriginEntry,
    OriginItem,
    PublishEntry,
    SkipEntry,
)
from sluice.pipelines.model.kafka import (
    BrokerConfig,
    Key,
    OffsetAtTime,
    Range,
    TopicConfig,
    TopicPartition,
)
from sluice.pipelines.model.plans import OffsetRange, Request, RequestKind
from sluice.pipelines.model.receipts import Counts, Receipt
from sluice.pipelines.status import forecast, outlook
from sluice.pipelines.status.forecast import Backlog, BatchPace
from sluice.pipelines.util.units import show_about
from sluice.testing.cluster import MemoryCluster, partition
from sluice.testing.engine import owner

MINUTE, HOUR, DAY = 60_000, 3_600_000, 86_400_000
KEY = Key("orders", 0, "id-1")
NOW = 1_000 * HOUR


def state(pins: Mapping[int, int] | None = None, done: int = 0, origin: int = 0) -> State:
    """Returns one partition, accounted for up to `done`; `pins` maps the times of boundaries to their offsets."""
    times = sorted(pins or {990 * HOUR: 0})
    opens = OriginItem(key=KEY, offset=origin, committed=None, why="", opens=times[0])
    offsets = tuple((pins or {})[t] for t in times[1:])
    items = (Boundaries(key=KEY, times=tuple(times[1:]), offsets=offsets),)
    passed = (KeyRange(key=KEY, range=Range(origin, done)),) if done > origin else ()
    return State().extend(
        [OriginEntry(items=(opens,)), BoundaryEntry(items=items), SkipEntry(ranges=passed, reason="")]
    )


# -- ages


@dataclass
class Stamped(MemoryCluster):
    """Records with the given stamps, by offset; counts the look-ups."""

    stamps: tuple[int, ...] = ()
    questions: int = 0

    def offsets_at(
        self, times: Mapping[TopicPartition, int], max_skew: int | None = None
    ) -> Mapping[TopicPartition, OffsetAtTime | None]:
        self.questions += 1
        (time,) = times.values()
        return {KEY.tp: next((OffsetAtTime(o, s) for o, s in enumerate(self.stamps) if s >= time), None)}


def find_stamp(cluster: Stamped, ledger_state: State, position: int) -> int | None:
    return outlook.stamps(cluster, ledger_state, {KEY: position}, NOW).get(KEY)


def test_age_of_position_at_boundary_takes_one_lookup() -> None:
    stamps = tuple(990 * HOUR + n * MINUTE for n in range(600))
    cluster = Stamped(stamps=stamps)
    ledger_state = state({990 * HOUR: 0, 993 * HOUR: 180, 994 * HOUR: 240}, done=180)
    assert find_stamp(cluster, ledger_state, 180) == stamps[180]
    assert cluster.questions == 1


@given(
    steps=st.lists(st.integers(0, 20 * MINUTE), min_size=1, max_size=200),
    position=st.integers(0, 199),
    pinned=st.booleans(),
)
def test_age_is_never_underestimated_and_takes_few_lookups(steps: list[int], position: int, pinned: bool) -> None:
    stamps = [NOW - 100 * HOUR]
    for step in steps:
        stamps.append(min(stamps[-1] + step, NOW))
    position = min(position, len(stamps) - 1)
    begin = stamps[0] - stamps[0] % HOUR
    bounds = {begin: 0}
    for time in range(begin + HOUR, NOW, HOUR) if pinned else ():
        bounds[time] = next((o for o, s in enumerate(stamps) if s >= time), len(stamps))
    cluster = Stamped(stamps=tuple(stamps))
    stamp = find_stamp(cluster, state(bounds, done=position), position)
    assert stamp is not None
    true, estimate = NOW - stamps[position], NOW - stamp
    # A look-up by time cannot distinguish equal stamps: it finds the first of them.
    assert estimate >= true
    assert estimate - true <= max(1000, estimate // 8, (100 * HOUR >> (outlook.QUESTIONS - 2)) if not pinned else 0)
    assert cluster.questions <= outlook.QUESTIONS


def test_future_timestamp_before_position_does_not_lower_its_age() -> None:
    stamps = (990 * HOUR, NOW + 14 * 365 * DAY, *(990 * HOUR + n * MINUTE for n in range(2, 100)))
    ledger_state = state({990 * HOUR: 0, 991 * HOUR: 60, 992 * HOUR: 100}, done=70)
    for position in (60, 70):
        stamp = find_stamp(Stamped(stamps=stamps), ledger_state, position)
        assert stamp == 991 * HOUR, "only the start of its window is known"


def test_age_of_late_records_follows_their_timestamps() -> None:
    """Quiet hours are pinned; records with earlier stamps follow."""
    stamps = (980 * HOUR, *(981 * HOUR + n * 10 * MINUTE for n in range(30)))
    ledger_state = state({980 * HOUR: 0} | {h * HOUR: 1 for h in range(981, 1000)}, done=1)
    stamp = find_stamp(Stamped(stamps=stamps), ledger_state, 1)
    assert stamp is not None
    assert 980 * HOUR <= stamp <= 981 * HOUR


def test_age_is_unknown_without_records() -> None:
    assert find_stamp(Stamped(), state({0: 0}), 0) is None


# -- pending, rates


def test_backlog_separates_lost_from_available_ranges() -> None:
    ledger_state = state(done=100).extend([SkipEntry(ranges=(KeyRange(key=KEY, range=Range(300, 400)),), reason="")])
    (backlog,) = forecast.backlogs(ledger_state, {KEY: partition(log_start=150, last_stable_offset=500)})
    assert backlog.ranges == (Range(100, 300), Range(400, 500))
    assert (backlog.lost, backlog.held) == ((Range(100, 150),), (Range(150, 300), Range(400, 500)))
    assert forecast.backlogs(ledger_state, {KEY: partition(last_stable_offset=100)}) == ()
    assert forecast.backlogs(ledger_state, {Key("new", 0, "id-2"): partition("new")}) == (), (
        "no origin: nothing is pending yet"
    )


def test_production_rate_is_measured_since_boundary_of_a_day_ago() -> None:
    ledger_state = state({NOW - 30 * HOUR: 0, NOW - 24 * HOUR: 1_000, NOW - HOUR: 50_000})
    assert forecast.production(ledger_state, KEY, 1_000 + 864_000, NOW) == pytest.approx(10)
    stale = state({NOW - 50 * HOUR: 0})
    assert forecast.production(stale, KEY, 50 * 3600, NOW) == pytest.approx(1)
    assert forecast.production(State(), KEY, 10, NOW) is None


def test_landing_rate_is_taken_from_fastest_batch() -> None:
    assert forecast.landing([BatchPace(10, 5_000), BatchPace(1_000_000, 10_000)]) == 100_000
    assert forecast.landing([]) is None
    assert forecast.landing([BatchPace(0, 5_000)]) is None
    assert forecast.landing([BatchPace(83, 1)]) is None, "of the clock's own grain"


def test_eta_uses_landing_rate_minus_production_rate() -> None:
    a_hundred, ten = [BatchPace(500, 5_000)], [BatchPace(500, 50_000)]
    assert forecast.eta(9_000, a_hundred, 10.0) == 100_000
    assert forecast.eta(9_000, a_hundred, None) == 90_000
    assert forecast.eta(9_000, ten, 10.0) is None
    assert forecast.eta(9_000, [], 10.0) is None
    assert forecast.eta(0, ten, 1.0) == 0


def test_eta_is_at_least_one_run_and_unknown_for_far_larger_backlog() -> None:
    assert forecast.eta(5, [BatchPace(50_000, 4_000), BatchPace(10, 3_000)], None) == 3_000
    assert forecast.eta(50_000, [BatchPace(500, 5_000)], None) == 500_000
    assert forecast.eta(50_001, [BatchPace(500, 5_000)], None) is None


class Published:
    """A ledger of publish entries only."""

    def __init__(self, entries: Mapping[int, PublishEntry]) -> None:
        self._entries = entries

    def publication(self, batch: Batch) -> PublishEntry:
        return self._entries[batch.id]

    def recall(self, batch: Batch) -> Batch:
        return batch


def test_rates_ignore_replays_and_batches_with_adopted_receipts() -> None:
    def make_batch(id_: int, kind: RequestKind) -> Batch:
        return Batch(id_, None, Request(kind), "hash", owner(), BatchStatus.PUBLISHED, 0, published=id_ + 1)

    def make_entry(batch: int, *, adopted: bool) -> PublishEntry:
        read = Receipt(OffsetRange(*KEY, 0, 1000), 1000, Counts(landed=1000), (), "a", adopted=adopted)
        return PublishEntry(batch=batch, token="t", at=2_000, receipts=(read,))

    entries = {1: make_entry(1, adopted=True), 3: make_entry(3, adopted=False), 5: make_entry(5, adopted=False)}
    kinds = {1: RequestKind.CATCH_UP, 3: RequestKind.REPLAY, 5: RequestKind.CATCH_UP}
    ledger_state = State(batches=Batches(make_batch(n, kind) for n, kind in kinds.items()))
    published = outlook.read_recent(Published(entries), ledger_state)  # type: ignore[arg-type]
    assert outlook.work(published) == [BatchPace(1000, 2_000)]


# -- retention


def forecast_deletion(
    config: TopicConfig | None,
    since: int | None = NOW - 4 * DAY,
    rate: float | None = None,
    notice: int = DAY,
    needed: int = 0,
    **changes: object,
) -> forecast.Deletion | None:
    p = partition(**{"log_start": 100, "last_stable_offset": 900, "high_watermark": 900} | changes)
    pending = Backlog(KEY, p, (Range(120, 900),), since)
    configs = {} if config is None else {"orders": config}
    return next(forecast.deletions([pending], configs, {} if rate is None else {KEY: rate}, NOW, notice, needed), None)


def test_warning_precedes_deletion_by_retention_time() -> None:
    keeps = TopicConfig(retention_ms=4 * DAY + 3 * HOUR)
    deletion = forecast_deletion(keeps)
    assert deletion is not None
    assert deletion.at == NOW + 3 * HOUR
    assert deletion.stamped == NOW + DAY - keeps.retention_ms, "the oldest stamp to be deleted within the notice"
    risk = deletion.at_risk(700)
    assert risk.ranges == (Range(120, 700),)
    assert risk.describe(NOW) == "orders:0 [120, 700) will begin to be deleted in about 3 h (retention.ms 99h)"
    assert deletion.at_risk(None).ranges == (Range(120, 900),)
    assert forecast_deletion(keeps, notice=2 * HOUR) is None
    assert forecast_deletion(keeps, notice=2 * HOUR, needed=5 * HOUR) is not None, "landing takes longer than is left"
    late = forecast_deletion(TopicConfig(retention_ms=DAY))
    assert late is not None
    assert "may be deleted at any moment" in late.at_risk(None).describe(NOW)


def test_warning_for_short_retention_starts_at_half_of_retention() -> None:
    keeps = TopicConfig(retention_ms=2 * HOUR)
    assert forecast_deletion(keeps, since=NOW - 30 * MINUTE) is None
    assert forecast_deletion(keeps, since=NOW - 61 * MINUTE) is not None


@pytest.mark.parametrize(
    "config",
    [
        None,
        TopicConfig(),
        TopicConfig(retention_ms=1, deletes=False, compacts=True),
    ],
)
def test_warning_is_omitted_if_deletion_is_off_or_retention_unknown(config: TopicConfig | None) -> None:
    assert forecast_deletion(config) is None


def test_unknown_age_does_not_warn() -> None:
    assert forecast_deletion(TopicConfig(retention_ms=1), since=None) is None


def test_deletion_by_retention_size_is_forecast_from_remaining_bytes() -> None:
    """800 offsets in 8000 bytes; 780 of them are pending."""
    keeps = TopicConfig(retention_bytes=8_800)  # 880 offsets: room for 100 more
    deletion = forecast_deletion(keeps, rate=0.01, log_bytes=8_000)
    assert deletion is not None
    assert deletion.at == NOW + 10_000_000
    assert deletion.at_risk(None).ranges == (Range(120, 884),), "864 offsets come in a day"
    assert forecast_deletion(keeps, rate=0.001, log_bytes=8_000) is None
    assert forecast_deletion(keeps, log_bytes=8_000) is None, "how fast it grows is not known, and there is room"
    assert forecast_deletion(keeps, rate=0.01) is None, "nor how large it is"
    full = forecast_deletion(TopicConfig(retention_bytes=7_000), log_bytes=8_000)
    assert full is not None
    assert full.at == NOW


def test_earlier_of_time_and_size_retention_is_reported() -> None:
    both = TopicConfig(retention_ms=4 * DAY + 3 * HOUR, retention_bytes=8_800)
    deletion = forecast_deletion(both, rate=0.1, log_bytes=8_000)
    assert deletion is not None
    assert "retention.bytes" in deletion.why
    assert deletion.at == NOW + 1_000_000


@given(
    since=st.integers(0, NOW),
    retention=st.integers(1, 2 * NOW),
    notice=st.integers(0, 30 * DAY),
    needed=st.integers(0, 30 * DAY),
    end=st.none() | st.integers(0, 2000),
)
def test_range_at_risk_is_within_pending_range(
    since: int, retention: int, notice: int, needed: int, end: int | None
) -> None:
    deletion = forecast_deletion(TopicConfig(retention_ms=retention), since=since, notice=notice, needed=needed)
    if deletion is None:
        assert since + retention > NOW + min(notice, retention // 2)
        return
    (r,) = deletion.at_risk(end).ranges
    assert 120 == r.start < r.end <= 900


def test_landed_offsets_are_not_at_risk() -> None:
    pending = Backlog(KEY, partition(last_stable_offset=900), (Range(0, 300), Range(400, 900)), NOW - DAY)
    (deletion,) = forecast.deletions([pending], {"orders": TopicConfig(retention_ms=DAY)}, {}, NOW, DAY)
    assert deletion.at_risk(600).ranges == (Range(0, 300), Range(400, 600))
    assert "[0, 300) and 1 more may be deleted" in deletion.at_risk(600).describe(NOW)


# -- expiry in Kafka


def test_expiry_of_offsets_and_transactional_ids_is_forecast() -> None:
    broker = BrokerConfig(offsets_retention=7 * DAY, transactional_id_expiration=DAY)
    offsets, ids = forecast.expiries("g", "t", NOW - 6 * DAY, broker)
    assert offsets.describe(NOW) == (
        "committed offsets of group g: kept for about 24 h more (offsets.retention.minutes 7d)"
    )
    assert ids.describe(NOW) == "transactional id t: no longer kept (transactional.id.expiration.ms 1d)"
    assert len(forecast.expiries("g", None, NOW, broker)) == 1, "commits without a transactional id"
    assert forecast.expiries("g", "t", None, broker) == (), "never committed"
    assert forecast.expiries("g", "t", NOW, BrokerConfig()) == (), "the cluster does not tell"


@pytest.mark.parametrize(
    ("ms", "text"),
    [
        (0, "0 s"),
        (-5, "0 s"),
        (90_000, "90 s"),
        (12 * MINUTE, "12 min"),
        (3 * HOUR + 20 * MINUTE, "3 h 20 min"),
        (DAY, "24 h"),
        (2 * DAY + 4 * HOUR, "2 d 4 h"),
        (30 * DAY + 4 * HOUR, "30 d"),
    ],
)
def test_durations_are_formatted_in_readable_units(ms: int, text: str) -> None:
    assert show_about(ms) == text
