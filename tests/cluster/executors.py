"""The executors of a cluster of ours, as processes of this machine."""

from __future__ import annotations

import os
from pathlib import Path

from bench.spark_cluster import LocalSpark


def executors(cluster: LocalSpark) -> list[int]:
    """The executors' processes, by their working folders."""
    return _of(cluster, b"CoarseGrainedExecutorBackend")


def daemons(cluster: LocalSpark) -> list[int]:
    """The Python processes that executors start with their first task."""
    return _of(cluster, b"daemon")


def _of(cluster: LocalSpark, word: bytes) -> list[int]:
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        try:
            line, folder = (place / "cmdline").read_bytes(), os.readlink(place / "cwd")
        except OSError:
            continue
        if word in line and folder.startswith(str(cluster.folder)):
            found.append(int(place.name))
    return found
