"""One broker for all workers of a test run."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sluice.pipelines.util.locks import locking
from sluice.resources.local.local_kafka import LocalKafka


@contextmanager
def share_kafka(folder: Path) -> Iterator[LocalKafka]:
    """Yield the broker in this folder.

    The first process starts it and, at its own end, waits until no other process uses it. If the process is killed,
    the broker ends with it.
    """
    folder.mkdir(exist_ok=True)
    root = folder / "kafka"
    # A lock of the process itself: children that it forks do not share it.
    with (folder / "users").open("a+") as users:
        fcntl.lockf(users, fcntl.LOCK_SH)
        with locking(folder / "starting"):
            starter = not ((root / "cluster.json").exists() and LocalKafka.attach(root).running)
            cluster = LocalKafka(root, keep=False).start() if starter else LocalKafka.attach(root)
        try:
            yield cluster
        finally:
            if starter:
                fcntl.lockf(users, fcntl.LOCK_EX)
                cluster.stop()
