"""Carries a republish out: transaction by transaction, each with its records, its part of the map, and its mark.

1. `begin` fences whoever else carries it out, and tells the newest mark that took effect.
2. Rows that follow the mark become records and are sent, until the transaction is large or old enough.
3. The map of the transaction is written into the lake.
4. The transaction ends with a new mark: records and mark are there for readers together, or not at all.

Guarantee: whatever ends a run, and whenever, the next one goes on behind the newest mark. So a reader of committed
records sees each record once, and those of one old partition in their old order.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from sluice.pipelines.lake import paths
from sluice.pipelines.landing.rows import offsets_of
from sluice.pipelines.ledger import Ledger
from sluice.pipelines.ports import Clock, Delivered, Lake, Target
from sluice.pipelines.republishing import coordinates
from sluice.pipelines.republishing.partitioner import Partitioner
from sluice.pipelines.republishing.plan import PartitionBy, Piece, Republish, check_still_there, pieces
from sluice.pipelines.republishing.rows import CHUNK_ROWS, Cursor, Shelf, records_of
from sluice.pipelines.republishing.where import opened
from sluice.pipelines.schema.schema import Schema
from sluice.pipelines.vocabulary.errors import Refused, UsageError
from sluice.pipelines.vocabulary.kafka import CommittedOffset
from sluice.pipelines.vocabulary.progress import Progress, Reporter
from sluice.pipelines.vocabulary.units import DAY

if TYPE_CHECKING:  # it loads compiled loops
    from sluice.pipelines.records.encode import SealedBatch

STAGE = "send"
TRANSACTION_BYTES = 64 << 20
"""Of rows in one transaction, or a little more."""
TRANSACTION_SECONDS = 10.0
"""How long rows are sent in one transaction; it must end before the coordinator gives it up."""

_USUAL_ROW_BYTES = 1000


@dataclass(frozen=True, slots=True)
class Pace:
    """How fast to send at most, in records and bytes a second; None: as fast as it goes."""

    records: float | None = None
    bytes: float | None = None


@dataclass(frozen=True, slots=True)
class Sent:
    """What a republish has sent: by this run, and by all together. `partitions` counts this run's records by partition
    of the target; `bytes` are those of its records before they are compressed."""

    plan: Republish
    records: int
    bytes: int
    transactions: int
    in_all: int
    seconds: float
    before: bool = False
    """Whether it was done already."""
    partitions: dict[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Mark:
    """How far it is: the pieces that are done, the next offset of the one after them, the newest file of the map, and
    the records that were sent."""

    done: int = 0
    at: int = -1
    file: str = ""
    records: int = 0

    def committed(self, plan: Republish) -> CommittedOffset:
        said = {"republish": plan.digest, "at": self.at, "file": self.file, "records": self.records}
        return CommittedOffset(self.done, metadata=json.dumps(said, separators=(",", ":")))

    @classmethod
    def read(cls, found: CommittedOffset, plan: Republish) -> _Mark:
        try:
            said: dict[str, Any] = json.loads(found.metadata)
            if said["republish"] == plan.digest:
                return cls(found.offset, int(said["at"]), str(said["file"]), int(said["records"]))
        except (ValueError, KeyError, TypeError):
            pass
        raise Refused(
            f"the group {plan.name} has committed something that is no mark of this republish",
            remedy=f"somebody else uses that group; choose another name with --id, or delete the group {plan.name}",
        )


@dataclass
class Run:
    """One run over a plan. `pace` bounds how fast it sends; `codec` is a number of Kafka's CompressionType;
    `partitioner` is the function that the plan names."""

    plan: Republish
    ledger: Ledger
    lake: Lake
    target: Target
    schema: Schema | None
    clock: Clock
    codec: int = 3
    pace: Pace = Pace()
    report: Reporter = lambda progress: None
    partitioner: Partitioner | None = None
    cursors: dict[int, Cursor] = field(default_factory=dict, init=False)

    @cached_property
    def todo(self) -> list[Piece]:
        """Everything that the plan sends, in order."""
        return pieces(self.plan)

    def carry_out(self) -> Sent:
        """Send what is left. Raises Refused, UsageError, UnknownTopic, NotAuthorized, KafkaUnavailable, CommitFenced,
        Unknown, LakeUnavailable: then run it again."""
        began, plan = time.monotonic(), self.plan
        if (done := self.lake.get(paths.republish_done_path(plan.feed, plan.id))) is not None:
            return Sent(plan, 0, 0, 0, json.loads(done)["records"], 0.0, before=True)
        self._check_partitions()
        state = self.ledger.read()
        mark = self._begun()
        if mark.done < len(self.todo):
            check_still_there(state, plan)
        with opened(plan.wishes) as condition:
            return self._send(Shelf(self.lake, self.ledger, state, plan, condition), mark, began)

    def _send(self, shelf: Shelf, mark: _Mark, began: float) -> Sent:
        plan, todo = self.plan, self.todo
        records = size = transactions = 0
        by_partition: dict[int, int] = {}
        while mark.done < len(todo):
            transaction = _Transaction(self, shelf, mark)
            sent = self.target.send(transaction.batches(), transaction.describe)
            mark = self._end(transaction, sent, mark)
            records += transaction.rows
            size += transaction.bytes
            transactions += 1
            for d in sent:
                by_partition[d.partition] = by_partition.get(d.partition, 0) + len(d.numbers)
            self.report(Progress(STAGE, self._offsets_done(mark), plan.span))
        self._finish(mark)
        seconds = time.monotonic() - began
        return Sent(plan, records, size, transactions, mark.records, seconds, partitions=by_partition)

    def _check_partitions(self) -> None:
        now = self.target.partitions()
        if now < self.plan.wishes.partitions:
            raise Refused(
                f"topic {self.plan.wishes.to} has {now} partitions, and {self.plan.wishes.partitions} when this"
                " republish was planned: it is another topic by now",
                remedy="plan a new one with --id",
            )

    def _begun(self) -> _Mark:
        found = self.target.begin()
        mark = _Mark() if found is None else _Mark.read(found, self.plan)
        least = json.loads(self.lake.get(paths.republish_progress_path(self.plan.feed, self.plan.id)) or b"[0,-1]")
        old = self.clock() - self.plan.created > DAY
        forgotten = found is None and old and coordinates.files(self.lake, self.plan)
        if [mark.done, mark.at] < least or forgotten:
            raise Refused(
                f"how far republish {self.plan.id} is, Kafka has forgotten: its group {self.plan.name} was deleted, set"
                " back, or left alone for longer than Kafka keeps offsets",
                remedy="nothing was sent; look at what is in the target, and send the rest by a new one with --id",
            )
        return mark

    def _end(self, transaction: _Transaction, sent: list[Delivered], before: _Mark) -> _Mark:
        done, at = transaction.reached
        name = f"{before.done:08d}-{before.at + 1:020d}-{secrets.token_hex(4)}.parquet"
        coordinates.write(self.lake, self.plan, name, before.file, sent, *transaction.origins())
        mark = _Mark(done, at, name, before.records + transaction.rows)
        self.target.commit(mark.committed(self.plan))
        path = paths.republish_progress_path(self.plan.feed, self.plan.id)
        self.lake.put(path, json.dumps([mark.done, mark.at]).encode())
        return mark

    def _offsets_done(self, mark: _Mark) -> int:
        done = sum(p.end - p.start for p in self.todo[: mark.done])
        return done + (mark.at - self.todo[mark.done].start if mark.at >= 0 else 0)

    def _finish(self, mark: _Mark) -> None:
        files = coordinates.chain(self.lake, self.plan, mark.file)
        coordinates.remove_others(self.lake, self.plan, files)
        said = {"records": mark.records, "files": files, "at": self.clock()}
        self.lake.put(paths.republish_done_path(self.plan.feed, self.plan.id), json.dumps(said).encode())


class _Transaction:
    """The rows of one transaction: taken while they are sent, and remembered by their numbers."""

    def __init__(self, run: Run, shelf: Shelf, mark: _Mark) -> None:
        self._run, self._shelf = run, shelf
        self.reached = (mark.done, mark.at)
        self.rows = self.bytes = self.held = 0
        self._began = time.monotonic()
        self._sources: list[np.ndarray] = []
        self._offsets: list[np.ndarray] = []

    def batches(self) -> Iterator[SealedBatch]:
        """Sealed batches of the rows that follow, until the transaction is full."""
        from sluice.pipelines.records.encode import Accumulator

        accumulator = Accumulator(self._run.codec)
        for source, rows in self._taken():
            plan = self._run.plan
            records = records_of(rows, plan.sources[source], plan, self._run.schema, self._run.clock())
            numbers = np.arange(self.rows, self.rows + rows.num_rows)
            self._sources.append(np.full(rows.num_rows, source, np.int32))
            self._offsets.append(offsets_of(rows).copy())
            yield from self._counted(accumulator.add(records, self._where(records, source), numbers))
            self.rows += rows.num_rows
            self.held += records.nbytes
            self._wait()
        yield from self._counted(accumulator.flush())

    def _counted(self, batches: Iterable[SealedBatch]) -> Iterator[SealedBatch]:
        for batch in batches:
            self.bytes += batch.plain_bytes
            yield batch

    def _taken(self) -> Iterator[tuple[int, pa.RecordBatch]]:
        """Rows with their source. `reached` moves behind rows when the next ones are asked for."""
        todo, cursors = self._run.todo, self._run.cursors
        while self.reached[0] < len(todo) and not self._full():
            done, at = self.reached
            source, first, end = todo[done]
            start = max(first, at)
            if source not in cursors:
                cursors[source] = self._shelf.cursor(source, start)
            for rows in cursors[source].between(start, end, self._most):
                yield source, rows
                self.reached = (done, int(offsets_of(rows)[-1]) + 1)
                if self._full():
                    return
            self.reached = (done + 1, -1)

    def _most(self) -> int:
        """The rows of a second, at most: a slow republish must not keep a transaction open for long."""
        pace, row_bytes = self._run.pace, self.held / self.rows if self.rows else _USUAL_ROW_BYTES
        return max(1, int(min(CHUNK_ROWS, pace.records or CHUNK_ROWS, (pace.bytes or np.inf) / row_bytes)))

    def _full(self) -> bool:
        return self.held >= TRANSACTION_BYTES or time.monotonic() - self._began > TRANSACTION_SECONDS

    def _where(self, records: pa.RecordBatch, source: int) -> np.ndarray:
        """The partition of each record."""
        from sluice.pipelines.records.encode import by_key, spread

        wishes = self._run.plan.wishes
        if wishes.by is PartitionBy.SAME:
            return np.full(records.num_rows, self._run.plan.sources[source].partition, np.int64)
        if wishes.by is PartitionBy.FUNCTION:
            if self._run.partitioner is None:
                raise UsageError(f"the function {wishes.function} was not loaded")
            return self._run.partitioner(records, wishes.partitions)
        spreading = spread(self._offsets[-1] + source, wishes.partitions)
        if wishes.by is PartitionBy.ROUND_ROBIN:
            return spreading
        return by_key(records.column("key"), wishes.partitions, spreading)

    def _wait(self) -> None:
        pace = self._run.pace
        due = max(self.rows / (pace.records or np.inf), self.held / (pace.bytes or np.inf))
        ahead = due - (time.monotonic() - self._began)
        if ahead > 0:
            time.sleep(ahead)

    def origins(self) -> tuple[np.ndarray, np.ndarray]:
        """The source and the old offset of each row, by number."""
        empty = np.empty(0, np.int64)
        return np.concatenate([*self._sources, empty]).astype(np.int32), np.concatenate([*self._offsets, empty])

    def describe(self, number: int) -> str:
        sources, offsets = self.origins()
        source = self._run.plan.sources[int(sources[number])]
        return f"{source.key}:{int(offsets[number])}"
