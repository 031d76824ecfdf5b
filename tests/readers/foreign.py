"""Runs engines in separate environments, by this file as a script, which imports nothing of the project.

A variable names the Python of each environment; `make readers` creates the environments and sets the variables.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

SPARK, CHDB = "SLUICE_TEST_SPARK_TABLES", "SLUICE_TEST_CHDB"
"""The variables that name a Python with PySpark 4.1.1, and one with chdb."""
_BATCH = 40
"""The number of filters in one Spark query, each with a separate scan."""
Query = Callable[[str], Any]


def ask(python: str, request: dict[str, Any], folder: Path) -> tuple[list[list[int] | str], dict[str, Any]]:
    """Run the request in another Python.

    Returns the row numbers for each of `request["filters"]`, and an Arrow table or an error for each column.
    """
    import pyarrow as pa

    folder.mkdir(exist_ok=True)
    request_file = folder / "request.json"
    request_file.write_text(json.dumps(request | {"folder": str(folder)}))
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "SPARK_"))}
    command = [python, __file__, str(request_file)]
    run = subprocess.run(command, env=environment, text=True, capture_output=True, check=False)
    assert run.returncode == 0, "\n".join(line for line in run.stderr.splitlines() if "\tat " not in line)[-3000:]
    answer = json.loads((folder / "answer.json").read_text())
    columns = {
        name: error or pa.ipc.open_file(str(folder / f"{name}.arrow")).read_all()
        for name, error in answer["columns"].items()
    }
    return answer["numbers"], columns


def main(path: str) -> None:
    request = json.loads(Path(path).read_text())
    engine = {"spark": _open_spark, "chdb": _open_chdb}[request["engine"]]
    find, read = engine(request)
    numbers = [_try_call(lambda f=f: sorted(find(f))) if isinstance(f, str) else f for f in _find_all(request, find)]
    columns = {name: _write_column(Path(request["folder"], f"{name}.arrow"), name, read) for name in request["columns"]}
    Path(request["folder"], "answer.json").write_text(json.dumps({"numbers": numbers, "columns": columns}))


def _find_all(request: dict[str, Any], find: Any) -> Iterator[list[int] | str]:
    """Yield the row numbers for each filter; the filter itself if it must run alone."""
    filters, find_many = request["filters"], getattr(find, "find_many", None)
    if find_many is None:
        yield from filters
        return
    for at in range(0, len(filters), _BATCH):
        batch = filters[at : at + _BATCH]
        try:
            yield from find_many(batch)
        except Exception:  # noqa: BLE001 - run alone, the failing filters show their errors
            yield from batch


def _try_call(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except Exception as error:  # noqa: BLE001 - each engine raises its own
        return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def _write_column(path: Path, name: str, read: Query) -> str:
    """Write the column to a file. Returns the error of reading it, or an empty text."""
    import pyarrow as pa

    def write() -> str:
        rows = read(name)
        with pa.ipc.new_file(str(path), rows.schema) as file:
            file.write_table(rows)
        return ""

    return str(_try_call(write))


def _open_spark(request: dict[str, Any]) -> tuple[Any, Query]:
    sys.path.insert(0, str(Path(__file__).parents[1]))
    import spark_reader

    spark = spark_reader.open_session(request["kind"], request["place"])
    spark.sparkContext.setLogLevel("OFF")
    source = request["from"]
    if request["kind"] == "folder":
        source = f"parquet.`{source}`"

    class Find:
        def __call__(self, condition: str) -> list[int]:
            return [row[0] for row in spark.sql(f"select n from {source} where {condition}").collect()]

        def find_many(self, filters: Sequence[str]) -> list[list[int]]:
            selects = (f"select {i} as q, n from {source} where {condition}" for i, condition in enumerate(filters))
            out: list[list[int]] = [[] for _ in filters]
            for q, n in spark.sql(" union all ".join(selects)).collect():
                out[q].append(n)
            return [sorted(numbers) for numbers in out]

    return Find(), lambda name: spark.sql(f"select n, {name} from {source}").toArrow()


def _open_chdb(request: dict[str, Any]) -> tuple[Query, Query]:
    import chdb
    import pyarrow as pa

    source = request["from"]

    def run_query(query: str) -> pa.Table:
        return pa.ipc.open_file(pa.py_buffer(bytes(chdb.query(query, "Arrow").bytes()))).read_all()

    return (
        lambda condition: run_query(f"select n from {source} where {condition}")["n"].to_pylist(),
        lambda name: run_query(f"select n, {name} from {source}"),
    )


if __name__ == "__main__":
    main(sys.argv[1])
