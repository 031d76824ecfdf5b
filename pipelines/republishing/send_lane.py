"""Sends a lane of a republish: transaction by transaction, each with its records, its part of the map, and its
mark.

1. `begin` fences other senders of the lane and returns the newest committed mark.
2. Rows that follow the mark become records and are sent, until the transaction is large or old enough.
3. The map of the transaction is written into the lake.
4. The transaction ends with a new mark: records and mark are there for readers together, or not at all.

Guarantee: whatever ends a run, and whenever, the next one continues after the newest mark. So a reader of committed
records sees each record once, and those of one old partition in their old order. This rests on transactions and marks
alone. A token in the lake decides which of two concurrent runs continues: the one that began last.
"""

from __future__ import annotations

import inspect
import json
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from sluice.pipelines.errors import CommitFenced, PartUnreadable, ProofFailed, Refused, UsageError
from sluice.pipelines.lake import paths
from sluice.pipelines.ledger import Ledger
from sluice.pipelines.maintenance.fixers import module_of
from sluice.pipelines.model.kafka import CommittedOffset
from sluice.pipelines.ports import Clock, Delivered, Lake, Target
from sluice.pipelines.records.rows.row_format import get_offsets
from sluice.pipelines.records.shape import Shape
from sluice.pipelines.republishing import coordinates
from sluice.pipelines.republishing.republish_plan import PartitionBy, Piece, Republish, check_still_there, pieces
from sluice.pipelines.republishing.republish_rows import CHUNK_ROWS, RowCursor, Shelf, records_of
from sluice.pipelines.republishing.row_filter import open_condition
from sluice.pipelines.util.units import DAY

if TYPE_CHECKING:  # it loads compiled loops
    from sluice.pipelines.records.kafka_batches.encode import SealedBatch

TRANSACTION_BYTES = 64 << 20
"""Of rows in one transaction, or a little more."""
TRANSACTION_SECONDS = 10.0
"""How long rows are sent in one transaction at most; it must end before the coordinator gives it up."""

_USUAL_ROW_BYTES = 1000
_TRIES = 3
"""Retries of a lane that was fenced by a run that has ended, or by a timeout."""
_REMEDY = "fix it; nothing of this transaction was sent: def NAME(rows, partitions) returns a number for each row"


class Partitioner:
    """A user's function that chooses partitions, `--partition-by MODULE:FUNCTION`. `name` is as it was given.

    It is called as `function(rows, partitions)`: rows as they are sent (a `pyarrow.RecordBatch` of `key`, `value`,
    `timestamp` in ms, and `headers`), and the number of the target's partitions. It returns a partition for each row: a
    list, a numpy array or an Arrow array of integers from 0 to `partitions` - 1. Its results are checked.
    """

    def __init__(self, name: str, function: Callable[[pa.RecordBatch, int], Any]) -> None:
        self.name, self._function = name, function

    def __call__(self, rows: pa.RecordBatch, partitions: int) -> np.ndarray:
        """The partition of each row. Raises UsageError for whatever else the function does."""
        try:
            answer = self._function(rows, partitions)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - any error of user code
            raise self._wrong(f"raised {type(error).__name__}") from None
        chosen = self._numbers(answer)
        if len(chosen) != rows.num_rows:
            raise self._wrong(f"returned {len(chosen)} numbers for {rows.num_rows} rows")
        outside = chosen[(chosen < 0) | (chosen >= partitions)]
        if len(outside):
            raise self._wrong(f"returned {outside[0]}, and the target has partitions 0 to {partitions - 1}")
        return chosen

    def _numbers(self, answer: Any) -> np.ndarray:
        try:
            column = answer if isinstance(answer, pa.Array | pa.ChunkedArray) else pa.array(answer)
        except (pa.ArrowException, TypeError, ValueError):
            raise self._wrong(f"returned {type(answer).__name__}, which are no numbers") from None
        if isinstance(column, pa.ChunkedArray):
            column = column.combine_chunks()
        if not pa.types.is_integer(column.type) and len(column):
            raise self._wrong(f"returned {column.type}, and no integers")
        if column.null_count:
            raise self._wrong("returned nothing for some rows")
        try:
            return np.array(column.cast(pa.int64()).to_numpy(zero_copy_only=False), np.int64)
        except pa.ArrowInvalid:
            raise self._wrong("returned a number that is no partition") from None

    def _wrong(self, what: str) -> UsageError:
        return UsageError(f"--partition-by {self.name} {what}", remedy=_REMEDY)


