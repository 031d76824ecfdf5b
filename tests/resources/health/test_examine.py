"""Checks run in parallel: none affects another, and all end in time."""

from __future__ import annotations

import threading
from collections.abc import Iterator

from sluice.pipelines.errors import KafkaUnavailable
from sluice.pipelines.model.health import Diagnosis, Health, report_failure, report_ok
from sluice.resources.health import Check, examine


def test_hanging_or_failing_check_does_not_affect_other_checks() -> None:
    never = threading.Event()

    def hang(_: None) -> Iterator[Diagnosis]:
        yield report_ok("hangs", "at first it goes well")
        never.wait()

    def raise_unavailable(_: None) -> Iterator[Diagnosis]:
        raise KafkaUnavailable("nobody is there", remedy="start it")
        yield

    def raise_missing(_: None) -> Iterator[Diagnosis]:
        raise FileNotFoundError(2, "No such file or directory", "/x")
        yield

    def raise_unforeseen(_: None) -> Iterator[Diagnosis]:
        raise KeyError("correct-horse")
        yield

    looks = {"hangs": hang, "refused": raise_unavailable, "missing": raise_missing, "wrong": raise_unforeseen}
    diagnoses = examine(None, [*(Check(title, look) for title, look in looks.items())], seconds=0.5)
    never.set()
    assert diagnoses == [
        report_ok("hangs", "at first it goes well"),
        report_failure("hangs", "no answer within 0 s", "check that the service is up"),
        report_failure("refused", "nobody is there", "start it"),
        report_failure("missing", "No such file or directory: /x", "fix that and repeat"),
        report_failure("wrong", "unforeseen KeyError", "report it, and the command"),
    ]


def test_checks_run_in_parallel() -> None:
    """Two checks that wait for each other both end."""
    meet = threading.Barrier(2)

    def look(_: None) -> Iterator[Diagnosis]:
        meet.wait(10)
        yield report_ok("one", "met")

    assert [d.health for d in examine(None, [Check("a", look), Check("b", look)])] == [Health.OK] * 2
