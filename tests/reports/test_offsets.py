"""Reports about positions: the start of a reader, deleted offsets, topics that were recreated or grew."""

from __future__ import annotations

from pathlib import Path

import pytest

from sluice.pipelines.errors import LogTruncated, SluiceError, TopicRecreated
from sluice.pipelines.model.kafka import TopicPartition
from sluice.pipelines.operating.acceptance import AcceptEvent
from sluice.testing.logs import Log, LogBatch, LogRecord, log
from tests.reports.world import Topics

A, B = TopicPartition("orders", 0), TopicPartition("orders", 1)
HOUR = 3_600_000
TIME = 1_700_000_000_000 // HOUR * HOUR
LATEST = "topics: orders\nstart: latest\n"
PATTERN = "topics: {include: ['orders.*']}\nstart: latest\n"


def make_log(count: int, time: int = TIME, name: bytes = b"v") -> Log:
    return log(LogBatch(tuple(LogRecord(b"k", name + b"%d" % i, time + i) for i in range(count))))


def test_new_partition_is_read_from_the_beginning(tmp_path: Path) -> None:
    """IBM/sarama#1739: records of a new partition, sent before the group detected it, were lost."""
    topics = Topics(tmp_path, LATEST, {A: make_log(3)})
    assert topics.land().rows.num_rows == 0
    topics.logs = {A: make_log(4), B: make_log(5)}
    landed = topics.land().rows
    assert landed.select(["partition", "offset"]).to_pylist() == [
        {"partition": 0, "offset": 3},
        *({"partition": 1, "offset": i} for i in range(5)),
    ]


def test_new_topic_of_a_pattern_is_read_from_the_beginning(tmp_path: Path) -> None:
    """confluentinc/librdkafka#1852: the first messages of a topic that a pattern matched later were lost."""
    topics = Topics(tmp_path, PATTERN, {A: make_log(3)})
    topics.land()
    topics.logs[TopicPartition("orders.eu", 0)] = make_log(2)
    landed = topics.land().rows
    assert landed["topic"].to_pylist() == ["orders.eu", "orders.eu"]


def test_log_that_ends_before_position_is_reported_as_truncated(tmp_path: Path) -> None:
    """IBM/sarama#1734: a log was deleted on the disk; the group stayed at an offset that no longer existed."""
    topics = Topics(tmp_path, logs={A: make_log(10)})
    topics.land()
    topics.logs = {A: make_log(6)}
    with pytest.raises(LogTruncated, match="sluice accept orders truncated"):
        topics.land()
    topics.accept_event(AcceptEvent.TRUNCATED)
    topics.logs = {A: make_log(8)}
    assert topics.land().rows["offset"].to_pylist() == [6, 7]


@pytest.mark.parametrize(
    ("report", "old", "new"), [("streamnative/kop#530", 10, 5), ("dibbhatt/kafka-spark-consumer#60", 3, 9)]
)
def test_recreated_topic_is_read_from_beginning_after_acceptance(
    report: str, old: int, new: int, tmp_path: Path
) -> None:
    """No records of the new topic were read, or the first ones were missed, since the old position was kept."""
    topics = Topics(tmp_path, logs={A: make_log(old, name=b"old")})
    topics.land()
    topics.logs, topics.ids = {A: make_log(new, name=b"new")}, {"orders": "id-2"}
    with pytest.raises(TopicRecreated, match="sluice accept orders recreated"):
        topics.land()
    topics.accept_event(AcceptEvent.RECREATED)
    assert topics.land().rows["value"].to_pylist() == [b"new%d" % i for i in range(new)]


def test_deleted_offsets_are_reported_and_not_skipped(tmp_path: Path) -> None:
    """confluentinc/librdkafka#3745: a position that retention had passed was reset to the end."""
    topics = Topics(tmp_path, logs={A: make_log(3), B: make_log(3)})
    topics.land()
    topics.logs = {A: log(LogBatch((LogRecord(),)), start=7), B: make_log(4)}
    with pytest.raises(SluiceError, match=r"\[3, 7\)"):
        topics.land()
    topics.text += "policies: {on_loss: accept}\n"
    assert topics.land().rows.select(["partition", "offset"]).to_pylist() == [{"partition": 0, "offset": 7}]


def test_start_time_after_all_records_begins_at_end(tmp_path: Path) -> None:
    """apache/hudi#19658: a partition without a record after the time was read from its beginning."""
    text = "topics: orders\nstart: '2023-11-14T23:30:00Z'\n"
    topics = Topics(tmp_path, text, {A: make_log(3, TIME), B: make_log(3, TIME + 2 * HOUR)})
    assert topics.land().rows.select(["partition", "offset"]).to_pylist() == [
        {"partition": 1, "offset": i} for i in range(3)
    ]
    topics.logs[A] = make_log(5, TIME)
    assert topics.land().rows.select(["partition", "offset"]).to_pylist() == [
        {"partition": 0, "offset": 3},
        {"partition": 0, "offset": 4},
    ]


def test_empty_topic_is_not_an_error(tmp_path: Path) -> None:
    """apache/spark#32747: a start by time failed the query where a partition had no record after it."""
    text = "topics: orders\nstart: '2023-11-14T23:30:00Z'\n"
    topics = Topics(tmp_path, text, {A: log(), B: log()})
    assert topics.land().rows.num_rows == 0
    topics.logs = {A: make_log(1), B: make_log(1)}
    assert topics.land().rows["partition"].to_pylist() == [0, 1]
