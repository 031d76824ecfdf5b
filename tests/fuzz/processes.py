"""Hunts in processes of their own, and what they found: also an input that ended one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from base64 import b64decode
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]


@dataclass
class Found:
    """Of one hunt or several: how many inputs, the most memory, (target, input, what came of it) of each finding."""

    inputs: int = 0
    peak_mib: int = 0
    findings: list[tuple[str, bytes, str]] = field(default_factory=list)


def hunt(*names: str, seed: int = 0, inputs: int = 0, seconds: float = 0, checked: Path | None = None) -> Found:
    """Run these hunts in one process to the end. `checked`: the folder of loops that check every index and
    address, which are used then."""
    env = dict(os.environ)
    if checked:
        env |= {"NUMBA_BOUNDSCHECK": "1", "NUMBA_CACHE_DIR": str(checked)}
    with tempfile.TemporaryDirectory() as folder:
        now = Path(folder) / "now"
        command = [sys.executable, "-m", "tests.fuzz.hunt", *names, "--seed", str(seed), "--now", str(now)]
        command += ["--inputs", str(inputs), "--seconds", str(seconds)]
        run = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, check=False)
        return _read(run, now)


def _read(run: subprocess.CompletedProcess[str], now: Path) -> Found:
    found, name = Found(), ""
    for line in run.stdout.splitlines():
        said = json.loads(line)
        if "begins" in said:
            name = said["begins"]
        elif "input" in said:
            found.findings.append((name, b64decode(said["input"]), said["told"]))
        else:
            found.inputs, found.peak_mib = found.inputs + said["done"], said["peak_mib"]
    if run.returncode:
        how = signal.Signals(-run.returncode).name if run.returncode < 0 else f"exit code {run.returncode}"
        data = now.read_bytes() if now.exists() else bytes(4)
        whole = data[4 : 4 + int.from_bytes(data[:4], "little")]
        found.findings.append((name, whole, f"{run.stderr[-3000:]}\nthe process ended: {how}"))
    return found
