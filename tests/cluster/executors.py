"""The executors of a local cluster, as processes of this machine."""

from __future__ import annotations

import os
from pathlib import Path

from bench.spark_cluster import LocalSpark


def list_executors(cluster: LocalSpark) -> list[int]:
    """Returns the pids of executors, found by their working folders."""
    return _list_processes(cluster, b"CoarseGrainedExecutorBackend")


def list_daemons(cluster: LocalSpark) -> list[int]:
    """Returns the pids of the Python daemons that executors start with their first task."""
    return _list_processes(cluster, b"daemon")


def _list_processes(cluster: LocalSpark, word: bytes) -> list[int]:
    pids = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            line, folder = (process / "cmdline").read_bytes(), os.readlink(process / "cwd")
        except OSError:
            continue
        if word in line and folder.startswith(str(cluster.folder)):
            pids.append(int(process.name))
    return pids
