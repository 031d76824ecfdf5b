"""The process from which Spark forks its Python workers (`spark.python.daemon.module`), with imports done.

    Spark's JVM ── python -m sluice.resources.spark.daemon ──┐ its streams, environment and arguments
    driver ─────── resources.spark.worker_pool, imports done ──────┴─ forks pyspark.daemon ── forks workers

Loading Arrow and the compiled loops takes most of a second. The pool of the driver does it while the JVM starts; this
process then only has the pool fork Spark's daemon. Without a pool, as on executors elsewhere, it loads the modules and
is the daemon itself. Every worker starts with them, also one that replaces a worker which died or raised, and all share
the memory. Nothing here starts a thread.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress

POOL = "SLUICE_WORKER_POOL"
"""The environment variable with the path of the socket on which the driver's pool listens."""
LOADED = (
    "sluice.resources.spark.executor",
    "sluice.pipelines.landing.task",
    "sluice.pipelines.records.json.format",
    "sluice.resources.kafka.fetch.fetch",
)
SPARK_MODULES = ("pyspark.daemon", "pyspark.worker")
"""Modules of Spark's own workers. PySpark imports the second after each fork, for fear of threads: it starts none."""
# Memory of a chunk is kept for the next one: by default glibc returns buffers of some megabytes each time, for
# the system to clear new ones. With Arrow's own allocator, Parquet of raw records takes longer to encode.
WORKERS_ENVIRONMENT = {
    "ARROW_DEFAULT_MEMORY_POOL": "system",
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(256 << 20),
}


def load_modules(modules: Sequence[str] = LOADED) -> None:
    """Import the modules of tasks, before a first fork."""
    gc.disable()  # none of the loaded objects is garbage
    for module in modules:
        try:
            importlib.import_module(module)
        except Exception:  # noqa: BLE001 - a worker that needs it raises the error
            break
    gc.freeze()  # collections in the workers would copy every shared page
    gc.enable()


def run_in_pool() -> bool:
    """Have the pool fork the daemon, and wait for its end. Returns False if there is no pool that answers."""
    with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as pool:
        pool.connect(os.environ[POOL])
        socket.send_fds(pool, [b"d"], [0, 1, 2])
        pool.sendall(json.dumps([dict(os.environ), sys.path, sys.argv]).encode())
        pool.shutdown(socket.SHUT_WR)
        if pool.recv(1):  # forked
            pool.recv(1)
            return True
    return False


if __name__ == "__main__" and not (POOL in os.environ and run_in_pool()):
    load_modules((*LOADED, *SPARK_MODULES))
    from pyspark.daemon import manager

    manager()
