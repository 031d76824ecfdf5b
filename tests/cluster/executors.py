"""The executors of a cluster of ours, as processes of this machine."""

from __future__ import annotations

import os
from pathlib import Path

from sluice.resources.local.spark_cluster import LocalSpark


def executors(cluster: LocalSpark) -> list[int]:
    """The executors' processes, by their working folders."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        try:
            line, folder = (place / "cmdline").read_bytes(), os.readlink(place / "cwd")
        except OSError:
            continue
        if b"CoarseGrainedExecutorBackend" in line and folder.startswith(str(cluster.folder)):
            found.append(int(place.name))
    return found
