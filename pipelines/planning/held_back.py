"""Offsets that open transactions hold back: their number, place, transaction and remedy.

All commands and reports on held records use these texts. All functions are pure, except `look`, which requests open
transactions from Kafka if records are held. Under `read_uncommitted` none ever are: the last stable offset is then the
high watermark.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from sluice.pipelines.feed.feed import Feed
from sluice.pipelines.model.kafka import BrokerConfig, OpenTransaction, PartitionState, TopicPartition
from sluice.pipelines.ports import Cluster
from sluice.pipelines.util.documents import Derived, Flat, Internal
from sluice.pipelines.util.units import many, show_about, show_duration


@dataclass(frozen=True, slots=True)
class HeldRange:
    """The offsets of one partition from its last stable offset up to its high watermark."""

    tp: Flat[TopicPartition]
    last_stable_offset: int
    high_watermark: int

    @property
    def offsets(self) -> Derived[int]:
        return self.high_watermark - self.last_stable_offset


@dataclass(frozen=True, slots=True)
class HeldBack:
    """The offsets that one open transaction holds back from `feed` at `now` (ms since the epoch).

    `transaction` is None if it is unknown. `limit` (ms) is the maximum duration of a transaction in this Kafka,
    None if unknown.
    """

    feed: Internal[Feed]
    partitions: tuple[HeldRange, ...]
    transaction: OpenTransaction | None
    now: Internal[int]
    limit: Internal[int | None] = None

    @property
    def offsets(self) -> Derived[int]:
        return sum(h.offsets for h in self.partitions)

    @property
    def age(self) -> int | None:
        """How long ago (ms) the transaction was last written to; None when unknown."""
        return (
            None
            if self.transaction is None or self.transaction.last_written < 0
            else max(0, self.now - self.transaction.last_written)
        )

    @property
    def age_seconds(self) -> Derived[float | None]:
        return None if self.age is None else self.age / 1000

    @property
    def overdue(self) -> Derived[bool]:
        """Returns whether its last write is older than `alerts.transaction`, so that it needs attention."""
        return self.age is not None and self.age > self.feed.alerts.transaction

    @property
    def message(self) -> Derived[str]:
        first, *others = self.partitions
        positions = [
            f"{first.tp} is held at offset {first.last_stable_offset}",
            *(f"{h.tp} at {h.last_stable_offset}" for h in others[:_NAMED]),
        ]
        more = f" and {many(len(others) - _NAMED, 'more partition')}" if len(others) > _NAMED else ""
        return f"{', '.join(positions)}{more} by {self.who}: {many(self.offsets, 'offset')} cannot land yet"

    @property
    def who(self) -> str:
        if self.transaction is None:
            return "an open transaction (Kafka does not report which)"
        return f"{self.transaction}" + ("" if self.age is None else f" ({show_about(self.age)} ago)")

    @property
    def remedy(self) -> Derived[str]:
        """How the transaction ends by itself, and the commands of Kafka's own tool that abort it, one per partition."""
        commands = [self._abort(h) for h in self.partitions[: _NAMED + 1]]
        rest = len(self.partitions) - len(commands)
        more = f", and so in {many(rest, 'more partition')}" if rest else ""
        return f"{self._waits()}{more}: {' && '.join(commands)}"

    def _waits(self) -> str:
        if self.age is not None and self.limit is not None and self.age > self.limit:
            return f"it hangs: none may last longer than {_limit(self.limit)}. Abort it"
        by_itself = "" if self.limit is None else f", or its coordinator {_limit(self.limit)} after it began"
        return f"runs land it once its producer has ended it{by_itself}. Not to wait, abort it"

    def _abort(self, blocked: HeldRange) -> str:
        """The command that aborts it in one partition. A cluster with authentication also needs a file for the tool."""
        who = "" if self.feed.kafka.security_protocol in (None, "PLAINTEXT") else " --command-config FILE"
        return (
            f"kafka-transactions.sh --bootstrap-server {shlex.quote(self.feed.kafka.bootstrap)}{who} abort "
            f"--topic {blocked.tp.topic} --partition {blocked.tp.partition} --start-offset {blocked.last_stable_offset}"
        )


_NAMED = 2
"""How many partitions are named besides the first one. `--json` has all."""


def _limit(ms: int) -> str:
    return f"{show_duration(ms)} here (transaction.max.timeout.ms)"


def list_held_back(
    feed: Feed,
    partitions: Iterable[PartitionState],
    holders: Mapping[TopicPartition, OpenTransaction],
    broker: BrokerConfig,
    now: int,
) -> tuple[HeldBack, ...]:
    """Returns the offsets that each open transaction holds back at `now` (ms since the epoch), largest first."""
    waiting = sorted(find_unstable(partitions), key=lambda p: p.tp)
    # A transaction that begins beyond these offsets is another one: the one that held these has ended since.
    holder_of = {p.tp: t for p in waiting if (t := holders.get(p.tp)) is not None and t.start < p.high_watermark}
    by: dict[int | None, list[HeldRange]] = {}
    for p in waiting:
        t = holder_of.get(p.tp)
        start = t.start if t else p.last_stable_offset
        by.setdefault(t.producer_id if t else None, []).append(HeldRange(p.tp, start, p.high_watermark))
    limit = broker.transaction_max_timeout
    blocked = (HeldBack(feed, tuple(h), _find_newest(h, holder_of), now, limit) for h in by.values())
    return tuple(sorted(blocked, key=lambda h: -h.offsets))


def find_unstable(partitions: Iterable[PartitionState]) -> list[PartitionState]:
    """The partitions whose last stable offset lies below their high watermark."""
    return [p for p in partitions if p.last_stable_offset < p.high_watermark]


def by_partition(holds: Iterable[HeldBack]) -> dict[TopicPartition, HeldBack]:
    """Returns the held offsets separately for each partition."""
    return {h.tp: replace(item, partitions=(h,)) for item in holds for h in item.partitions}


def _find_newest(
    blocked: Iterable[HeldRange], holders: Mapping[TopicPartition, OpenTransaction]
) -> OpenTransaction | None:
    """The transaction as seen in the partition that it wrote to last."""
    transactions = [t for h in blocked if (t := holders.get(h.tp)) is not None]
    return max(transactions, key=lambda t: t.last_written, default=None)


def look(feed: Feed, cluster: Cluster, partitions: Iterable[PartitionState], now: int) -> tuple[HeldBack, ...]:
    """Request the open transactions, and return the offsets held in these partitions. Raises KafkaUnavailable."""
    waiting = find_unstable(partitions)
    if not waiting:
        return ()
    holders = cluster.open_transactions([p.tp for p in waiting])
    return list_held_back(feed, waiting, holders, cluster.configs({p.topic for p in waiting}).broker, now)
