"""The process from which Spark forks its Python workers (`spark.python.daemon.module`), with imports done.

Loading Arrow and the compiled loops takes seconds. Done here once, every worker starts with them, also one that
replaces a worker which died or raised, and all share the memory. Nothing here opens a socket or starts a thread. The
pool of workers without Spark (`resources.worker_pool`) loads the same modules.
"""

from __future__ import annotations

import gc
import importlib

LOADED = (
    "sluice.resources.spark.executor",
    "sluice.pipelines.landing.task",
    "sluice.pipelines.records.json.format",
    "sluice.resources.kafka.fetch.fetch",
)
# Memory of a chunk is kept for the next one: by default glibc returns buffers of some megabytes each time, for
# the system to clear new ones. With Arrow's own allocator, Parquet of raw records takes longer to encode.
WORKERS_ENVIRONMENT = {
    "ARROW_DEFAULT_MEMORY_POOL": "system",
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(256 << 20),
}


def load_modules() -> None:
    """Import the modules of tasks, before a first fork. Compile missing loops."""
    gc.disable()  # none of the loaded objects is garbage
    for module in LOADED:
        try:
            if module == LOADED[1]:  # the first that has compiled loops
                importlib.import_module("sluice.pipelines.records.compiled.cache").ready()
            importlib.import_module(module)
        except Exception:  # noqa: BLE001 - a worker that needs it raises the error
            break
    gc.freeze()  # collections in the workers would copy every shared page
    gc.enable()


if __name__ == "__main__":
    from pyspark.daemon import manager

    load_modules()
    manager()
