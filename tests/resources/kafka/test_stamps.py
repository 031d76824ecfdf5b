"""Looking behind transactions' markers, over logs in memory: the answer, and what it costs in requests."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kafka.errors import IncompatibleBrokerVersion, NotLeaderForPartitionError, UnsupportedVersionError

from sluice.pipelines.errors import KafkaUnavailable
from sluice.pipelines.model.kafka import OffsetAtTime, TopicPartition
from sluice.resources.kafka.cluster import markers
from sluice.resources.kafka.cluster.offsets_by_time import PROBE_BYTES
from sluice.testing.logs import ABORT, COMMIT, GZIP, ZSTD, Log, LogBatch, LogRecord, log
from tests.resources.kafka.made_up import Brokers, first_records

TP = TopicPartition("orders", 0)
CLOCK = 1_000_000
"""What brokers' clocks say when they write the first marker; records are stamped long before."""


def data(*times: int, size: int = 1, **more: object) -> LogBatch:
    """A batch of a transaction with records stamped so."""
    batch = LogBatch(tuple(LogRecord(b"k", b"v" * size, t) for t in times), producer=7, transactional=True)
    return replace(batch, **more)  # type: ignore[arg-type]


def marker(clock: int = CLOCK, how: int = COMMIT) -> LogBatch:
    return LogBatch((LogRecord(time=clock),), producer=7, marker=how)


