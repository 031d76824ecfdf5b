"""Polars as a peer: a Python process for each core, `bench.program_polars`, each with its share of the partitions."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from bench.stand import PeerTask, Ready, serve


@contextmanager
def prepare(task: PeerTask) -> Iterator[Ready]:
    yield Ready(partial(_land, task), {name: version(name) for name in ("polars", "confluent-kafka")})


def _land(task: PeerTask, out: Path) -> dict[str, Any]:
    out.mkdir(parents=True)
    ends = list(task.ends.items())
    shares = [dict(ends[i :: task.cores]) for i in range(min(task.cores, len(ends)))]
    processes = [_start(replace(task, ends=share), out / str(i)) for i, share in enumerate(shares)]
    if codes := [process.returncode for process in processes if process.wait()]:
        raise RuntimeError(f"a process of the loop ended with {codes[0]}")
    return {}


def _start(task: PeerTask, out: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "bench.program_polars", task.to_json(), str(out)]
    return subprocess.Popen(command, text=True, env={**os.environ, "POLARS_MAX_THREADS": "1"})


if __name__ == "__main__":
    serve(prepare)
