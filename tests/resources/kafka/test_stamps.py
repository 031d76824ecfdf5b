"""Offsets by time behind transaction markers, over logs in memory: the answers and the number of requests."""

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
from tests.resources.kafka.made_up import Brokers, find_first_records

TP = TopicPartition("orders", 0)
CLOCK = 1_000_000
"""The brokers' clock at the first marker; records are stamped long before."""


def make_batch(*times: int, size: int = 1, **more: object) -> LogBatch:
    """Returns a transaction's batch with a record for each time."""
    batch = LogBatch(tuple(LogRecord(b"k", b"v" * size, t) for t in times), producer=7, transactional=True)
    return replace(batch, **more)  # type: ignore[arg-type]


def make_marker(clock: int = CLOCK, how: int = COMMIT) -> LogBatch:
    return LogBatch((LogRecord(time=clock),), producer=7, marker=how)


def make_transactions(count: int, per_transaction: int = 4, size: int = 1, step: int = 10, how: int = COMMIT) -> Log:
    """Returns a log of `count` transactions of two batches, with stamps `step` ms apart and a marker from CLOCK on."""
    batches = []
    for n in range(count):
        times = [(n * per_transaction + i) * step for i in range(per_transaction)]
        batches += [
            make_batch(*times[: per_transaction // 2], size=size),
            make_batch(*times[per_transaction // 2 :], size=size),
            make_marker(CLOCK + n, how),
        ]
    return log(*batches)


def find_offsets(brokers: Brokers, *times: int) -> list[OffsetAtTime | None]:
    cluster = brokers.build_cluster()
    return [cluster.offsets_at({TP: time})[TP] for time in times]


def find_expected(stored: Log, *times: int) -> list[OffsetAtTime | None]:
    return [None if hit is None else OffsetAtTime(*hit) for hit in find_first_records(stored, times)]


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits the bytes that are read behind a marker to almost nothing."""
    monkeypatch.setattr(markers, "_LEAST", 200)
    monkeypatch.setattr(markers, "_MOST", 200)


# -- the first record, never a marker


@pytest.mark.parametrize("how", [COMMIT, ABORT])
def test_first_record_is_located_behind_transaction_markers(how: int) -> None:
    stored = make_transactions(10, how=how)
    times = [0, 1, 25, 35, 40, 395, 390, 391, CLOCK, CLOCK + 100]
    assert find_offsets(Brokers({TP: stored}), *times) == find_expected(stored, *times)


def test_lookup_keeps_offset_that_points_to_a_record() -> None:
    stored = log(make_batch(0, CLOCK + 5), make_marker(), make_batch(7))
    assert find_offsets(Brokers({TP: stored}), CLOCK) == [OffsetAtTime(1, CLOCK + 5)]


def test_unordered_records_are_located_within_the_read_range() -> None:
    stored = log(
        make_batch(5),
        make_marker(),
        make_batch(50, 900, 20),
        make_batch(700),
        make_marker(),
        make_batch(60, 950),
        make_marker(),
    )
    times = range(0, 1000, 10)
    assert find_offsets(Brokers({TP: stored}), *times) == find_expected(stored, *times)


@pytest.mark.parametrize("codec", [GZIP, ZSTD])
def test_record_within_a_compressed_batch_is_located(codec: int) -> None:
    stored = log(make_batch(1), make_marker(), make_batch(*range(2, 500), codec=codec), make_marker())
    assert find_offsets(Brokers({TP: stored}), 250) == find_expected(stored, 250)


@pytest.mark.parametrize("magic", [0, 1])
@pytest.mark.parametrize("codec", [0, GZIP])
def test_record_among_batches_of_old_formats_is_located(magic: int, codec: int) -> None:
    old = LogBatch((LogRecord(time=300), LogRecord(time=400)), magic=magic, codec=codec)
    stored = log(make_batch(1), make_marker(), old, make_batch(500))
    (offset,) = find_offsets(Brokers({TP: stored}), 350)
    assert offset == (OffsetAtTime(3, 400) if magic else OffsetAtTime(4, 500)), "the oldest have no stamps"


def test_lookup_reads_batches_with_append_time_or_delete_horizon() -> None:
    stored = log(
        make_batch(1),
        make_marker(),
        make_batch(5, 6, append_time=400),
        make_batch(450, 430, delete_horizon=True),
        make_marker(),
    )
    assert find_offsets(Brokers({TP: stored}), 300, 440) == [OffsetAtTime(2, 400), OffsetAtTime(4, 450)]


def test_lookup_does_not_import_pandas() -> None:
    """Dagster evaluates sensors in one process, in which all imports stay loaded."""
    code = """
import sys
from tests.resources.kafka.test_stamps import TP, Brokers, find_expected, find_offsets, log, make_batch, make_marker
stored = log(make_batch(1), make_marker(), make_batch(*range(2, 500)), make_marker())
assert find_offsets(Brokers({TP: stored}), 250) == find_expected(stored, 250)
assert "pandas" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_lookup_in_compacted_log() -> None:
    compacted = make_batch(100, 200, gap=50, tail=9)
    stored = log(
        make_batch(1), make_marker(), compacted, replace(make_marker(), gap=70), make_batch(300, gap=20), make_marker()
    )
    assert find_offsets(Brokers({TP: stored}), 150, 250) == find_expected(stored, 150, 250)


def test_lookup_reads_batches_larger_than_requested_size() -> None:
    stored = log(
        make_batch(1),
        make_marker(),
        make_batch(50, size=300_000),
        make_batch(60, size=400_000),
        make_marker(),
        make_batch(70, size=90_000),
    )
    assert find_offsets(Brokers({TP: stored}), 50, 55, 65, 75) == find_expected(stored, 50, 55, 65, 75)


def test_unreadable_batch_is_left_to_landing() -> None:
    stored = log(make_batch(1), make_marker(), make_batch(2, 700, 3), make_marker())
    spoiled = bytearray(stored.batches[2].data)
    spoiled[-3] ^= 0x55
    stored.batches[2] = replace(stored.batches[2], data=bytes(spoiled))
    assert find_offsets(Brokers({TP: stored}), 500) == [OffsetAtTime(2, 500, by_marker=True)]


def test_invalid_batch_headers_end_the_search() -> None:
    stored = log(make_batch(1), make_marker(), make_batch(2), make_batch(700))
    stored.batches[2] = replace(stored.batches[2], data=b"\xff" * 100)
    assert find_offsets(Brokers({TP: stored}), 500) == [OffsetAtTime(2, 500, by_marker=True)]


# -- beyond the bytes that are read


@pytest.mark.usefixtures("short")
def test_distant_record_is_searched_by_offset() -> None:
    stored = make_transactions(3000)
    offsets = find_offsets(Brokers({TP: stored}), *range(95, 120_000, 1733))
    assert [f and replace(f, by_marker=False) for f in offsets] == find_expected(stored, *range(95, 120_000, 1733))
    assert all(f and f.by_marker for f in offsets)


@pytest.mark.usefixtures("short")
def test_lookup_without_matching_record_returns_end_of_log() -> None:
    stored = make_transactions(3000)
    assert find_offsets(Brokers({TP: stored}), 500_000) == [OffsetAtTime(stored.end, 500_000, by_marker=True)]


@pytest.mark.usefixtures("short")
def test_lookup_reads_records_of_a_log_that_grew() -> None:
    brokers = Brokers({TP: make_transactions(300)})
    cluster = brokers.build_cluster()
    assert cluster.offsets_at({TP: 50_000})[TP] == OffsetAtTime(brokers.logs[TP].end, 50_000, by_marker=True)
    brokers.logs[TP] = make_transactions(3000)
    (expected,) = find_expected(brokers.logs[TP], 50_000)
    assert expected is not None
    assert cluster.offsets_at({TP: 50_000})[TP] == replace(expected, by_marker=True)


@pytest.mark.usefixtures("short")
def test_lookup_in_log_with_only_markers_after_a_record() -> None:
    stored = log(make_batch(1), *(make_marker(CLOCK + n) for n in range(5000)))
    (offset,) = find_offsets(Brokers({TP: stored}), 500)
    assert offset in (None, OffsetAtTime(stored.end, 500, by_marker=True))


BATCH = st.one_of(
    st.builds(lambda times: make_batch(*times), st.lists(st.integers(0, 300), min_size=1, max_size=5)),
    st.builds(lambda c, how: make_marker(CLOCK + c, how), st.integers(0, 5), st.sampled_from([ABORT, COMMIT])),
    st.builds(lambda time, gap: make_batch(time, gap=gap), st.integers(0, 300), st.integers(0, 9)),
)


@settings(max_examples=150)
@given(st.lists(BATCH, min_size=1, max_size=25), st.lists(st.integers(0, 320), min_size=1, max_size=8))
def test_lookup_in_any_log_with_timestamps_in_any_order(batches: list[LogBatch], times: list[int]) -> None:
    stored = log(*batches)
    assert find_offsets(Brokers({TP: stored}), *times) == find_expected(stored, *times)


@settings(max_examples=150)
@given(st.data())
def test_lookup_in_any_time_ordered_log_with_small_reads(draws: st.DataObject) -> None:
    batches, clock = draws.draw(st.lists(BATCH, min_size=1, max_size=60)), 0
    for n, batch in enumerate(batches):
        if batch.marker is None:
            records = tuple(replace(r, time=(clock := clock + r.time)) for r in batch.records)
            batches[n] = replace(batch, records=records)
        else:
            batches[n] = make_marker(CLOCK + n)
    stored = log(*batches)
    times = draws.draw(st.lists(st.integers(0, clock + 10), min_size=1, max_size=8))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(markers, "_LEAST", 0)
        patch.setattr(markers, "_MOST", 0)
        answers = find_offsets(Brokers({TP: stored}), *times)
    for answer, expected, time in zip(answers, find_expected(stored, *times), times, strict=True):
        if expected is None:
            assert answer in (None, OffsetAtTime(stored.end, time, by_marker=True))
        else:
            assert answer is not None
            assert (answer.offset, answer.timestamp) == (expected.offset, expected.timestamp)


# -- logs that change, brokers that limit


def test_lookup_continues_when_retention_deletes_the_marker() -> None:
    brokers = Brokers({TP: log(make_batch(1), make_marker(), make_batch(2), make_marker(), make_batch(900))})

    def move_log_start(kind: str) -> None:
        brokers.starts[TP] = 4 if kind == "ListOffsets" else brokers.starts.get(TP, 0)

    brokers.after = move_log_start
    assert find_offsets(brokers, 500) == [OffsetAtTime(4, 900)]


def test_retention_that_overtakes_every_attempt_is_reported() -> None:
    stored = make_transactions(40)
    brokers = Brokers({TP: stored})
    brokers.after = lambda kind: brokers.starts.update({TP: brokers.starts.get(TP, 0) + 5})
    with pytest.raises(KafkaUnavailable, match="orders:0 began later each time"):
        find_offsets(brokers, 500_000)


def test_batch_that_fills_a_whole_response_hides_no_other_partition() -> None:
    """The other partitions then come back empty although they have records."""
    tps = [TopicPartition("orders", n) for n in range(8)]
    large = log(make_batch(CLOCK, size=9 << 20))
    logs = {tp: log(make_batch(1), make_marker(), make_batch(50, 60), make_marker()) for tp in tps[1:]}
    offsets = Brokers({tps[0]: large, **logs}, limit=8 << 20).build_cluster().offsets_at(dict.fromkeys(tps, 55))
    assert offsets == {tps[0]: OffsetAtTime(0, CLOCK)} | dict.fromkeys(tps[1:], OffsetAtTime(3, 60))


def test_batch_shrunk_by_compaction_after_its_header_was_read() -> None:
    """The broker returns only this batch, since it ends its segment or the log."""
    large, small = (log(make_batch(1), make_marker(), make_batch(50, 60, 70, size=size)) for size in (500, 1))
    brokers = Brokers({TP: large})

    def compact(kind: str) -> None:
        brokers.logs[TP] = small if kind == "Fetch" else large

    brokers.after = compact
    assert find_offsets(brokers, 55) == [OffsetAtTime(3, 60)]


def test_lookup_is_retried_after_leader_change() -> None:
    brokers = Brokers({TP: make_transactions(3)}, count=1)
    refused = [NotLeaderForPartitionError]
    build_part = brokers._build_part

    def refuse_once(*arguments: object) -> object:
        answer = build_part(*arguments)  # type: ignore[arg-type]
        return replace(answer, error=refused.pop()) if refused else answer

    brokers._build_part = refuse_once  # type: ignore[method-assign, assignment]
    brokers.sleep = lambda seconds: _do_nothing()  # type: ignore[attr-defined]
    assert find_offsets(brokers, 95) == find_expected(brokers.logs[TP], 95)


async def _do_nothing() -> None: ...


# -- the number of requests


def count_requests(brokers: Brokers, *times: int) -> dict[str, int]:
    """Look up these times in turn on one cluster, and count the requests by kind."""
    cluster = brokers.build_cluster()
    for time in times:
        cluster.offsets_at(dict.fromkeys(brokers.logs, time))
    return dict(brokers.requests)


def make_plain_log(size: int) -> Log:
    """Returns a log without transactions: ten batches, stamped from CLOCK on."""
    return log(*(LogBatch((LogRecord(value=b"v" * size, time=CLOCK + n),)) for n in range(10)))


def make_brokers(stored: Log, partitions: int, brokers: int) -> Brokers:
    return Brokers({TopicPartition("orders", n): stored for n in range(partitions)}, count=brokers)


@pytest.mark.parametrize(("partitions", "brokers"), [(1, 1), (200, 3), (10_000, 3)])
@pytest.mark.parametrize("size", [10, 20_000])
def test_lookup_without_transactions_adds_at_most_two_requests_per_leader(
    partitions: int, brokers: int, size: int
) -> None:
    """The second request asks whether large batches are in tiered storage."""
    fake_brokers = make_brokers(make_plain_log(size), partitions, brokers)
    more = brokers if size > PROBE_BYTES and partitions > brokers else 0
    assert count_requests(fake_brokers, CLOCK + 5) == {"ListOffsets": brokers + more, "Fetch": brokers}
    assert fake_brokers.sent <= brokers * (size + 200) + partitions * PROBE_BYTES
    again = make_brokers(make_plain_log(size), partitions, brokers)
    assert count_requests(again, CLOCK + 5, CLOCK + 5, CLOCK + 20) == {
        "ListOffsets": 3 * brokers + more,
        "Fetch": brokers,
    }


def test_boundary_is_not_looked_for_behind_the_end_of_the_log() -> None:
    """A broker answers a fetch there after half a second."""
    brokers = make_brokers(make_plain_log(10), 3, 1)
    cluster = brokers.build_cluster()
    hits = cluster.offsets_at(dict.fromkeys(brokers.logs, CLOCK + 5), max_skew=300_000)
    assert {hit and (hit.offset, hit.timestamp) for hit in hits.values()} == {(5, CLOCK + 5)}
    assert brokers.requests["Fetch"] == 1


@pytest.mark.parametrize("by_partition", [False, True])
def test_brokers_before_kafka_3_5_are_treated_as_untiered(monkeypatch: pytest.MonkeyPatch, by_partition: bool) -> None:
    brokers, versions = make_brokers(make_plain_log(20_000), 20, 1), []

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
    offsets = brokers.build_cluster().offsets_at(dict.fromkeys(brokers.logs, CLOCK + 5))
    assert set(offsets.values()) == {OffsetAtTime(5, CLOCK + 5)}
    assert 8 in versions


@pytest.mark.parametrize(("partitions", "brokers"), [(1, 1), (200, 3), pytest.param(10_000, 3, marks=pytest.mark.soak)])
def test_record_directly_behind_a_marker_costs_two_fetches_per_leader(partitions: int, brokers: int) -> None:
    stored = log(
        make_batch(10, 20), make_marker(100), make_batch(90, 110), make_marker(120), make_batch(130), make_marker(140)
    )
    fake_brokers = make_brokers(stored, partitions, brokers)
    assert count_requests(fake_brokers, 95) == {"ListOffsets": brokers, "Fetch": 2 * brokers}


@pytest.mark.parametrize(("partitions", "brokers"), [(1, 1), (200, 3), pytest.param(10_000, 3, marks=pytest.mark.soak)])
@pytest.mark.usefixtures("short")
def test_search_rounds_are_shared_by_partitions(partitions: int, brokers: int) -> None:
    fake_brokers = make_brokers(make_transactions(12), partitions, brokers)
    assert count_requests(fake_brokers, 245) == {"ListOffsets": brokers, "Fetch": 7 * brokers}


@pytest.mark.usefixtures("short")
def test_search_rounds_grow_logarithmically_with_the_log() -> None:
    fetches = {
        n: count_requests(make_brokers(make_transactions(n), 1, 1), n * 20 + 5)["Fetch"] for n in (60, 600, 6_000)
    }
    assert fetches == {60: 12, 600: 20, 6_000: 25}


def test_consecutive_lookups_share_the_read_data() -> None:
    stored = make_transactions(1000, size=100)
    times = [Random(3).randrange(0, 40_000) for _ in range(20)]
    once, often = make_brokers(stored, 6, 1), make_brokers(stored, 6, 1)
    assert count_requests(often, *times)["Fetch"] <= count_requests(once, max(times))["Fetch"] + len(times)


def test_lookup_after_forget_reads_again() -> None:
    brokers = Brokers({TP: make_transactions(3)})
    cluster = brokers.build_cluster()
    cluster.offsets_at({TP: 95})
    before = brokers.requests["Fetch"]
    cluster._markers.forget()
    cluster.offsets_at({TP: 95})
    assert brokers.requests["Fetch"] == 2 * before
