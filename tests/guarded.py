"""Memory that ends, or begins, at a page which nobody may touch: one byte too far ends the process (Linux only)."""

from __future__ import annotations

import ctypes
from collections import defaultdict
from typing import Any

import numpy as np

PAGE = 4096
READ_WRITE, PRIVATE_ANONYMOUS = 3, 0x22


class Guarded:
    """Rooms between two guarded pages each. What was freed is handed out again, with whatever it held."""

    def __init__(self) -> None:
        self._c = ctypes.CDLL(None, use_errno=True)
        self._c.mmap.restype = ctypes.c_void_p
        self._c.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
        self._c.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        self._used: list[np.ndarray] = []
        self._free: dict[int, list[np.ndarray]] = defaultdict(list)

    def room(self, size: int, *, at_end: bool = True) -> np.ndarray:
        """`size` bytes that end (or begin) where a guarded page begins (or ends)."""
        # Powers of two: rooms of a few sizes serve again, and the kernel's count of mappings stays bounded.
        pages = 1 << (-(-max(int(size), 1) // PAGE) - 1).bit_length()
        whole = self._free[pages].pop() if self._free[pages] else self._mapped(pages * PAGE)
        self._used.append(whole)
        return whole[len(whole) - size :] if at_end else whole[:size]

    def filled(self, data: bytes, *, at_end: bool = True) -> np.ndarray:
        """A room with these bytes."""
        room = self.room(len(data), at_end=at_end)
        room[:] = np.frombuffer(data, np.uint8)
        return room

    def buffer(self, n: int, kind: Any) -> np.ndarray:
        """Room for `n` items that ends at a guarded page."""
        return self.room(n * np.dtype(kind).itemsize).view(kind) if n else np.empty(0, kind)

    def free(self) -> None:
        """Nobody looks at what was handed out any more."""
        for whole in self._used:
            self._free[len(whole) // PAGE].append(whole)
        self._used = []

    def _mapped(self, size: int) -> np.ndarray:
        base = self._c.mmap(None, size + 2 * PAGE, READ_WRITE, PRIVATE_ANONYMOUS, -1, 0)
        assert self._c.mprotect(base, PAGE, 0) == 0
        assert self._c.mprotect(base + PAGE + size, PAGE, 0) == 0
        return np.frombuffer((ctypes.c_char * size).from_address(base + PAGE), np.uint8)
