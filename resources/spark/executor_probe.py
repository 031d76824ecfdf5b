"""The check that an executor runs before the first batch. Sent as text, it needs only the standard library.

`answer(question)` never raises: errors are part of the answer, a dictionary of texts and numbers. The question holds
the driver's ports, pickled: they show whether Sluice can be imported there, and whether Kafka and the lake are reached.
"""

from __future__ import annotations

import importlib.metadata
import os
import pickle
import platform
import socket
import threading
import time
from typing import Any


def answer(question: dict[str, Any]) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "host": socket.gethostname(),
        "process": os.getppid(),
        "python": platform.python_version(),
        "machine": platform.machine(),
        "releases": {name: _release(name) for name in question["releases"]},
        "clock": time.time_ns() // 1_000_000,
        "imports": "",
        "kafka": {},
        "lake": "",
    }
    try:
        ports = pickle.loads(question["ports"])
        ports.load_loops()
    except Exception as error:  # noqa: BLE001 - the driver gets any error
        facts["imports"] = _describe_error(error)
        return facts
    late = f"no answer within {question['seconds']:.0f} s"
    facts |= {"kafka": {ports.bootstrap: late}, "lake": late}
    asks = {"kafka": ports.kafka, "lake": ports.lake}
    threads = [threading.Thread(target=_ask, args=(facts, *item), daemon=True) for item in asks.items()]
    for thread in threads:
        thread.start()
    until = time.monotonic() + question["seconds"]
    for thread in threads:
        thread.join(max(0.0, until - time.monotonic()))
    return dict(facts)


def _ask(facts: dict[str, Any], name: str, ask: Any) -> None:
    try:
        facts[name] = ask()
    except Exception as error:  # noqa: BLE001 - the driver gets any error
        facts[name] = {"": _describe_error(error)} if name == "kafka" else _describe_error(error)


def _describe_error(error: Exception) -> str:
    lines = str(getattr(error, "message", "") or error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"


def _release(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        pass
    try:  # Spark's own Python comes as a zip, without metadata
        return str(getattr(__import__(name), "__version__", ""))
    except ImportError:
        return ""
