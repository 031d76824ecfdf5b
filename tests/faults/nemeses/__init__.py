"""What goes wrong around Sluice: on entry, and healed on exit, so that faults can be combined."""

from __future__ import annotations

import random

from sluice.pipelines.errors import GroupHeld, Retryable, Unknown
from tests.faults.account import SEED
from tests.faults.field import Field, Run


def drawn(field: Field) -> random.Random:
    """What a fault leaves to chance, again for each seed and the same for each repetition of it."""
    return random.Random(f"{SEED} {field.topic} {field.runs}")


def hasty(field: Field) -> Field:
    """With shorter times than ours, as a feed may ask for."""
    times = "request_timeout_ms: 5000, bootstrap_timeout_ms: 4000, session_timeout_ms: 3000"
    kafka = f"{{bootstrap: '{field.arena.behind}', {times}, transaction_timeout_ms: 5000}}"
    return field.with_settings(kafka=kafka)


def endured(ran: Run) -> None:
    """It was clean, or failed by an error of ours that passes by itself, and tells where the trouble is."""
    if not ran.clean:
        ran.stopped_by(Retryable, Unknown, GroupHeld)