def load(text: str, root: Path) -> Partitioner:
    """The function that `FILE.py:FUNCTION` or `MODULE:FUNCTION` names, both looked for in the folder `root`.

    Raises UsageError with the file and the line that is wrong.
    """
    module, name = module_of(text, root)
    function = getattr(module, name, None)
    if not callable(function):
        raise UsageError(
            f"{module.__file__} has no function {name}", remedy="name one that it defines at its top level"
        )
    try:
        inspect.signature(function).bind(None, 1)
    except TypeError:
        raise UsageError(
            f"{module.__file__}: {name} does not take rows and a number", remedy=f"def {name}(rows, partitions): ..."
        ) from None
    except ValueError:  # a builtin that tells nothing of itself
        pass
    return Partitioner(text, function)


@dataclass(frozen=True, slots=True)
class Pace:
    """How fast to send at most, in records and bytes a second; None: as fast as it goes."""

    records: float | None = None
    bytes: float | None = None


FREELY = Pace()
Report = Callable[[int, int], None]
"""Takes the offsets of a lane that are done, and for how long (ms) brokers had this run of it pause."""


@dataclass(frozen=True, slots=True)
class LaneSent:
    """Records sent by a lane: by this run, and `in_all`. `partitions` counts this run's records by partition of the
    target; `bytes` are those of its records before they are compressed; `before`: it was done already; `throttled_ms`:
    how long brokers had it pause."""

    lane: int
    records: int
    bytes: int
    transactions: int
    in_all: int
    before: bool = False
    partitions: dict[int, int] = field(default_factory=dict)
    throttled_ms: int = 0


def claim(lake: Lake, plan: Republish) -> str:
    """Make this run the only sender of the republish. Returns its token."""
    token = secrets.token_hex(8)
    lake.put(paths.republish_run_path(plan.feed, plan.id), json.dumps({"run": token}).encode())
    return token


@dataclass(frozen=True, slots=True)
class LaneProgress:
    """How far a lane is: the pieces that are done, the next offset of the one after them, the newest file of the map,
    and the records that were sent."""

    done: int = 0
    at: int = -1
    file: str = ""
    records: int = 0

    def to_committed(self, plan: Republish, lane: int) -> CommittedOffset:
        content = {**_said_of(plan, lane), "at": self.at, "file": self.file, "records": self.records}
        return CommittedOffset(self.done, metadata=json.dumps(content, separators=(",", ":")))

    @classmethod
    def read(cls, committed: CommittedOffset, plan: Republish, lane: int) -> LaneProgress:
        try:
            content: dict[str, Any] = json.loads(committed.metadata)
            mark = cls(committed.offset, int(content.pop("at")), str(content.pop("file")), int(content.pop("records")))
            if content == _said_of(plan, lane):
                return mark
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
            pass
        name = plan.lane_name(lane)
        raise Refused(
            f"the group {name} has a commit that does not belong to this republish",
            remedy=f"another program uses that group; choose another name with --id, or delete the group {name}",
        )

    def offsets(self, todo: Sequence[Piece]) -> int:
        """The offsets that are done, of these pieces."""
        done = sum(p.end - p.start for p in todo[: self.done])
        return done + (self.at - todo[self.done].start if self.at >= 0 else 0)


