"""The lakes that the integration tests run on: a test that asks for `lake` can run on a local one and on each store.

Those that are marked `each_lake`, where the store has a say, run on a local one and on S3, the others on a local one.
`SLUICE_TEST_LAKES`, such as `local,s3,azure,google` (`make lakes`), names the lakes of all tests. `tests/stores.py`
has the store for S3.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest

from sluice.resources.local.local_registry import LocalRegistry

Lines = Callable[[], dict[str, str]]
"""What a feed says of a lake that nobody else has."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "lake" in metafunc.fixturenames:
        usual = "local,s3" if metafunc.definition.get_closest_marker("each_lake") else "local"
        kinds = (os.environ.get("SLUICE_TEST_LAKES") or usual).split(",")
        metafunc.parametrize("lake", kinds, indirect=True, scope="session")


@pytest.fixture(scope="session")
def lake(request: pytest.FixtureRequest) -> Lines:
    """Lines for a feed file; none where the lake is the project's own folder."""
    if request.param == "local":
        return dict
    lines: Lines = request.getfixturevalue(f"{request.param}_store").lines
    return lines


@pytest.fixture(scope="session")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalRegistry]:
    """A real one for all tests of a process: each has subjects of its own."""
    with LocalRegistry(tmp_path_factory.mktemp("registry"), keep=False) as found:
        yield found
