"""The checks of `sluice doctor`: the machine, Kafka, the lake, Spark. Nothing here writes.

A file for each; in it a list of checks. A new check is a function that yields diagnoses, and a line in that list.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from sluice.pipelines.errors import SluiceError
from sluice.pipelines.model.health import Diagnosis, of_error, of_unforeseen, report_failure

SECONDS = 20.0
"""Time limit of a check."""

S = TypeVar("S")


@dataclass(frozen=True, slots=True)
class Check(Generic[S]):
    """One check of a subject. `title` is used if the check yields nothing because it hung or raised."""

    title: str
    look: Callable[[S], Iterable[Diagnosis]]


def examine(subject: S, checks: Sequence[Check[S]], seconds: float = SECONDS) -> list[Diagnosis]:
    """Returns the diagnoses of the checks, in their order. All checks start at once."""
    looks = [_Look(lambda check=check: check.look(subject), check.title) for check in checks]  # type: ignore[misc]
    for look in looks:
        look.start()
    until = time.monotonic() + seconds
    return [one for look in looks for one in look.end(until, seconds)]


@dataclass
class _Look:
    look: Callable[[], Iterable[Diagnosis]]
    title: str
    diagnoses: list[Diagnosis] = field(default_factory=list)

    def start(self) -> None:
        # A daemon: a hanging system call must not delay the end of the process.
        self._thread = threading.Thread(target=self._run, daemon=True, name=f"sluice-doctor-{self.title}")
        self._thread.start()

    def end(self, until: float, seconds: float) -> list[Diagnosis]:
        self._thread.join(max(0.0, until - time.monotonic()))
        hangs = self._thread.is_alive()
        diagnoses = list(self.diagnoses)
        if hangs:
            diagnoses.append(
                report_failure(self.title, f"no answer within {seconds:.0f} s", "check that the service is up")
            )
        return diagnoses

    def _run(self) -> None:
        try:
            for one in self.look():
                self.diagnoses.append(one)
        except SluiceError as error:
            self.diagnoses.append(of_error(self.title, error))
        except OSError as error:
            where = f": {error.filename}" if error.filename else ""
            self.diagnoses.append(
                report_failure(self.title, f"{error.strerror or error}{where}", "fix that and repeat")
            )
        except Exception as error:  # noqa: BLE001 - the other checks still report
            self.diagnoses.append(of_unforeseen(self.title, error))
