"""Memory that ends, or begins, at an inaccessible page: one byte too far ends the process (Linux only)."""

from __future__ import annotations

import ctypes
from collections import defaultdict
from typing import Any

import numpy as np

PAGE = 4096
READ_WRITE, PRIVATE_ANONYMOUS = 3, 0x22


class Guarded:
    """Allocates buffers between two guarded pages each. Freed buffers are reused with their old bytes."""

    def __init__(self) -> None:
        self._c = ctypes.CDLL(None, use_errno=True)
        self._c.mmap.restype = ctypes.c_void_p
        self._c.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
        self._c.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        self._used: list[np.ndarray] = []
        self._free: dict[int, list[np.ndarray]] = defaultdict(list)

    def allocate(self, size: int, *, at_end: bool = True) -> np.ndarray:
        """Returns `size` bytes that end (or begin) where a guarded page begins (or ends)."""
        # Powers of two: buffers of few sizes are reused, and the kernel's count of mappings stays bounded.
        pages = 1 << (-(-max(int(size), 1) // PAGE) - 1).bit_length()
        mapping = self._free[pages].pop() if self._free[pages] else self._map(pages * PAGE)
        self._used.append(mapping)
        return mapping[len(mapping) - size :] if at_end else mapping[:size]

    def fill(self, data: bytes, *, at_end: bool = True) -> np.ndarray:
        """Returns a buffer with these bytes."""
        buffer = self.allocate(len(data), at_end=at_end)
        buffer[:] = np.frombuffer(data, np.uint8)
        return buffer

    def allocate_items(self, n: int, kind: Any) -> np.ndarray:
        """Returns a buffer of `n` items that ends at a guarded page."""
        return self.allocate(n * np.dtype(kind).itemsize).view(kind) if n else np.empty(0, kind)

    def free(self) -> None:
        """Release all buffers; the caller no longer uses them."""
        for mapping in self._used:
            self._free[len(mapping) // PAGE].append(mapping)
        self._used = []

    def _map(self, size: int) -> np.ndarray:
        base = self._c.mmap(None, size + 2 * PAGE, READ_WRITE, PRIVATE_ANONYMOUS, -1, 0)
        assert self._c.mprotect(base, PAGE, 0) == 0
        assert self._c.mprotect(base + PAGE + size, PAGE, 0) == 0
        return np.frombuffer((ctypes.c_char * size).from_address(base + PAGE), np.uint8)
