"""The thread that reports a batch's progress: its errors end the batch or are retried."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from unittest.mock import Mock

import pytest

from sluice.pipelines.batch.carry_out import report_progress
from sluice.pipelines.errors import LakeUnavailable
from sluice.pipelines.model.receipts import Progress
from sluice.testing.lake import MemoryLake

PLAN = Mock(offset_ranges=())


class Ended(BaseException):
    """Not an Exception, like KeyboardInterrupt."""


def test_exceptions_of_a_reporter_reach_the_batch() -> None:
    def report(progress: Progress) -> None:
        raise Ended

    with pytest.raises(Ended), report_progress(MemoryLake(), "orders", 1, "a", PLAN, report):
        pass
    with pytest.raises(ZeroDivisionError), report_progress(MemoryLake(), "orders", 1, "a", PLAN, report):
        raise ZeroDivisionError


def test_unresponsive_lake_is_retried() -> None:
    looks: list[Callable[[], Iterator[str]]] = [Mock(side_effect=LakeUnavailable("later")), *[lambda: iter(())] * 2]
    lake = Mock(list=lambda folder: looks.pop(0)())
    reports, twice = list[Progress](), threading.Event()

    def report(progress: Progress) -> None:
        reports.append(progress)
        if len(reports) == 2:
            twice.set()

    with report_progress(lake, "orders", 1, "a", PLAN, report):
        assert twice.wait(20)
    assert not looks
