"""Servers for all workers of a test run: a broker, a registry of schemas and an S3 store."""

from __future__ import annotations

import fcntl
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import TypeVar

from sluice.pipelines.util.locks import locking

Server = TypeVar("Server")
Run = Callable[[], AbstractContextManager[Server]]
"""Returns a block that runs a server."""


class SharedServers:
    """Servers that the first process that needs one runs for all. If that process is killed, they end with it."""

    def __init__(self, folder: Path, own: ExitStack) -> None:
        self.folder, self._own = folder, own

    def start(self, name: str, run: Run[Server], attach: Callable[[], Server | None]) -> Server:
        """Run the server, unless another process runs it."""
        with locking(self.folder / f"{name}.lock"):
            return server if (server := attach()) is not None else self._own.enter_context(run())


@contextmanager
def share_servers(folder: Path) -> Iterator[SharedServers]:
    """Yield the servers in this folder. At its end, this process stops those that it runs once no other process uses
    any."""
    folder.mkdir(exist_ok=True)
    # A lock of the process itself: children that it forks do not share it.
    with (folder / "users").open("a+") as users, ExitStack() as own:
        fcntl.lockf(users, fcntl.LOCK_SH)
        yield SharedServers(folder, own)
        fcntl.lockf(users, fcntl.LOCK_UN)  # two processes that both run servers do not wait for each other
        fcntl.lockf(users, fcntl.LOCK_EX)
