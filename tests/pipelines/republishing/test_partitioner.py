"""Functions that choose partitions: valid and refused results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from sluice.pipelines.errors import UsageError
from sluice.pipelines.records.rows.row_format import TO_SEND
from sluice.pipelines.republishing.send_lane import Partitioner, load

ROWS = pa.RecordBatch.from_pylist(
    [{"key": b"%d" % n, "value": None, "timestamp": n, "headers": None} for n in range(4)], schema=TO_SEND
)


@pytest.mark.parametrize(
    "answer",
    [[0, 1, 2, 0], np.array([0, 1, 2, 0]), pa.array([0, 1, 2, 0], pa.int8()), pa.chunked_array([[0, 1], [2, 0]])],
)
def test_integers_of_any_type_are_accepted(answer: Any) -> None:
    assert Partitioner("p:f", lambda rows, partitions: answer)(ROWS, 3).tolist() == [0, 1, 2, 0]


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        ([0, 1, 3, 0], "returned 3, and the target has partitions 0 to 2"),
        ([0, -1, 1, 0], "returned -1"),
        ([0, None, 1, 0], "nothing for some rows"),
        ([0, 1], "2 numbers for 4 rows"),
        ([0.0, 1.0, 2.0, 0.0], "no integers"),
        (["0", "1", "2", "0"], "no integers"),
        ([True, False, True, True], "no integers"),
        (1, "no numbers"),
        (None, "no numbers"),
        (np.array([2**64 - 1] * 4, np.uint64), "no partition"),
        ([{}, 1, 2, 3], "no numbers"),
    ],
)
def test_invalid_result_is_refused(answer: Any, why: str) -> None:
    with pytest.raises(UsageError, match=why) as refused:
        Partitioner("p:f", lambda rows, partitions: answer)(ROWS, 3)
    assert "--partition-by p:f" in refused.value.message


def test_function_is_loaded_by_name_and_its_errors_hide_values(tmp_path: Path) -> None:
    (tmp_path / "places.py").write_text(
        "def by_key(rows, partitions):\n    return [int(k.as_py()) % partitions for k in rows['key']]\n"
        "def bad(rows, partitions):\n    raise ValueError('secret')\n"
        "def few(rows): ...\n"
    )
    assert load("places.py:by_key", tmp_path)(ROWS, 2).tolist() == [0, 1, 0, 1]
    with pytest.raises(UsageError, match="raised ValueError") as refused:
        load("places.py:bad", tmp_path)(ROWS, 2)
    assert "secret" not in str(refused.value)
    for name in ("few", "nowhere"):
        with pytest.raises(UsageError, match=name):
            load(f"places.py:{name}", tmp_path)