def transactions(count: int, each: int = 4, size: int = 1, step: int = 10, how: int = COMMIT) -> Log:
    """So many, with two batches of records that go up by `step` ms, and a marker stamped at CLOCK and later."""
    batches = []
    for n in range(count):
        times = [(n * each + i) * step for i in range(each)]
        batches += [data(*times[: each // 2], size=size), data(*times[each // 2 :], size=size), marker(CLOCK + n, how)]
    return log(*batches)


def asked(brokers: Brokers, *times: int) -> list[OffsetAtTime | None]:
    cluster = brokers.cluster()
    return [cluster.offsets_at({TP: time})[TP] for time in times]


def exact(made: Log, *times: int) -> list[OffsetAtTime | None]:
    return [None if hit is None else OffsetAtTime(*hit) for hit in first_records(made, times)]


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Next to nothing is read on behind a marker."""
    monkeypatch.setattr(markers, "_LEAST", 200)
    monkeypatch.setattr(markers, "_MOST", 200)


# -- the first record, never a marker


@pytest.mark.parametrize("how", [COMMIT, ABORT])
def test_the_first_record_though_markers_stand_before_it(how: int) -> None:
    made = transactions(10, how=how)
    times = [0, 1, 25, 35, 40, 395, 390, 391, CLOCK, CLOCK + 100]
    assert asked(Brokers({TP: made}), *times) == exact(made, *times)


def test_where_the_hit_is_a_record_it_stands() -> None:
    made = log(data(0, CLOCK + 5), marker(), data(7))
    assert asked(Brokers({TP: made}), CLOCK) == [OffsetAtTime(1, CLOCK + 5)]


def test_records_out_of_order_are_found_where_the_log_is_read() -> None:
    made = log(data(5), marker(), data(50, 900, 20), data(700), marker(), data(60, 950), marker())
    times = range(0, 1000, 10)
    assert asked(Brokers({TP: made}), *times) == exact(made, *times)


@pytest.mark.parametrize("codec", [GZIP, ZSTD])
def test_within_a_batch_whatever_its_codec(codec: int) -> None:
    made = log(data(1), marker(), data(*range(2, 500), codec=codec), marker())
    assert asked(Brokers({TP: made}), 250) == exact(made, 250)


@pytest.mark.parametrize("magic", [0, 1])
@pytest.mark.parametrize("codec", [0, GZIP])
def test_among_batches_of_old_formats(magic: int, codec: int) -> None:
    old = LogBatch((LogRecord(time=300), LogRecord(time=400)), magic=magic, codec=codec)
    made = log(data(1), marker(), old, data(500))
    (found,) = asked(Brokers({TP: made}), 350)
    assert found == (OffsetAtTime(3, 400) if magic else OffsetAtTime(4, 500)), "the oldest have no stamps"


def test_stamped_by_the_broker_or_marked_by_compaction() -> None:
    made = log(data(1), marker(), data(5, 6, append_time=400), data(450, 430, delete_horizon=True), marker())
    assert asked(Brokers({TP: made}), 300, 440) == [OffsetAtTime(2, 400), OffsetAtTime(4, 450)]


def test_no_pandas_is_imported() -> None:
    """Dagster evaluates sensors in one process, which keeps all imports."""
    code = """
import sys
from tests.resources.kafka.test_stamps import TP, Brokers, asked, data, exact, log, marker
made = log(data(1), marker(), data(*range(2, 500)), marker())
assert asked(Brokers({TP: made}), 250) == exact(made, 250)
assert "pandas" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_what_compaction_left() -> None:
    gone = data(100, 200, gap=50, tail=9)
    made = log(data(1), marker(), gone, replace(marker(), gap=70), data(300, gap=20), marker())
    assert asked(Brokers({TP: made}), 150, 250) == exact(made, 150, 250)


def test_batches_larger_than_what_is_asked_for() -> None:
    made = log(data(1), marker(), data(50, size=300_000), data(60, size=400_000), marker(), data(70, size=90_000))
    assert asked(Brokers({TP: made}), 50, 55, 65, 75) == exact(made, 50, 55, 65, 75)


def test_a_batch_that_cannot_be_read_is_left_to_landing() -> None:
    made = log(data(1), marker(), data(2, 700, 3), marker())
    spoiled = bytearray(made.batches[2].data)
    spoiled[-3] ^= 0x55
    made.batches[2] = replace(made.batches[2], data=bytes(spoiled))
    assert asked(Brokers({TP: made}), 500) == [OffsetAtTime(2, 500, by_marker=True)]


def test_headers_that_make_no_sense_end_the_search() -> None:
    made = log(data(1), marker(), data(2), data(700))
    made.batches[2] = replace(made.batches[2], data=b"\xff" * 100)
    assert asked(Brokers({TP: made}), 500) == [OffsetAtTime(2, 500, by_marker=True)]


# -- beyond what is read


@pytest.mark.usefixtures("short")
def test_by_offset_where_the_record_is_far() -> None:
    made = transactions(3000)
    found = asked(Brokers({TP: made}), *range(95, 120_000, 1733))
    assert [f and replace(f, by_marker=False) for f in found] == exact(made, *range(95, 120_000, 1733))
    assert all(f and f.by_marker for f in found)


@pytest.mark.usefixtures("short")
def test_nothing_far_behind_markers_is_the_end_and_said() -> None:
    made = transactions(3000)
    assert asked(Brokers({TP: made}), 500_000) == [OffsetAtTime(made.end, 500_000, by_marker=True)]


@pytest.mark.usefixtures("short")
def test_a_log_that_grew_since_it_was_looked_at() -> None:
    brokers = Brokers({TP: transactions(300)})
    cluster = brokers.cluster()
    assert cluster.offsets_at({TP: 50_000})[TP] == OffsetAtTime(brokers.logs[TP].end, 50_000, by_marker=True)
    brokers.logs[TP] = transactions(3000)
    (there,) = exact(brokers.logs[TP], 50_000)
    assert there is not None
    assert cluster.offsets_at({TP: 50_000})[TP] == replace(there, by_marker=True)


@pytest.mark.usefixtures("short")
def test_a_log_of_nothing_but_markers_behind_a_record() -> None:
    made = log(data(1), *(marker(CLOCK + n) for n in range(5000)))
    (found,) = asked(Brokers({TP: made}), 500)
    assert found in (None, OffsetAtTime(made.end, 500, by_marker=True))


BATCH = st.one_of(
    st.builds(lambda times: data(*times), st.lists(st.integers(0, 300), min_size=1, max_size=5)),
    st.builds(lambda c, how: marker(CLOCK + c, how), st.integers(0, 5), st.sampled_from([ABORT, COMMIT])),
    st.builds(lambda time, gap: data(time, gap=gap), st.integers(0, 300), st.integers(0, 9)),
)


@settings(max_examples=150)
@given(st.lists(BATCH, min_size=1, max_size=25), st.lists(st.integers(0, 320), min_size=1, max_size=8))
def test_any_log_whatever_the_order_of_its_stamps(batches: list[LogBatch], times: list[int]) -> None:
    made = log(*batches)
    assert asked(Brokers({TP: made}), *times) == exact(made, *times)


@settings(max_examples=150)
@given(st.data())
def test_any_log_in_order_of_time_however_little_is_read(given_: st.DataObject) -> None:
    batches, clock = given_.draw(st.lists(BATCH, min_size=1, max_size=60)), 0
    for n, batch in enumerate(batches):
        if batch.marker is None:
            records = tuple(replace(r, time=(clock := clock + r.time)) for r in batch.records)
            batches[n] = replace(batch, records=records)
        else:
            batches[n] = marker(CLOCK + n)
    made = log(*batches)
    times = given_.draw(st.lists(st.integers(0, clock + 10), min_size=1, max_size=8))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(markers, "_LEAST", 0)
        patch.setattr(markers, "_MOST", 0)
        found = asked(Brokers({TP: made}), *times)
    for said, there, time in zip(found, exact(made, *times), times, strict=True):
        if there is None:
            assert said in (None, OffsetAtTime(made.end, time, by_marker=True))
        else:
            assert said is not None
            assert (said.offset, said.timestamp) == (there.offset, there.timestamp)


# -- logs that change, brokers that limit


def test_retention_takes_the_marker_while_it_is_looked_behind() -> None:
    brokers = Brokers({TP: log(data(1), marker(), data(2), marker(), data(900))})

    def taken(kind: str) -> None:
        brokers.starts[TP] = 4 if kind == "ListOffsets" else brokers.starts.get(TP, 0)

    brokers.after = taken
    assert asked(brokers, 500) == [OffsetAtTime(4, 900)]


def test_retention_that_is_always_faster_is_told() -> None:
    made = transactions(40)
    brokers = Brokers({TP: made})
    brokers.after = lambda kind: brokers.starts.update({TP: brokers.starts.get(TP, 0) + 5})
    with pytest.raises(KafkaUnavailable, match="orders:0 began later each time"):
        asked(brokers, 500_000)


def test_a_batch_that_takes_all_that_a_broker_gives_at_once() -> None:
    """The others come back empty then, and are no records for that."""
    tps = [TopicPartition("orders", n) for n in range(8)]
    large = log(data(CLOCK, size=9 << 20))
    logs = {tp: log(data(1), marker(), data(50, 60), marker()) for tp in tps[1:]}
    found = Brokers({tps[0]: large, **logs}, most=8 << 20).cluster().offsets_at(dict.fromkeys(tps, 55))
    assert found == {tps[0]: OffsetAtTime(0, CLOCK)} | dict.fromkeys(tps[1:], OffsetAtTime(3, 60))


def test_a_batch_that_compaction_shrank_after_its_header_was_read() -> None:
    """The batch is all that the broker gives: it ends its segment, or the log."""
    large, small = (log(data(1), marker(), data(50, 60, 70, size=size)) for size in (500, 1))
    brokers = Brokers({TP: large})

    def compact(kind: str) -> None:
        brokers.logs[TP] = small if kind == "Fetch" else large

    brokers.after = compact
    assert asked(brokers, 55) == [OffsetAtTime(3, 60)]


def test_a_leader_that_moved_is_asked_again() -> None:
    brokers = Brokers({TP: transactions(3)}, count=1)
    refused = [NotLeaderForPartitionError]
    part = brokers._part

    def once(*asked: object) -> object:
        answer = part(*asked)  # type: ignore[arg-type]
        return replace(answer, error=refused.pop()) if refused else answer

    brokers._part = once  # type: ignore[method-assign, assignment]
    brokers.sleep = lambda seconds: _nothing()  # type: ignore[attr-defined]
    assert asked(brokers, 95) == exact(brokers.logs[TP], 95)


async def _nothing() -> None: ...


# -- what it costs


def cost(brokers: Brokers, *times: int) -> dict[str, int]:
    """Requests of looks at these times, one after another in one moment."""
    cluster = brokers.cluster()
    for time in times:
        cluster.offsets_at(dict.fromkeys(brokers.logs, time))
    return dict(brokers.asked)


def plain(size: int) -> Log:
    """Nobody's transactions: ten batches, stamped CLOCK and later."""
    return log(*(LogBatch((LogRecord(value=b"v" * size, time=CLOCK + n),)) for n in range(10)))


def many(made: Log, partitions: int, brokers: int) -> Brokers:
    return Brokers({TopicPartition("orders", n): made for n in range(partitions)}, count=brokers)


@pytest.mark.parametrize(("partitions", "brokers"), [(1, 1), (200, 3), (10_000, 3)])
@pytest.mark.parametrize("size", [10, 20_000])
def test_without_transactions_a_look_costs_at_most_two_more_requests_a_leader(
    partitions: int, brokers: int, size: int
) -> None:
    """The second is for large batches: whether they lie in tiered storage."""
    there = many(plain(size), partitions, brokers)
    more = brokers if size > PROBE_BYTES and partitions > brokers else 0
    assert cost(there, CLOCK + 5) == {"ListOffsets": brokers + more, "Fetch": brokers}
    assert there.sent <= brokers * (size + 200) + partitions * PROBE_BYTES
    again = many(plain(size), partitions, brokers)
    assert cost(again, CLOCK + 5, CLOCK + 5, CLOCK + 20) == {"ListOffsets": 3 * brokers + more, "Fetch": brokers}


@pytest.mark.parametrize("by_partition", [False, True])
def test_before_kafka_3_5_nothing_is_tiered(monkeypatch: pytest.MonkeyPatch, by_partition: bool) -> None:
    brokers, versions = many(plain(20_000), 20, 1), []

    async def send(leader: int, request: Any) -> Any:
        versions.append(request._min_version)
        if versions[-1] == 8 and not by_partition:
            raise IncompatibleBrokerVersion
        answer = await Brokers.send(brokers, leader, request)
        if versions[-1] == 8:
            for partition in answer.topics[0].partitions:
                partition.error_code = UnsupportedVersionError.errno
        return answer

    monkeypatch.setattr(brokers, "send", send)
    offsets = brokers.cluster().offsets_at(dict.fromkeys(brokers.logs, CLOCK + 5))
    assert set(offsets.values()) == {OffsetAtTime(5, CLOCK + 5)}
    assert 8 in versions


@pytest.mark.parametrize(("partitions", "brokers"), [(1, 1), (200, 3), pytest.param(10_000, 3, marks=pytest.mark.soak)])
def test_behind_a_marker_that_lies_just_before_the_record(partitions: int, brokers: int) -> None:
    made = log(data(10, 20), marker(100), data(90, 110), marker(120), data(130), marker(140))
    there = many(made, partitions, brokers)
    assert cost(there, 95) == {"ListOffsets": brokers, "Fetch": 2 * brokers}


@pytest.mark.parametrize(("partitions", "brokers"), [(1, 1), (200, 3), pytest.param(10_000, 3, marks=pytest.mark.soak)])
@pytest.mark.usefixtures("short")
def test_beyond_what_is_read_rounds_are_shared(partitions: int, brokers: int) -> None:
    there = many(transactions(12), partitions, brokers)
    assert cost(there, 245) == {"ListOffsets": brokers, "Fetch": 7 * brokers}


@pytest.mark.usefixtures("short")
def test_rounds_grow_with_the_logarithm_of_the_log() -> None:
    found = {n: cost(many(transactions(n), 1, 1), n * 20 + 5)["Fetch"] for n in (60, 600, 6_000)}
    assert found == {60: 12, 600: 20, 6_000: 25}


def test_the_hours_of_one_moment_share_what_was_read() -> None:
    made = transactions(1000, size=100)
    times = [Random(3).randrange(0, 40_000) for _ in range(20)]
    once, often = many(made, 6, 1), many(made, 6, 1)
    assert cost(often, *times)["Fetch"] <= cost(once, max(times))["Fetch"] + len(times)


def test_another_moment_looks_again() -> None:
    brokers = Brokers({TP: transactions(3)})
    cluster = brokers.cluster()
    cluster.offsets_at({TP: 95})
    before = brokers.asked["Fetch"]
    cluster._markers.forget()
    cluster.offsets_at({TP: 95})
    assert brokers.asked["Fetch"] == 2 * before
