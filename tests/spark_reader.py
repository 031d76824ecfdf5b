"""Spark as a reader of tables, in its own virtual environment: its release may differ from ours.

    python -m venv …; …/bin/pip install pyspark==4.1.1
    SLUICE_TEST_SPARK_TABLES=…/bin/python .venv/bin/python -m pytest -m soak tests/integration/test_tables_spark.py

`read` writes the rows of queries as Parquet; `Session` answers one query after the other. This file itself is run in
that environment, so it imports nothing of ours.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_ICEBERG = "org.apache.iceberg:iceberg-spark-runtime-4.1_2.13:1.12.0"
PACKAGES = {
    "iceberg": f"{_ICEBERG},org.xerial:sqlite-jdbc:3.49.1.0",
    "rest": f"{_ICEBERG},org.apache.iceberg:iceberg-aws-bundle:1.12.0",
    "delta": "io.delta:delta-spark_4.1_2.13:4.1.0",
}
PYTHON = "SLUICE_TEST_SPARK_TABLES"


def read(kind: str, warehouse: Path, queries: Mapping[str, str]) -> dict[str, Path]:
    """Returns the folder with the rows of each query, by its name. For Iceberg, the warehouse has `catalog.db`."""
    request_path = warehouse / "spark.json"
    out = {name: warehouse / "spark" / name for name in queries}
    request = {
        "kind": kind,
        "place": str(warehouse),
        "queries": dict(queries),
        "out": {n: str(p) for n, p in out.items()},
    }
    request_path.write_text(json.dumps(request))
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "SPARK_"))}
    run = subprocess.run(
        [os.environ[PYTHON], __file__, str(request_path)], env=environment, text=True, capture_output=True, check=False
    )
    assert run.returncode == 0, "\n".join(line for line in run.stderr.splitlines() if "\tat " not in line)
    return out


class Session:
    """A running Spark that reads tables while others write them. Use it as a context manager."""

    def __init__(self, kind: str, folder: Path) -> None:
        environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "SPARK_"))}
        self._log = folder / "spark.log"
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [os.environ[PYTHON], __file__, "--session", kind, str(folder)],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )

    def read_rows(self, query: str) -> list[tuple[Any, ...]]:
        """Returns the rows of a query. Raises AssertionError with Spark's log when the query fails."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(query) + "\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline() or '{"error": "Spark ended"}')
        assert "error" not in answer, f"{query}: {answer['error']}\n{self._log.read_text()[-3000:]}"
        return [tuple(row) for row in answer["rows"]]

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()


def open_session(kind: str, warehouse: str) -> Any:
    """Returns a session that reads tables of the kind; for any other kind, only files.

    For "rest", the folder's `rest.json` has the properties of an Iceberg catalog.
    """
    from pyspark.sql import SparkSession

    iceberg = {
        "spark.sql.extensions": "org.apache.iceberg.spark.extensions.IcebergSparkSessionExtensions",
        "spark.sql.catalog.sluice": "org.apache.iceberg.spark.SparkCatalog",
        "spark.sql.catalog.sluice.cache-enabled": "false",  # it keeps a table's snapshot for 30 s
    }
    own = json.loads(Path(warehouse, "rest.json").read_text()) if kind == "rest" else {}
    catalog = {
        "rest": iceberg | {f"spark.sql.catalog.sluice.{name}": value for name, value in own.items()},
        "iceberg": iceberg
        | {
            "spark.sql.catalog.sluice.catalog-impl": "org.apache.iceberg.jdbc.JdbcCatalog",
            "spark.sql.catalog.sluice.uri": f"jdbc:sqlite:{warehouse}/catalog.db",
            "spark.sql.catalog.sluice.warehouse": warehouse,
        },
        "delta": {
            "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
            "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
        },
    }
    settings = {
        **({"spark.jars.packages": PACKAGES[kind]} if kind in PACKAGES else {}),
        **catalog.get(kind, {}),
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
        "spark.sql.shuffle.partitions": "1",
        "spark.ui.enabled": "false",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.sql.warehouse.dir": f"{warehouse}/warehouse",
    }
    builder = SparkSession.builder.master("local[1]")
    for name, value in settings.items():
        builder = builder.config(name, value)
    return builder.getOrCreate()


def main(request_path: Path) -> None:
    request = json.loads(request_path.read_text())
    spark = open_session(request["kind"], request["place"])
    for name, query in request["queries"].items():
        spark.sql(query).coalesce(1).write.parquet(request["out"][name])
    spark.stop()


def answer_queries(kind: str, folder: str) -> None:
    """Answer a query of each line of stdin by a line of JSON, until stdin ends."""
    answers, sys.stdout = sys.stdout, sys.stderr
    spark = open_session(kind, folder)
    for line in sys.stdin:
        try:
            result: dict[str, Any] = {"rows": [[*row] for row in spark.sql(json.loads(line)).collect()]}
        except Exception as error:  # noqa: BLE001 - Spark raises errors of the JVM too; the test that asked fails
            result = {"error": f"{type(error).__name__}: {str(error)[:1000]}"}
        print(json.dumps(result), file=answers, flush=True)
    spark.stop()


if __name__ == "__main__":
    if sys.argv[1] == "--session":
        answer_queries(*sys.argv[2:])
    else:
        main(Path(sys.argv[1]))
