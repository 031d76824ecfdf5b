"""A function of the user's that chooses partitions, as `sluice republish --partition-by MODULE:FUNCTION` takes it:
loaded by name, and trusted with nothing.

It is called as `function(rows, partitions)`: rows as they are sent (a `pyarrow.RecordBatch` of `key`, `value`,
`timestamp` in ms, and `headers`), and how many partitions the target has. It returns a number for each row: a list, a
numpy array or an Arrow array of integers from 0 up to `partitions`, which is not included.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from sluice.pipelines.errors import UsageError
from sluice.pipelines.maintenance.fixers import module_of

_REMEDY = "fix it; nothing of this transaction was sent: def NAME(rows, partitions) returns a number for each row"


class Partitioner:
    """A loaded function. `name` is as it was given."""

    def __init__(self, name: str, function: Callable[[pa.RecordBatch, int], Any]) -> None:
        self.name, self._function = name, function

    def __call__(self, rows: pa.RecordBatch, partitions: int) -> np.ndarray:
        """The partition of each row. Raises UsageError for whatever else the function does."""
        try:
            answer = self._function(rows, partitions)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - any error of user code
            raise self._wrong(f"raised {type(error).__name__}") from None
        chosen = self._numbers(answer)
        if len(chosen) != rows.num_rows:
            raise self._wrong(f"returned {len(chosen)} numbers for {rows.num_rows} rows")
        outside = chosen[(chosen < 0) | (chosen >= partitions)]
        if len(outside):
            raise self._wrong(f"returned {outside[0]}, and the target has partitions 0 to {partitions - 1}")
        return chosen

    def _numbers(self, answer: Any) -> np.ndarray:
        try:
            column = answer if isinstance(answer, pa.Array | pa.ChunkedArray) else pa.array(answer)
        except (pa.ArrowException, TypeError, ValueError):
            raise self._wrong(f"returned {type(answer).__name__}, which are no numbers") from None
        if isinstance(column, pa.ChunkedArray):
            column = column.combine_chunks()
        if not pa.types.is_integer(column.type) and len(column):
            raise self._wrong(f"returned {column.type}, and no integers")
        if column.null_count:
            raise self._wrong("returned nothing for some rows")
        try:
            return np.array(column.cast(pa.int64()).to_numpy(zero_copy_only=False), np.int64)
        except pa.ArrowInvalid:
            raise self._wrong("returned a number that is no partition") from None

    def _wrong(self, what: str) -> UsageError:
        return UsageError(f"--partition-by {self.name} {what}", remedy=_REMEDY)


def load(text: str, root: Path) -> Partitioner:
    """The function that `FILE.py:FUNCTION` or `MODULE:FUNCTION` names, both looked for in the folder `root`.

    Raises UsageError with the file and the line that is wrong.
    """
    module, name = module_of(text, root)
    function = getattr(module, name, None)
    if not callable(function):
        raise UsageError(
            f"{module.__file__} has no function {name}", remedy="name one that it defines at its top level"
        )
    try:
        inspect.signature(function).bind(None, 1)
    except TypeError:
        raise UsageError(
            f"{module.__file__}: {name} does not take rows and a number", remedy=f"def {name}(rows, partitions): ..."
        ) from None
    except ValueError:  # a builtin that tells nothing of itself
        pass
    return Partitioner(text, function)
