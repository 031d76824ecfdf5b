"""Faults around Sluice. Context managers inject them on entry and heal them on exit, so that they can be combined."""

from __future__ import annotations

import random

from sluice.pipelines.errors import GroupHeld, Retryable, Unknown
from tests.faults.account import SEED
from tests.faults.field import Field, Run


def seed_random(field: Field) -> random.Random:
    """Returns a random generator for a fault, the same for each repetition with the same seed."""
    return random.Random(f"{SEED} {field.topic} {field.runs}")


def shorten_timeouts(field: Field) -> Field:
    """Returns the feed with timeouts below the defaults."""
    times = "request_timeout_ms: 5000, bootstrap_timeout_ms: 4000, session_timeout_ms: 3000"
    kafka = f"{{bootstrap: '{field.arena.proxied_bootstrap}', {times}, transaction_timeout_ms: 5000}}"
    return field.with_settings(kafka=kafka)


def expect_clean_or_retryable(run: Run) -> None:
    """Assert that a run is clean, or failed by an error that the next run may overcome."""
    if not run.clean:
        run.expect_error(Retryable, Unknown, GroupHeld)
