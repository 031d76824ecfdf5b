"""Lakes of these tests lie in folders that nobody needs after a power cut."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="module")
def no_wait_for_the_disk() -> Iterator[None]:
    """Waiting for a disk took half of their time. That a lake does wait: tests/resources/lake/test_local_lake.py."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda handle: None)
        yield
