"""A workload's topic in the benchmark's own Kafka: loaded once, found again by the next run.

Promises: a topic that `ensure` returns holds exactly the workload's records, each at the offset that is its number;
one whose loading was cut short is removed and made again.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterator
from dataclasses import astuple, dataclass
from itertools import zip_longest
from pathlib import Path

import pyarrow.compute as pc
from kafka import KafkaAdminClient, KafkaConsumer, TopicPartition

from bench.batches import EncodedBatch, batches
from bench.check import VERSION, Digest, digest_of_sent
from bench.formats import as_sent
from bench.produce import TopicProducer
from bench.workloads import Workload

Note = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Loaded:
    """A topic with all of a workload's records. `digests` is what each partition holds: all of it typed, what does not
    break the workload's contract, and as it came what does.
    """

    topic: str
    digests: dict[int, Digest]
    sound: dict[int, Digest]
    bad: dict[int, Digest]

    @property
    def ends(self) -> dict[int, int]:
        return {partition: digest.rows for partition, digest in self.digests.items()}


def ensure(workload: Workload, bootstrap: str, folder: Path, note: Note) -> Loaded:
    """The workload's topic, loaded now unless it is there. `folder` remembers what topics hold. Raises Failed."""
    memo = folder / f"{workload.name}-{workload.fingerprint}-{VERSION}.json"
    memory = _recall(memo)
    if memory and _ends(bootstrap, memory.topic) == memory.ends:
        return memory
    note(f"loading {workload.records:,} records into Kafka (kept for the next time)")
    loaded = _load(workload, bootstrap)
    _remember(memo, loaded)
    return loaded


def _load(workload: Workload, bootstrap: str) -> Loaded:
    prefix = f"bench-{workload.name}-{workload.fingerprint}-"
    topic = prefix + uuid.uuid4().hex[:6]
    with KafkaAdminClient(bootstrap_servers=bootstrap) as admin:
        if cut_short := [t for t in admin.list_topics() if t.startswith(prefix)]:
            admin.delete_topics(cut_short)
        shape = {"num_partitions": len(workload.weights), "configs": {"retention.ms": "-1"}}
        admin.create_topics({topic: shape}, wait_for_metadata=True)
    partitions = range(len(workload.weights))
    loaded = Loaded(topic, *(dict.fromkeys(partitions, Digest()) for _ in range(3)))
    with TopicProducer(bootstrap, topic, len(partitions)) as producer:
        for turn in zip_longest(*(_encode_partition(workload, p, loaded) for p in partitions)):
            producer.send({p: batch for p, batch in enumerate(turn) if batch})
        producer.flush()
    return loaded


def _encode_partition(workload: Workload, p: int, loaded: Loaded) -> Iterator[EncodedBatch]:
    """The partition's batches; their records are added to its digests."""
    for chunk in workload.chunks(p):
        loaded.digests[p] += digest_of_sent(p, chunk, workload.schema)
        if workload.contract:
            loaded.sound[p] += digest_of_sent(p, chunk.filter(pc.invert(chunk["bad"])), workload.schema)
            loaded.bad[p] += digest_of_sent(p, chunk.filter(chunk["bad"]))
        yield from batches(as_sent(chunk, workload.format), workload.codec, workload.batch_bytes)


def _ends(bootstrap: str, topic: str) -> dict[int, int]:
    """Records that each partition of the topic holds from offset 0 on; empty if the topic does not exist."""
    with KafkaConsumer(bootstrap_servers=bootstrap, allow_auto_create_topics=False) as consumer:
        partitions = [TopicPartition(topic, p) for p in consumer.partitions_for_topic(topic) or ()]
        begins, ends = consumer.beginning_offsets(partitions), consumer.end_offsets(partitions)
        return {tp.partition: ends[tp] for tp in partitions if begins[tp] == 0}


_DIGESTS = ("digests", "sound", "bad")


def _recall(memo: Path) -> Loaded | None:
    try:
        document = json.loads(memo.read_text())
    except (FileNotFoundError, ValueError):
        return None
    return Loaded(document["topic"], *({int(p): Digest(*d) for p, d in document[name].items()} for name in _DIGESTS))


def _remember(memo: Path, loaded: Loaded) -> None:
    memo.parent.mkdir(parents=True, exist_ok=True)
    partial = memo.with_suffix(".partial")
    digests = {name: {p: astuple(d) for p, d in getattr(loaded, name).items()} for name in _DIGESTS}
    partial.write_text(json.dumps({"topic": loaded.topic, **digests}))
    partial.replace(memo)
