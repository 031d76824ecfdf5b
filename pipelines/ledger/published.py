"""The windows of each publish entry, stored compactly: one or two rows per window, permanently."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from sluice.pipelines.ledger.columns import NONE


class Published(Mapping[int | None, tuple[int, ...]]):
    """By window (its start, ms; None: outside windows) the publish entries that hold slices of it, oldest first.

    Immutable, except for a fold's own copy. `windows` and `numbers` are its columns, in order of the entries; do not
    write to them.
    """

    __slots__ = ("_sorted", "numbers", "windows")

    def __init__(self, windows: Iterable[int] = (), numbers: Iterable[int] = ()) -> None:
        """Build it from columns, with NONE for None. Raises ValueError if their lengths differ."""
        self.windows = windows if isinstance(windows, array) else array("q", windows)
        self.numbers = numbers if isinstance(numbers, array) else array("q", numbers)
        self._sorted: tuple[Any, Any] | None = None
        if len(self.windows) != len(self.numbers):
            raise ValueError("not one entry for each window")

    def _by_window(self) -> tuple[Any, Any]:
        """Returns windows in order, and the entries of each, oldest first."""
        if self._sorted is None:
            windows = np.array(self.windows, np.int64)
            order = np.argsort(windows, kind="stable")
            self._sorted = windows[order], np.array(self.numbers, np.int64)[order]
        return self._sorted

    def __getitem__(self, window: int | None) -> tuple[int, ...]:
        windows, numbers = self._by_window()
        key = NONE if window is None else window
        first, end = np.searchsorted(windows, key), np.searchsorted(windows, key, "right")
        if first == end:
            raise KeyError(window)
        return tuple(numbers[first:end].tolist())

    def __iter__(self) -> Iterator[int | None]:
        return (None if w == NONE else w for w in np.unique(self._by_window()[0]).tolist())

    def __len__(self) -> int:
        return len(np.unique(self._by_window()[0]))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Published):
            return NotImplemented
        return all(np.array_equal(a, b) for a, b in zip(self._by_window(), other._by_window(), strict=True))

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Published({dict(self)})"

    def since(self, number: int) -> set[int | None]:
        """Returns the windows of the publish entries from that number on."""
        return {None if w == NONE else w for w in self.windows[bisect_left(self.numbers, number) :]}

    def every(self) -> list[int]:
        """Returns all publish entries with slices, oldest first."""
        return list(dict.fromkeys(self.numbers))

    def copy(self) -> Published:
        return Published(self.windows[:], self.numbers[:])

    def add(self, number: int, windows: Iterable[int | None]) -> None:
        """Add the windows of the newest entry."""
        for window in windows:
            self.windows.append(NONE if window is None else window)
            self.numbers.append(number)
        self._sorted = None
