"""Calls in a process that is killed before one of its effects: a change of the lake, a commit to a table, or a move of
a file.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sluice.cli.main import main
from sluice.resources.lake.local_lake import LocalLake

_PROCESSES = multiprocessing.get_context("forkserver")
_PROCESSES.set_forkserver_preload([__name__, "pyiceberg.catalog.sql", "pyiceberg.io.pyarrow", "deltalake", "duckdb"])


def run_until_killed(effect: int, call: Callable[..., object], *arguments: Any) -> bool:
    """Call in a process that is killed before its effect of that number. Returns whether it was killed."""
    process = _PROCESSES.Process(target=_run, args=(effect, call, arguments), daemon=True)
    process.start()
    process.join(300)
    assert process.exitcode in (0, -signal.SIGKILL), process.exitcode
    return process.exitcode != 0


def run_command(root: Path, *words: str) -> None:
    """Run a command of `sluice`, which must succeed."""
    assert main([*words, "--project", str(root)]) == 0


def _run(effect: int, call: Callable[..., object], arguments: tuple[Any, ...]) -> None:
    from deltalake import DeltaTable
    from pyiceberg.catalog.sql import SqlCatalog
    from pyiceberg.io.pyarrow import PyArrowFileIO

    count = itertools.count(1)

    def wrap(call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **more: Any) -> Any:
            if next(count) == effect:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*args, **more)

        return wrapper

    effects: list[tuple[Any, str]] = [
        (LocalLake, name) for name in ("put_if_absent", "put", "create", "show", "remove")
    ]
    effects += [(DeltaTable, "create_write_transaction"), (SqlCatalog, "commit_table"), (PyArrowFileIO, "delete")]
    effects += [(os, "replace"), (shutil, "copy2"), (Path, "unlink")]
    for owner, name in effects:
        setattr(owner, name, wrap(getattr(owner, name)))
    call(*arguments)
