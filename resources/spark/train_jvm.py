"""Makes the archive of classes with which Spark's JVM starts faster (`jvm.prepare` runs this as a process).

python -m sluice.resources.spark.train_jvm FOLDER
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from sluice.pipelines.feed.sections import SparkSettings
from sluice.pipelines.util import scratch
from sluice.resources.local import java
from sluice.resources.spark import engine
from sluice.resources.spark.jvm import FLAGS, OPTIONS, Archive


def train(folder: Path) -> None:
    """Start Spark as PySpark does, run a job with Python workers, and have its JVM archive the classes it loaded."""
    archive, own = Archive(folder), f"-Djava.io.tmpdir={scratch.get_root()}"
    dump = f"-XX:ArchiveClassesAtExit={archive.classes}"
    settings = SparkSettings(
        master="local[1]", conf={OPTIONS: f"{FLAGS} {own} {dump}", "spark.python.daemon.module": "pyspark.daemon"}
    )
    spark = engine.context(settings)
    for _ in range(2):
        spark.parallelize(range(2), 2).mapPartitions(lambda rows: [sum(rows)]).collect()
    jvm: Any = spark._jvm
    arguments = [*jvm.java.lang.management.ManagementFactory.getRuntimeMXBean().getInputArguments()]
    class_path = jvm.java.lang.System.getProperty("java.class.path")
    process: Any = spark._gateway.proc  # type: ignore[union-attr]
    spark.stop()
    process.stdin.close()
    process.wait()
    if archive.classes.is_file():
        own_arguments = [a for a in arguments if a not in (own, dump)]
        description = {
            "jars": str(java.spark_jars()),
            "class_path": class_path,
            "arguments": own_arguments,
            "bytes": archive.classes.stat().st_size,
        }
        archive.arguments.write_text(json.dumps(description))


if __name__ == "__main__":
    train(Path(sys.argv[1]))
