"""A Rust program with stock crates as a peer: bench/rust, which cargo builds into build/rust on demand."""

from __future__ import annotations

import json
import subprocess
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from bench.formats import FORMATS
from bench.packages import ROOT
from bench.stand import PeerTask, Ready, serve

_SOURCE, _TARGET = ROOT / "bench" / "rust", ROOT / "build" / "rust"
_CRATES = ("rdkafka", "arrow-json", "arrow-avro", "parquet")


@contextmanager
def prepare(task: PeerTask) -> Iterator[Ready]:
    command = ["cargo", "build", "--release", "--locked", "--quiet"]
    subprocess.run([*command, "--manifest-path", _SOURCE / "Cargo.toml", "--target-dir", _TARGET], check=True)
    yield Ready(partial(_land, task), _read_versions())


def _read_versions() -> dict[str, str]:
    locked = tomllib.loads((_SOURCE / "Cargo.lock").read_text())["package"]
    return {crate["name"]: crate["version"] for crate in locked if crate["name"] in _CRATES}


def _land(task: PeerTask, out: Path) -> dict[str, Any]:
    avro_schema = FORMATS["avro"].schema if task.format == "avro" else ""
    document = asdict(task) | {"fields": list(task.schema.items()), "avro_schema": avro_schema}
    subprocess.run([_TARGET / "release" / "bench-land", out], input=json.dumps(document), text=True, check=True)
    return {}


if __name__ == "__main__":
    serve(prepare)
