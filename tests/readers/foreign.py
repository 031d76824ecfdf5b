"""Engines in environments of their own: what runs there (this file, which imports nothing of ours), and who starts it.

An environment's Python is named by a variable; `make readers` makes the environments and names them.
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
_TOGETHER = 40
"""So many filters are one query of Spark, each with a scan of its own."""
Query = Callable[[str], Any]


def ask(python: str, request: dict[str, Any], folder: Path) -> tuple[list[list[int] | str], dict[str, Any]]:
    """The numbers of rows by each filter of `request["filters"]`, and an Arrow table, or an error, for each column."""
    import pyarrow as pa

    folder.mkdir(exist_ok=True)
    said = folder / "request.json"
    said.write_text(json.dumps(request | {"folder": str(folder)}))
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "SPARK_"))}
    command = [python, __file__, str(said)]
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
    engine = {"spark": _spark, "chdb": _chdb}[request["engine"]]
    find, read = engine(request)
    numbers = [_tried(lambda f=f: sorted(find(f))) if isinstance(f, str) else f for f in _found(request, find)]
    columns = {name: _written(Path(request["folder"], f"{name}.arrow"), name, read) for name in request["columns"]}
    Path(request["folder"], "answer.json").write_text(json.dumps({"numbers": numbers, "columns": columns}))


def _found(request: dict[str, Any], find: Any) -> Iterator[list[int] | str]:
    """The numbers by each filter; the filter itself where it has to be asked alone."""
    filters, many = request["filters"], getattr(find, "many", None)
    if many is None:
        yield from filters
        return
    for at in range(0, len(filters), _TOGETHER):
        some = filters[at : at + _TOGETHER]
        try:
            yield from many(some)
        except Exception:  # noqa: BLE001 - which one it was shows when each is asked alone
            yield from some


def _tried(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except Exception as error:  # noqa: BLE001 - each engine raises its own
        return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def _written(path: Path, name: str, read: Query) -> str:
    """The error of reading the column; empty where it was written."""
    import pyarrow as pa

    def write() -> str:
        rows = read(name)
        with pa.ipc.new_file(str(path), rows.schema) as file:
            file.write_table(rows)
        return ""

    return str(_tried(write))


def _spark(request: dict[str, Any]) -> tuple[Any, Query]:
    sys.path.insert(0, str(Path(__file__).parents[1]))
    import spark_reader

    spark = spark_reader.session(request["kind"], request["place"])
    spark.sparkContext.setLogLevel("OFF")
    source = request["from"]
    if request["kind"] == "folder":
        source = f"parquet.`{source}`"

    class Find:
        def __call__(self, where: str) -> list[int]:
            return [row[0] for row in spark.sql(f"select n from {source} where {where}").collect()]

        def many(self, some: Sequence[str]) -> list[list[int]]:
            each = (f"select {i} as q, n from {source} where {where}" for i, where in enumerate(some))
            out: list[list[int]] = [[] for _ in some]
            for q, n in spark.sql(" union all ".join(each)).collect():
                out[q].append(n)
            return [sorted(numbers) for numbers in out]

    return Find(), lambda name: spark.sql(f"select n, {name} from {source}").toArrow()


def _chdb(request: dict[str, Any]) -> tuple[Query, Query]:
    import chdb
    import pyarrow as pa

    source = request["from"]

    def rows(query: str) -> pa.Table:
        return pa.ipc.open_file(pa.py_buffer(bytes(chdb.query(query, "Arrow").bytes()))).read_all()

    return (
        lambda where: rows(f"select n from {source} where {where}")["n"].to_pylist(),
        lambda name: rows(f"select n, {name} from {source}"),
    )


if __name__ == "__main__":
    main(sys.argv[1])
