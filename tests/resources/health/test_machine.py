"""What is told of this machine."""

from __future__ import annotations

import shutil
import sys
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest

from sluice.pipelines.model.health import Health
from sluice.resources.health import examine, machine_checks


def test_this_machine_runs_sluice() -> None:
    found = examine(None, machine_checks.CHECKS)
    assert {d.title for d in found} == {"Python", "Java", "packages", "scratch"}
    assert Health.FAILED not in {d.health for d in found}
    assert sys.executable in found[0].found


def test_packages_that_differ_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    said = metadata.version

    def version(name: str) -> str:
        if name == "pyarrow":
            raise metadata.PackageNotFoundError(name)
        return "1.0.0" if name == "dagster" else said(name)

    monkeypatch.setattr(metadata, "version", version)
    (found,) = machine_checks.packages(None)
    assert (found.health, found.found) == (
        Health.FAILED,
        f"pyarrow is missing; dagster is 1.0.0, not dagster=={said('dagster')}",
    )


@pytest.mark.parametrize(
    ("free", "health"), [(100 << 20, Health.FAILED), (1 << 30, Health.WARNING), (9 << 30, Health.OK)]
)
def test_room(free: int, health: Health, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda place: SimpleNamespace(free=free))
    assert machine_checks.room("scratch", tmp_path, "TMPDIR").health is health
