"""An expectation of a contract, and the contract itself, as frozen values."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import Any


class Severity(StrEnum):
    """What follows when an expectation is broken: `critical`: the row goes into quarantine, or the batch is refused;
    `warning`: it is published, and a check warns; `info`: it is recorded."""

    CRITICAL = "critical"
    WARNING = "warning"
    INFO = "info"


@dataclass(frozen=True, slots=True)
class Expectation:
    """One expectation of Great Expectations' core: `place` in its contract, `type`, `kwargs` as the suite has them,
    without those that say nothing."""

    place: int
    type: str
    kwargs: Mapping[str, Any]
    severity: Severity = Severity.CRITICAL


@dataclass(frozen=True)
class Contract:
    """The expectations of a feed, in the order of its file."""

    expectations: tuple[Expectation, ...]

    @cached_property
    def text(self) -> str:
        """Canonical JSON of all that counts: equal contracts, equal text."""
        said = [{"type": e.type, "kwargs": dict(e.kwargs), "severity": str(e.severity)} for e in self.expectations]
        return json.dumps(said, sort_keys=True, separators=(",", ":"))

    @cached_property
    def hash(self) -> str:
        """The same for contracts that accept the same rows."""
        return hashlib.sha256(self.text.encode()).hexdigest()[:16]