def _said_of(plan: Republish, lane: int) -> dict[str, Any]:
    """Returns the identity in a mark: a lane of a plan with another number of lanes has other pieces."""
    return {"republish": plan.digest} | ({"lane": lane, "lanes": plan.lanes} if plan.lanes > 1 else {})


def progress_of(lake: Lake, plan: Republish, lane: int) -> tuple[int, int]:
    """Returns a lower bound of a lane's finished offsets, and the time (ms) that brokers had it pause."""
    done, at, *paused = _least(lake, plan, lane)
    return LaneProgress(done, at).offsets(pieces(plan, lane)), sum(paused)


def _least(lake: Lake, plan: Republish, lane: int) -> list[int]:
    """How far the lane is at least: pieces, the next offset, and the pauses (ms), which lakes of before do not tell."""
    progress: list[int] = json.loads(lake.get(paths.republish_progress_path(plan.feed, plan.id, lane)) or b"[0,-1]")
    return progress


@dataclass
class Run:
    """One run over a lane of a plan, which `token` says is ours. `pace` bounds how fast it sends, `seconds` for how
    long rows go into one transaction; `codec` is a number of Kafka's CompressionType, `shape` the feed's; `partitioner`
    is the function that the plan names."""

    plan: Republish
    lane: int
    token: str
    ledger: Ledger
    lake: Lake
    target: Target
    shape: Shape
    clock: Clock
    codec: int = 3
    pace: Pace = FREELY
    partitioner: Partitioner | None = None
    report: Report = lambda offsets, paused: None
    seconds: float = TRANSACTION_SECONDS
    cursors: dict[int, RowCursor] = field(default_factory=dict, init=False)
    _shelf: Shelf | None = field(default=None, init=False)
    _records: int = field(default=0, init=False)
    _bytes: int = field(default=0, init=False)
    _transactions: int = field(default=0, init=False)
    _partitions: dict[int, int] = field(default_factory=dict, init=False)

    @cached_property
    def todo(self) -> list[Piece]:
        """Everything that the lane sends, in order."""
        return pieces(self.plan, self.lane)

    def carry_out(self) -> LaneSent:
        """Send the remaining records. Raises Refused, UsageError, UnknownTopic, NotAuthorized, KafkaUnavailable,
        CommitFenced, Unknown, LakeUnavailable: then run it again."""
        if (in_all := done_records(self.lake, self.plan, self.lane)) is not None:
            return LaneSent(self.lane, 0, 0, 0, in_all, before=True)
        now = self.target.partitions()
        if now < self.plan.wishes.partitions:
            raise Refused(
                f"topic {self.plan.wishes.to} has {now} partitions, and {self.plan.wishes.partitions} when this"
                " republish was planned: it was replaced by another topic",
                remedy="plan a new one with --id",
            )
        remaining = _TRIES
        while True:
            try:
                mark = self._send_all()
            except CommitFenced as error:
                self._check_ours()
                remaining -= 1
                if not remaining:
                    raise self._too_slow() if self.target.throttled_ms else error from None
            except (PartUnreadable, ProofFailed):
                # Parts that were merged, landed again or retired while they were read: the ledger names others now.
                if self._shelf is None or not self.ledger.list_replaced(self._shelf.list_parts()):
                    raise
            else:
                counted = self._records, self._bytes, self._transactions
                throttled = self.target.throttled_ms
                return LaneSent(self.lane, *counted, mark.records, partitions=self._partitions, throttled_ms=throttled)

    def _too_slow(self) -> CommitFenced:
        return CommitFenced(
            f"brokers had republish {self.plan.id} pause for {self.target.throttled_ms / 1000:.0f} s, and its"
            " transactions did not end in their time",
            remedy="nothing is sent twice; raise Kafka's quota for this client (producer_byte_rate), or"
            " kafka.transaction_timeout_ms in the feed, and run it again",
            topic=self.plan.wishes.to,
        )

    def _send_all(self) -> LaneProgress:
        """Send what follows the newest mark, to the end."""
        plan, state = self.plan, self.ledger.read()
        mark = self._begun()
        if mark.done < len(self.todo):
            check_still_there(state, plan)
        self.cursors.clear()
        with open_condition(plan.wishes, self.shape.landed_columns) as condition:
            shelf = self._shelf = Shelf(self.lake, self.ledger, state, plan, condition)
            while mark.done < len(self.todo):
                transaction = _Transaction(self, shelf, mark)
                sent = self.target.send(transaction.batches(), transaction.describe)
                mark = self._end(transaction, sent, mark)
        self._finish(mark)
        return mark

    def _check_ours(self) -> None:
        owner = self.lake.get(paths.republish_run_path(self.plan.feed, self.plan.id))
        if owner is None or json.loads(owner)["run"] != self.token:
            raise CommitFenced(
                f"another run carries republish {self.plan.id} of {self.plan.feed} out now",
                remedy="nothing is sent twice; wait for its end",
            )

    def _begun(self) -> LaneProgress:
        self._check_ours()  # before and after others are fenced: the run that began last wins
        state = self.target.begin()
        self._check_ours()
        mark = LaneProgress() if state is None else LaneProgress.read(state, self.plan, self.lane)
        old = self.clock() - self.plan.created > DAY
        forgotten = state is None and old and coordinates.files(self.lake, self.plan, self.lane)
        if [mark.done, mark.at] < _least(self.lake, self.plan, self.lane)[:2] or forgotten:
            raise Refused(
                f"Kafka no longer has the progress of republish {self.plan.id}: its group"
                f" {self.plan.lane_name(self.lane)} was deleted, reset, or unused for longer than Kafka keeps offsets",
                remedy="nothing was sent; check which records are in the target, and send the rest with a new --id",
            )
        return mark

    def _end(self, transaction: _Transaction, sent: list[Delivered], before: LaneProgress) -> LaneProgress:
        done, at = transaction.reached
        name = coordinates.file_name(self.plan, self.lane, before.done, before.at + 1)
        coordinates.write(self.lake, self.plan, name, before.file, sent, transaction.origins())
        mark = LaneProgress(done, at, name, before.records + transaction.rows)
        self.target.commit(mark.to_committed(self.plan, self.lane))
        path = paths.republish_progress_path(self.plan.feed, self.plan.id, self.lane)
        paused = self.target.throttled_ms
        self.lake.put(path, json.dumps([mark.done, mark.at, paused]).encode())
        self._records += transaction.rows
        self._bytes += transaction.bytes
        self._transactions += 1
        for d in sent:
            self._partitions[d.partition] = self._partitions.get(d.partition, 0) + len(d.numbers)
        self.report(mark.offsets(self.todo), paused)
        return mark

    def _finish(self, mark: LaneProgress) -> None:
        files = coordinates.chain(self.lake, self.plan, mark.file)
        coordinates.remove_others(self.lake, self.plan, self.lane, files)
        summary = {"records": mark.records, "files": files}
        self.lake.put(paths.republish_lane_path(self.plan.feed, self.plan.id, self.lane), json.dumps(summary).encode())


