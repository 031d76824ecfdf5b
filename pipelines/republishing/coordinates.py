"""The map of a republish: which old coordinates became which new ones, a Parquet file for each transaction.

A file is written before its transaction ends, and names the file before it of its lane. A lane's newest mark in Kafka
names the newest file that counts; a file that no chain reaches belongs to a transaction that never took effect.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from sluice.pipelines.lake import parquet, paths
from sluice.pipelines.model.kafka import Key, TopicPartition
from sluice.pipelines.ports import Delivered, Lake
from sluice.pipelines.republishing import republish_plan as plans
from sluice.pipelines.republishing.republish_plan import Republish
from sluice.pipelines.schema.arrays import fixed_width, text_array
from sluice.pipelines.util.documents import Derived, Internal

MAP = pa.schema(
    [
        pa.field("topic", pa.dictionary(pa.int16(), pa.string()), nullable=False),
        pa.field("partition", pa.int32(), nullable=False),
        pa.field("offset", pa.int64(), nullable=False),
        pa.field("to_topic", pa.dictionary(pa.int16(), pa.string()), nullable=False),
        pa.field("to_partition", pa.int32(), nullable=False),
        pa.field("to_offset", pa.int64(), nullable=False),
    ]
)
_BEFORE = b"sluice.before"


def write(
    lake: Lake,
    plan: Republish,
    name: str,
    before: str,
    sent: Sequence[Delivered],
    origins: tuple[np.ndarray, np.ndarray],
) -> None:
    """Write the map of one transaction. `origins` has the source and the offset of each row, by its number."""
    sources, offsets = origins
    numbers = np.concatenate([d.numbers for d in sent]) if sent else np.empty(0, np.int64)
    # A batch's records have consecutive offsets from its first one on.
    new = [d.first + np.arange(len(d.numbers)) for d in sent]
    to = np.repeat([d.partition for d in sent], [len(d.numbers) for d in sent]).astype(np.int32)
    chosen = sources[numbers]
    topics = sorted({s.topic for s in plan.sources})
    # Topics are few and rows many: the file has a dictionary of them.
    topic_numbers = np.array([topics.index(s.topic) for s in plan.sources], np.int16)
    partition = np.array([s.partition for s in plan.sources], np.int32)
    columns = [
        pa.DictionaryArray.from_arrays(fixed_width(pa.int16(), topic_numbers[chosen]), text_array(topics)),
        fixed_width(pa.int32(), partition[chosen]),
        fixed_width(pa.int64(), offsets[numbers]),
        pa.DictionaryArray.from_arrays(
            fixed_width(pa.int16(), np.zeros(len(numbers), np.int16)), text_array([plan.wishes.to])
        ),
        fixed_width(pa.int32(), to),
        fixed_width(pa.int64(), np.concatenate([*new, np.empty(0, np.int64)]).astype(np.int64)),
    ]
    schema = MAP.with_metadata({_BEFORE: before.encode()})
    # Each map names the one before it: the maps of committed transactions are those that can be reached from the newest
    # mark, and a map of an aborted one is in no chain.
    with (
        lake.create(_path(plan, name)) as file,
        pq.ParquetWriter(file, schema, compression="zstd", use_dictionary=["topic", "to_topic"]) as writer,
    ):
        writer.write_batch(pa.RecordBatch.from_arrays(columns, schema=schema))


def chain(lake: Lake, plan: Republish, newest: str) -> list[str]:
    """The files that count, oldest first, from the name of the newest."""
    ids: list[str] = []
    while newest:
        ids.append(newest)
        with parquet.open_parquet(lake, _path(plan, newest)) as file:
            newest = (file.schema_arrow.metadata or {}).get(_BEFORE, b"").decode()
    return ids[::-1]


def read(lake: Lake, plan: Republish, name: str) -> pa.Table:
    """One file of the map, with the columns of `MAP`. Raises PartUnreadable."""
    path = _path(plan, name)
    with parquet.open_parquet(lake, path) as file:
        return file.read(use_threads=False)


def file_name(plan: Republish, lane: int, done: int, at: int) -> str:
    """A new name for the map of a transaction that begins at this place."""
    return f"{_begins(plan, lane)}{done:08d}-{at:020d}-{secrets.token_hex(4)}.parquet"


def _begins(plan: Republish, lane: int) -> str:
    return f"{lane:04d}-" if plan.lanes > 1 else ""


def files(lake: Lake, plan: Republish, lane: int) -> list[str]:
    """All files of a lane's map, also those of transactions that never took effect."""
    folder = paths.republish_map_folder(plan.feed, plan.id)
    names = (path.rpartition("/")[2] for path in lake.list(folder))
    return [name for name in names if name.startswith(_begins(plan, lane))]


def remove_others(lake: Lake, plan: Republish, lane: int, counting: Sequence[str]) -> None:
    """Remove a lane's files that do not count. Only the owner of the lane's transactional id may call it."""
    for name in set(files(lake, plan, lane)) - set(counting):
        lake.remove(_path(plan, name))


def _path(plan: Republish, name: str) -> str:
    return f"{paths.republish_map_folder(plan.feed, plan.id)}/{name}"


# -- asked


@dataclass(frozen=True, slots=True)
class SentRecord:
    """A record that a finished republish sent."""

    republish: str
    tp: Internal[TopicPartition]
    offset: Internal[int]
    to_tp: Internal[TopicPartition]
    to_offset: Internal[int]

    @property
    def from_(self) -> Derived[str]:
        return f"{self.tp}:{self.offset}"

    @property
    def to(self) -> Derived[str]:
        return f"{self.to_tp}:{self.to_offset}"


def whence_and_whither(
    lake: Lake, feed: str, tp: TopicPartition, offset: int, life: Key | None
) -> Iterator[SentRecord]:
    """Where finished republishes of the feed sent this record, and from where one sent it here. `life`: the one of the
    partition in which the feed read it; None if the feed does not read it."""
    for name in plans.names(lake, feed):
        done = lake.get(paths.republish_done_path(feed, name))
        if done is None:
            continue
        plan = plans.load(lake, feed, name)
        ways = (("", any(s.key == life for s in plan.sources)), ("to_", tp.topic == plan.wishes.to))
        prefixes = [prefix for prefix, possible in ways if possible]
        for file in json.loads(done)["files"]:
            for prefix in prefixes:
                yield from _find_moved(lake, plan, file, prefix, tp, offset)


def _find_moved(
    lake: Lake, plan: Republish, name: str, prefix: str, tp: TopicPartition, offset: int
) -> Iterator[SentRecord]:
    wanted = (
        (f"{prefix}topic", "=", tp.topic),
        (f"{prefix}partition", "=", tp.partition),
        (f"{prefix}offset", "=", offset),
    )
    with parquet.wrap_read_errors(_path(plan, name)), lake.open(_path(plan, name)) as opened:
        rows = pq.read_table(opened, filters=list(wanted), use_threads=False).to_pylist()
    for r in rows:
        old, new = TopicPartition(r["topic"], r["partition"]), TopicPartition(r["to_topic"], r["to_partition"])
        yield SentRecord(plan.id, old, r["offset"], new, r["to_offset"])
