"""Small offset ranges of a task share files: by window, topic, partition and offset.

    choose small ranges → hold each until those before it have ended → one file → all of its receipts

Promises: the ranges of a file and their order follow from the plan and the ranges' rows, not from the time of reading;
so the same plan gives the same files (invariant 9). A range is in a file only if it was read to its end and its counts
add up; a failed one is left out, and the others land. A file has receipts when it is complete. Ranges
that wait for an earlier one take at most `WAITING_BYTES` of memory, and the rest waits on disk.
"""

from __future__ import annotations

import tempfile
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import BinaryIO, cast

import pyarrow as pa

from sluice.pipelines.feed.sections import LandingSettings
from sluice.pipelines.landing.proof import check_account
from sluice.pipelines.landing.writer import PartRole, PartTarget, SharedWriter
from sluice.pipelines.model.plans import MANY_RANGES, OffsetRange
from sluice.pipelines.model.receipts import Part, Receipt
from sluice.pipelines.ports import Lake

SMALL_BYTES = 4 << 20
"""The most bytes of rows in memory of an offset range that shares a file. One that has more gets files of its own."""
MANY = 4
"""The number of small offset ranges of a window in a task from which they share a file by default, unless the task has
many. With fewer, a file for each costs little, and a range can be landed again on its own.
"""
WAITING_BYTES = 32 << 20
"""The most bytes of rows that wait in memory for offset ranges before them."""


def may_share(ranges: Iterable[OffsetRange], settings: LandingSettings) -> list[OffsetRange]:
    """The offset ranges that are to share files, in the order in which they will lie there.

    These are small by their estimated bytes, lie in a window, and are not alone in it: a file holds ranges of one
    window and one life of one topic.
    """
    if settings.shared_files is False:
        return []
    small = [s for s in ranges if s.is_small]
    minimum = 2 if settings.shared_files or len(small) >= MANY_RANGES else MANY
    lots: dict[tuple[int, str, str, str], list[OffsetRange]] = {}
    for s in small:
        lots.setdefault(_group_key(s), []).append(s)
    shareable = (
        sorted(lot, key=lambda s: (s.partition, s.start)) for _, lot in sorted(lots.items()) if len(lot) >= minimum
    )
    return [s for lot in shareable for s in lot]


def _group_key(s: OffsetRange) -> tuple[int, str, str, str]:
    return (s.window or 0, s.folder, s.topic, s.incarnation)


@dataclass(frozen=True)
class UnwrittenRange:
    """An offset range that was read to its end and is in no file yet: its receipt without parts, and its rows by
    kind.
    """

    receipt: Receipt
    rows: Mapping[PartRole, Sequence[pa.RecordBatch]]

    @cached_property
    def bytes(self) -> int:
        return sum(batch.get_total_buffer_size() for batches in self.rows.values() for batch in batches)

    def copy(self) -> UnwrittenRange:
        """Returns a copy in buffers of its own: a decoder's are larger than their contents."""
        return UnwrittenRange(self.receipt, {role: [_copy(batches)] for role, batches in self.rows.items()})


def _copy(batches: Sequence[pa.RecordBatch]) -> pa.RecordBatch:
    return pa.concat_batches([*batches, batches[0].slice(0, 0)])


