"""How often a commit to a table is decided anew: the same for all tables of a feed."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from sluice.pipelines.errors import PartUnreadable, TableMoved, Unknown

TRIES = 20
"""How often a commit is decided anew because somebody else was faster."""
UNANSWERED = 3
"""Attempts without an answer; the next run waits further."""

T = TypeVar("T")


def retry_outdated(decide: Callable[[], T], outdated: Callable[[PartUnreadable], bool]) -> T:
    """What `decide` returns, which looks at the table and commits; called again while somebody else is faster, a commit
    gets no answer, or a file is gone because the decision is `outdated`. Raises the last error after too many."""
    tries = unanswered = 0
    while True:
        try:
            return decide()
        except TableMoved:
            if (tries := tries + 1) == TRIES:
                raise
        except Unknown:
            if (unanswered := unanswered + 1) == UNANSWERED:
                raise
        except PartUnreadable as lost:
            if (tries := tries + 1) == TRIES or not outdated(lost):
                raise
