"""Copies of old log entries in few objects, for readers that fold the log from its start.

A segment has the exact bytes of consecutive entries, which stay in the log: a stalled writer must find their numbers
taken, or it would create one again (invariant 11). So a crash, or two processes that write segments, do no harm, and a
Sluice without segments can read the log. A segment is valid if its last entry equals the one in the log; segments of
another log, or of lost entries, are ignored.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator
from hashlib import sha256
from itertools import pairwise
from typing import NamedTuple

from sluice.pipelines.lake import paths
from sluice.pipelines.ledger.columns import MOST, inflate
from sluice.pipelines.ports import Lake

FORMAT = 1
ENTRIES = 1000
BYTES = 16 << 20
"""The limits of a segment: entries, or bytes of them."""


class Segment(NamedTuple):
    """Entries by number and content, in order. `end` is the number that follows the last one."""

    end: int
    entries: tuple[tuple[int, bytes], ...]

    def dump(self) -> bytes:
        content = b"".join(data for _, data in self.entries)
        sizes = [(number, len(data)) for number, data in self.entries]
        head = {"format": FORMAT, "end": self.end, "entries": sizes, "sha256": sha256(content).hexdigest()}
        return zlib.compress(json.dumps(head, separators=(",", ":")).encode() + b"\n" + content, 6)

    @classmethod
    def load(cls, data: bytes) -> Segment | None:
        """Returns None if the data is not a segment."""
        try:
            head, _, content = inflate(data, MOST).partition(b"\n")
            raw = json.loads(head)
            if raw["format"] != FORMAT or sha256(content).hexdigest() != raw["sha256"]:
                return None
            entries, at = list[tuple[int, bytes]](), 0
            for number, size in raw["entries"]:
                entries.append((int(number), content[at : at + size]))
                at += size
            numbers = [n for n, _ in entries] + [int(raw["end"])]
            sound = len(numbers) > 1 and at == len(content) and all(a < b for a, b in pairwise(numbers))
            return cls(numbers[-1], tuple(entries)) if sound else None
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError, zlib.error):
            return None


def read(lake: Lake, feed: str, first: int = 0) -> Iterator[Segment]:
    """Yields this log's consecutive segments from the one with entry `first` on."""
    for path in lake.list(paths.segment_folder(feed)):
        numbers = paths.segment_numbers(path)
        if numbers is None or not numbers[0] <= first < numbers[1]:
            continue
        segment = Segment.load(lake.get(path) or b"")
        if segment is None or (segment.entries[0][0], segment.end) != numbers:
            continue
        number, data = segment.entries[-1]
        if lake.get(paths.log_path(feed, number)) == data:
            yield segment
            first = segment.end


def write(lake: Lake, feed: str, entries: Iterator[tuple[int, bytes]], below: int, limit: int) -> int:
    """Copy entries below a number into at most `limit` full segments. Returns the number of segments. Idempotent."""
    entries_held, size, done = list[tuple[int, bytes]](), 0, 0
    for number, data in entries:
        if entries_held and (len(entries_held) == ENTRIES or size >= BYTES):
            segment = Segment(number, tuple(entries_held))
            lake.put(paths.segment_path(feed, segment.entries[0][0], segment.end), segment.dump())
            entries_held, size, done = [], 0, done + 1
        if number >= below or done == limit:
            break
        entries_held.append((number, data))
        size += len(data)
    return done