class Sharing:
    """Puts the offset ranges that `may_share` chose into files, in its order, whenever they have ended.

    Each range is given by `take`, or by `leave_out` if it failed or has a file of its own. `pop_landed` and `failed`
    have the outcomes of those taken, once their file is whole; `finish` ends the last file.
    """

    def __init__(
        self, ranges: Sequence[OffsetRange], settings: LandingSettings, lake: Lake, target: PartTarget | None
    ) -> None:
        self.failed: dict[OffsetRange, Exception] = {}
        self._landed: list[Receipt] = []
        self._left = deque(ranges)
        self._settings, self._lake, self._target = settings, lake, target
        self._waiting: dict[OffsetRange, UnwrittenRange | _OnDisk | None] = {}
        self._in_memory = 0
        self._file: SharedFiles | None = None

    def pop_landed(self) -> list[Receipt]:
        """Returns the receipts of the files that were completed since the last call."""
        landed, self._landed = self._landed, []
        return landed

    def take(self, unwritten: UnwrittenRange) -> None:
        """Take an offset range that was read to its end."""
        s = unwritten.receipt.offset_range
        if self._left[0] == s:
            self._left.popleft()
            self._add(unwritten)
        else:
            try:
                self._waiting[s] = self._keep(unwritten)
            except OSError as error:
                self.failed[s], self._waiting[s] = error, None
        self._advance()

    def _keep(self, unwritten: UnwrittenRange) -> UnwrittenRange | _OnDisk:
        """Returns the held offset range in memory, or on disk beyond `WAITING_BYTES`."""
        if self._in_memory + unwritten.bytes > WAITING_BYTES:
            return _OnDisk(unwritten)
        copy = unwritten.copy()
        self._in_memory += copy.bytes
        return copy

    def leave_out(self, s: OffsetRange) -> None:
        """Continue without an offset range."""
        self._waiting[s] = None
        self._advance()

    def finish(self) -> None:
        """End the last file. Offset ranges that were never given are left out."""
        for s in list(self._left):
            self._waiting.setdefault(s, None)
        self._advance()
        self._close()

    def abandon(self) -> None:
        """Remove incomplete files."""
        if self._file is not None:
            self._file.abandon()
            self._file = None
        for rows in self._waiting.values():
            if isinstance(rows, _OnDisk):
                rows.close()

    def _advance(self) -> None:
        while self._left and self._left[0] in self._waiting:
            s = self._left.popleft()
            range_rows = self._waiting.pop(s)
            if isinstance(range_rows, UnwrittenRange):
                self._in_memory -= range_rows.bytes
                self._add(range_rows)
            elif range_rows is not None:
                try:
                    self._add(range_rows.back())
                except (OSError, pa.ArrowException) as error:
                    self.failed[s] = error

    def _add(self, unwritten: UnwrittenRange) -> None:
        s = unwritten.receipt.offset_range
        if self._file is not None and _group_key(self._file.first) != _group_key(s):
            self._close()
        if self._file is None:
            target = replace(cast(PartTarget, self._target), offset_range=s)
            self._file = SharedFiles(target, self._settings, self._lake)
        try:
            self._file.add(unwritten)
        except Exception as error:  # noqa: BLE001 - becomes the outcome of every offset range in the file
            self._give_up(error)
            return
        if self._file.bytes >= self._settings.target_file_bytes:
            self._close()

    def _close(self) -> None:
        if self._file is None:
            return
        try:
            self._landed += self._file.close().values()
            self._file = None
        except Exception as error:  # noqa: BLE001 - becomes the outcome of every offset range in the file
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        file, self._file = self._file, None
        if file is not None:
            self.failed |= dict.fromkeys(file.offset_ranges, error)
            file.abandon()


class SharedFiles:
    """One shared file of each kind, of the same offset ranges. End them with `close` or `abandon`."""

    def __init__(self, target: PartTarget, settings: LandingSettings, lake: Lake) -> None:
        self.first = target.offset_range
        self._target, self._settings, self._lake = target, settings, lake
        self._receipts: list[Receipt] = []
        self._writers: dict[PartRole, SharedWriter] = {}

    @property
    def offset_ranges(self) -> list[OffsetRange]:
        return [r.offset_range for r in self._receipts]

    @property
    def bytes(self) -> int:
        return max((w.bytes for w in self._writers.values()), default=0)

    def add(self, unwritten: UnwrittenRange) -> None:
        """Add the rows of an offset range, in order of their offsets. Raises ProofFailed."""
        s = unwritten.receipt.offset_range
        self._receipts.append(unwritten.receipt)
        for role, batches in unwritten.rows.items():
            if sum(batch.num_rows for batch in batches):
                if role not in self._writers:
                    target = replace(self._target, offset_range=s, kind=role.kind, output=role.output)
                    self._writers[role] = SharedWriter(self._lake, target, batches[0].schema, self._settings)
                self._writers[role].add(s, batches)

    def close(self) -> dict[OffsetRange, Receipt]:
        """End the files. Returns the receipts of their offset ranges, which the caller writes."""
        parts: dict[OffsetRange, tuple[Part, ...]] = {}
        for writer in self._writers.values():
            for s, part in writer.close().items():
                parts[s] = (*parts.get(s, ()), part)
        receipts = [replace(r, parts=parts.get(r.offset_range, ())) for r in self._receipts]
        spent = {
            "encode": sum(w.encode_ns for w in self._writers.values()),
            "write": sum(w.write_ns for w in self._writers.values()),
        }
        receipts[0] = replace(receipts[0], timings=receipts[0].timings | spent)
        for r in receipts:
            check_account(r)
        return {r.offset_range: r for r in receipts}

    def abandon(self) -> None:
        """Remove everything that was written."""
        for writer in self._writers.values():
            with suppress(Exception):
                writer.abandon()


class _OnDisk:
    """A held offset range whose rows wait in a temporary file."""

    def __init__(self, unwritten: UnwrittenRange) -> None:
        self._receipt = unwritten.receipt
        self._files: dict[PartRole, BinaryIO] = {}
        for role, batches in unwritten.rows.items():
            self._files[role] = file = cast(BinaryIO, tempfile.TemporaryFile())  # noqa: SIM115 - `close` does it
            with pa.ipc.new_stream(file, batches[0].schema) as out:
                out.write_batch(_copy(batches))

    def back(self) -> UnwrittenRange:
        """The offset range, in memory again."""
        rows = dict[PartRole, Sequence[pa.RecordBatch]]()
        for role, file in self._files.items():
            file.seek(0)
            with pa.ipc.open_stream(file) as stream:
                rows[role] = [stream.read_next_batch()]
        self.close()
        return UnwrittenRange(self._receipt, rows)

    def close(self) -> None:
        for file in self._files.values():
            file.close()
