"""Where a figure comes from: processors, memory, system, and the versions of what ran."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from sluice import __version__
from sluice.resources.local import java
from sluice.resources.local.local_kafka import VERSION

_SHOWN = ("pyspark", "pyarrow", "duckdb", "kafka-python")


def cores() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def machine() -> dict[str, Any]:
    """Processors, memory and system, JSON-ready."""
    return {
        "cpu": _cpu(),
        "cores": cores(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
    }


def versions() -> dict[str, str]:
    """Of Python, Java, Kafka and the packages that matter here."""
    installed = {name: v for name in _SHOWN if (v := _version(name))}
    return {"python": platform.python_version(), "java": _java(), "kafka": VERSION, "sluice": __version__} | installed


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    match = re.search(r"model name\s*:\s*(.+)", info.read_text()) if info.exists() else None
    return match[1].strip() if match else platform.processor() or platform.machine()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _java() -> str:
    output = subprocess.run([java.find_java(), "-version"], capture_output=True, text=True, check=False).stderr
    match = re.search(r'version "([^"]+)"', output)
    return match[1] if match else "unknown"
