"""The lakes that the integration tests run on.

A test marked `each_lake` runs on a local one and on S3, all others on a local one. `SLUICE_TEST_LAKES=both` runs every
test that asks for `lake` on both, `s3` and `local` on one; `tests/stores.py` says which store S3 is.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

LAKES = {"local": ["local"], "s3": ["s3"], "both": ["local", "s3"]}

Lines = Callable[[], dict[str, str]]
"""What a feed says of a lake that nobody else has."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    marked = metafunc.definition.get_closest_marker("each_lake") is not None
    kinds = LAKES[os.environ.get("SLUICE_TEST_LAKES") or ("both" if marked else "local")]
    if "lake" in metafunc.fixturenames and kinds != ["local"]:
        metafunc.parametrize("lake", kinds, indirect=True, scope="session")


@pytest.fixture(scope="session")
def lake(request: pytest.FixtureRequest) -> Lines:
    """Lines for a feed file; none where the lake is the project's own folder."""
    if getattr(request, "param", "local") == "local":
        return dict
    lines: Lines = request.getfixturevalue("s3_store").lines
    return lines
