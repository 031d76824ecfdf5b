"""Hunts in separate processes, and their findings, including an input that ended the process."""

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
class Outcome:
    """Number of inputs, peak memory, and (target, input, report) of each finding, for one hunt or several."""

    inputs: int = 0
    peak_mib: int = 0
    findings: list[tuple[str, bytes, str]] = field(default_factory=list)


def run_hunts(*names: str, seed: int = 0, inputs: int = 0, seconds: float = 0, checked: Path | None = None) -> Outcome:
    """Run these hunts in one process to the end.

    `checked` is a folder of loops compiled with checks of every index and address; they are used if it is given.
    """
    env = dict(os.environ)
    if checked:
        env |= {"NUMBA_BOUNDSCHECK": "1", "NUMBA_CACHE_DIR": str(checked)}
        subprocess.run([sys.executable, "infra/loops.py"], env=env, cwd=ROOT, check=True)
    with tempfile.TemporaryDirectory() as folder:
        now = Path(folder) / "now"
        command = [sys.executable, "-m", "tests.fuzz.hunt", *names, "--seed", str(seed), "--now", str(now)]
        command += ["--inputs", str(inputs), "--seconds", str(seconds)]
        run = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, check=False)
        return _read(run, now)


def _read(run: subprocess.CompletedProcess[str], now: Path) -> Outcome:
    outcome, name = Outcome(), ""
    for line in run.stdout.splitlines():
        message = json.loads(line)
        if "begins" in message:
            name = message["begins"]
        elif "input" in message:
            outcome.findings.append((name, b64decode(message["input"]), message["told"]))
        else:
            outcome.inputs, outcome.peak_mib = outcome.inputs + message["done"], message["peak_mib"]
    if run.returncode:
        ending = signal.Signals(-run.returncode).name if run.returncode < 0 else f"exit code {run.returncode}"
        data = now.read_bytes() if now.exists() else bytes(4)
        last_input = data[4 : 4 + int.from_bytes(data[:4], "little")]
        outcome.findings.append((name, last_input, f"{run.stderr[-3000:]}\nthe process ended: {ending}"))
    return outcome
