"""The lakes that the integration tests run on: every test that asks for `lake` runs on a local one and on S3.

`SLUICE_TEST_LAKES=local` or `s3` leaves one out; `tests/stores.py` says which store S3 is.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

LAKES = {"local": ["local"], "s3": ["s3"], "both": ["local", "s3"]}

Lines = Callable[[], dict[str, str]]
"""What a feed says of a lake that nobody else has."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "lake" in metafunc.fixturenames:
        kinds = LAKES[os.environ.get("SLUICE_TEST_LAKES") or "both"]
        metafunc.parametrize("lake", kinds, indirect=True, scope="session")


@pytest.fixture(scope="session")
def lake(request: pytest.FixtureRequest) -> Lines:
    """Lines for a feed file; none where the lake is the project's own folder."""
    if request.param == "local":
        return dict
    lines: Lines = request.getfixturevalue("s3_store").lines
    return lines
