"""Python packages that only a peer needs, not the project: fetched once, visible to that peer alone."""

from __future__ import annotations

import fcntl
import hashlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from sluice.pipelines.errors import SetupError

ROOT = Path(__file__).parents[1]


def packages(wanted: Sequence[str], folder: Path) -> Path:
    """A folder for PYTHONPATH that holds exactly these pinned packages, without their dependencies.

    It lives below `folder` and appears whole. Raises SetupError with pip's own words when they cannot be fetched.
    """
    digest = hashlib.sha256(repr((sys.version_info[:2], sorted(wanted))).encode()).hexdigest()[:8]
    target = folder / f"packages-{digest}"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "packages.lock").open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        if not target.is_dir():
            _fetch(wanted, target)
    return target


def make_python_path(*folders: Path) -> dict[str, str]:
    """Returns the environment by which a peer's process imports these folders and `bench`, wherever it runs."""
    return {"PYTHONPATH": os.pathsep.join(map(str, (*folders, ROOT)))}


def _fetch(wanted: Sequence[str], target: Path) -> None:
    # An environment of its own brings a pip; the one that we run in may have none, and stays as it is.
    with tempfile.TemporaryDirectory(dir=target.parent, prefix="packages.") as scratch:
        _run([sys.executable, "-m", "venv", f"{scratch}/venv"], wanted)
        pip = [f"{scratch}/venv/bin/python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        _run([*pip, "--no-deps", "--only-binary=:all:", "--target", f"{scratch}/found", *wanted], wanted)
        Path(scratch, "found").rename(target)


def _run(command: Sequence[str], wanted: Sequence[str]) -> None:
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        raise SetupError(
            f"could not fetch {', '.join(wanted)}\n{(result.stdout + result.stderr)[-1500:]}",
            remedy="check the network and repeat, or leave that peer out with --peer",
        )
