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
    """The consequence of a broken expectation.

    CRITICAL: the row goes into quarantine, or the batch is refused. WARNING: the batch is published, and a check warns.
    INFO: the result is recorded.
    """

    CRITICAL = "critical"
    WARNING = "warning"
    INFO = "info"


@dataclass(frozen=True, slots=True)
class Expectation:
    """One expectation of Great Expectations' core.

    `place` counts from 0 in its contract. `kwargs` are the suite's arguments, without those that equal their defaults.
    """

    place: int
    type: str
    kwargs: Mapping[str, Any]
    severity: Severity = Severity.CRITICAL


@dataclass(frozen=True)
class Contract:
    """The expectations of a feed, in the order of the file."""

    expectations: tuple[Expectation, ...]

    @cached_property
    def text(self) -> str:
        """Canonical JSON of everything that matters. Equal contracts have equal texts."""
        items = [{"type": e.type, "kwargs": dict(e.kwargs), "severity": str(e.severity)} for e in self.expectations]
        return json.dumps(items, sort_keys=True, separators=(",", ":"))

    @cached_property
    def hash(self) -> str:
        """16 hex digits of the text's SHA-256: equal contracts have equal hashes."""
        return hashlib.sha256(self.text.encode()).hexdigest()[:16]
