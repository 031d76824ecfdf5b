"""The command line as a person or a program meets it: arguments in; exit code, stdout and stderr out."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from sluice.cli.main import main

FEED = """\
kafka:
  bootstrap: 127.0.0.1:9
  bootstrap_timeout_ms: 300
topics: orders
start: earliest
"""


@dataclass(frozen=True)
class Said:
    code: int
    out: str
    err: str

    @property
    def document(self) -> dict[str, Any]:
        """The one JSON document on stdout; fails when there is anything else."""
        found = json.loads(self.out)
        assert isinstance(found, dict)
        return found


Sluice = Callable[..., Said]


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project with one feed whose Kafka does not answer; commands run in it."""
    for name in ("SLUICE_PROJECT", "KAFKA_BOOTSTRAP", "DAGSTER_HOME"):
        monkeypatch.delenv(name, raising=False)
    root = tmp_path / "project"
    (root / "feeds").mkdir(parents=True)
    (root / "feeds" / "orders.yaml").write_text(FEED)
    monkeypatch.chdir(root)
    return root


@pytest.fixture
def sluice(capfd: pytest.CaptureFixture[str]) -> Sluice:
    """Runs a command in this process: `sluice("plan", "orders")`."""

    def run(*arguments: str) -> Said:
        capfd.readouterr()
        code = main(arguments)
        return Said(code, *capfd.readouterr())

    return run


@pytest.fixture
def unused_port() -> Callable[[], int]:
    """A function that names a loopback port that nobody listens on."""

    def free() -> int:
        with socket.create_server(("127.0.0.1", 0)) as server:
            return int(server.getsockname()[1])

    return free