def done_records(lake: Lake, plan: Republish, lane: int) -> int | None:
    """The records of a lane that is done; None for one that is not."""
    summary = lake.get(paths.republish_lane_path(plan.feed, plan.id, lane))
    return None if summary is None else int(json.loads(summary)["records"])


def finish(lake: Lake, plan: Republish, now: int) -> int:
    """Keep that every lane is done. Returns the records that all have sent."""
    lanes = [json.loads(lake.get(paths.republish_lane_path(plan.feed, plan.id, n)) or b"") for n in range(plan.lanes)]
    records = sum(lane["records"] for lane in lanes)
    summary = {"records": records, "files": [name for lane in lanes for name in lane["files"]], "at": now}
    lake.put(paths.republish_done_path(plan.feed, plan.id), json.dumps(summary).encode())
    return int(records)


class _Transaction:
    """The rows of one transaction: taken while they are sent, and remembered by their numbers."""

    def __init__(self, run: Run, shelf: Shelf, mark: LaneProgress) -> None:
        self._run, self._shelf = run, shelf
        self.reached = (mark.done, mark.at)
        self.rows = self.bytes = self.held = 0
        self._began = time.monotonic()
        self._sources: list[np.ndarray] = []
        self._offsets: list[np.ndarray] = []

    def batches(self) -> Iterator[SealedBatch]:
        """Sealed batches of the rows that follow, until the transaction is full."""
        from sluice.pipelines.records.kafka_batches.encode import Accumulator

        accumulator = Accumulator(self._run.codec)
        for source, rows in self._take_rows():
            plan = self._run.plan
            records = records_of(rows, plan.sources[source], plan, self._run.shape, self._run.clock())
            numbers = np.arange(self.rows, self.rows + rows.num_rows)
            self._sources.append(np.full(rows.num_rows, source, np.int32))
            self._offsets.append(get_offsets(rows).copy())
            yield from self._count_batches(accumulator.add(records, self._where(records, source), numbers))
            self.rows += rows.num_rows
            self.held += records.nbytes
            pace = self._run.pace
            due = max(self.rows / (pace.records or np.inf), self.held / (pace.bytes or np.inf))
            ahead = due - (time.monotonic() - self._began)
            if ahead > 0:
                time.sleep(ahead)
        yield from self._count_batches(accumulator.flush())

    def _count_batches(self, batches: Iterable[SealedBatch]) -> Iterator[SealedBatch]:
        for batch in batches:
            self.bytes += batch.plain_bytes
            yield batch

    def _take_rows(self) -> Iterator[tuple[int, pa.RecordBatch]]:
        """Rows with their source. `reached` moves behind rows when the next ones are asked for."""
        todo, cursors = self._run.todo, self._run.cursors
        while self.reached[0] < len(todo) and not self._full():
            done, at = self.reached
            source, first, end = todo[done]
            start = max(first, at)
            if source not in cursors:
                cursors[source] = self._shelf.cursor(source, start)
            for rows in cursors[source].read_between(start, end, self._most):
                yield source, rows
                self.reached = (done, int(get_offsets(rows)[-1]) + 1)
                if self._full():
                    return
            self.reached = (done + 1, -1)

    def _most(self) -> int:
        """The rows of a second, at most: a slow republish must not keep a transaction open for long."""
        pace, row_bytes = self._run.pace, self.held / self.rows if self.rows else _USUAL_ROW_BYTES
        limit = min(pace.bytes or np.inf, self._most_bytes)
        return max(1, int(min(CHUNK_ROWS, pace.records or CHUNK_ROWS, limit / row_bytes)))

    @property
    def _most_bytes(self) -> int:
        return min(TRANSACTION_BYTES, self._run.target.most_bytes or TRANSACTION_BYTES)

    def _full(self) -> bool:
        return self.held >= self._most_bytes or time.monotonic() - self._began > self._run.seconds

    def _where(self, records: pa.RecordBatch, source: int) -> np.ndarray:
        """The partition of each record."""
        from sluice.pipelines.records.kafka_batches.encode import by_key, spread

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

    def origins(self) -> tuple[np.ndarray, np.ndarray]:
        """The source and the old offset of each row, by number."""
        empty = np.empty(0, np.int64)
        return np.concatenate([*self._sources, empty]).astype(np.int32), np.concatenate([*self._offsets, empty])

    def describe(self, number: int) -> str:
        sources, offsets = self.origins()
        source = self._run.plan.sources[int(sources[number])]
        return f"{source.key}:{int(offsets[number])}"
