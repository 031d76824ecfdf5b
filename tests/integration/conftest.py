"""The lakes of the integration tests: a test that requests `lake` can run on a local lake and on each store.

Tests marked `each_lake`, whose outcome may depend on the store, run on a local lake and on S3, the others only on a
local one. `SLUICE_TEST_LAKES`, such as `local,s3,azure,google` (`make lakes`), sets the lakes of all tests. The store
for S3 is in `tests/stores.py`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

from sluice.cli.main import main

if TYPE_CHECKING:
    from tests.integration.support import FeedProject

Lines = Callable[[], dict[str, str]]
"""Returns the lines of a feed file for a new lake that no other feed uses."""
Call = Callable[..., tuple[int, Any]]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "lake" in metafunc.fixturenames:
        usual = "local,s3" if metafunc.definition.get_closest_marker("each_lake") else "local"
        kinds = (os.environ.get("SLUICE_TEST_LAKES") or usual).split(",")
        metafunc.parametrize("lake", kinds, indirect=True, scope="session")


@pytest.fixture(scope="session")
def lake(request: pytest.FixtureRequest) -> Lines:
    """Lines for a feed file; empty where the lake is the project's own folder."""
    if request.param == "local":
        return dict
    lines: Lines = request.getfixturevalue(f"{request.param}_store").build_feed_settings
    return lines


@pytest.fixture
def call(project: FeedProject, capfd: pytest.CaptureFixture[str]) -> Call:
    """Returns a function that runs a command; it returns the exit code, and the text or the document of `--json`."""

    def invoke(*words: str) -> tuple[int, Any]:
        capfd.readouterr()
        code, captured = main([*words, "--project", str(project.root)]), capfd.readouterr()
        return code, json.loads(captured.out) if "--json" in words else captured.out + captured.err

    return invoke
