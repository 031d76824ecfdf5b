"""How the things are doing that Sluice needs: what `sluice doctor` tells, a line for each of them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from sluice.pipelines.errors import SluiceError, explain_memory_error


class Health(StrEnum):
    OK = "ok"
    WARNING = "warning"
    """Runs succeed, but this needs attention."""
    FAILED = "failed"
    """Runs fail, or will."""
    SKIPPED = "skipped"
    """It is unknown, or was not checked; `remedy` is a way to find out, if there is one."""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """One check: its state, its finding, and the fix (empty: nothing to do).

    It never holds a secret.
    """

    health: Health
    title: str
    found: str
    remedy: str = ""


def report_ok(title: str, found: str) -> Diagnosis:
    return Diagnosis(Health.OK, title, found)


def report_warning(title: str, found: str, remedy: str) -> Diagnosis:
    return Diagnosis(Health.WARNING, title, found, remedy)


def report_failure(title: str, found: str, remedy: str) -> Diagnosis:
    return Diagnosis(Health.FAILED, title, found, remedy)


def report_skipped(title: str, found: str, remedy: str = "") -> Diagnosis:
    return Diagnosis(Health.SKIPPED, title, found, remedy)


def of_unforeseen(title: str, error: Exception) -> Diagnosis:
    """The failure of a check by an error that no code expects: a lack of memory, or a bug."""
    if memory := explain_memory_error(error):
        return of_error(title, memory)
    return report_failure(title, f"unforeseen {type(error).__name__}", "report it, and the command")


def of_error(title: str, error: SluiceError) -> Diagnosis:
    """The failure, as the error reports it."""
    return report_failure(title, error.message, error.remedy)
