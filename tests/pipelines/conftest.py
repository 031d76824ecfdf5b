"""The lakes of these tests need not survive a power cut."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="module")
def no_wait_for_the_disk() -> Iterator[None]:
    """fsync took half of their time. tests/resources/lake/test_local_lake.py checks that a lake calls it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda handle: None)
        yield
