"""Fixtures: a project over memory, with its own, empty Dagster instance.

`SLUICE_TEST_DAGSTER=postgres` stores the instances of all tests in a real PostgreSQL, each in its own database.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import dagster as dg
import pytest
from dagster._core.definitions.definitions_load_context import DefinitionsLoadContext

from sluice.assets.instance.instance import open_instance, prepare_home
from tests import postgres as servers
from tests.assets.world import World
from tests.postgres import Postgres

ON_POSTGRES = os.environ.get("SLUICE_TEST_DAGSTER") == "postgres"
ON_FILES = pytest.mark.skipif(ON_POSTGRES, reason="about an instance in files of this machine")


@pytest.fixture(autouse=True)
def fresh_load_context(monkeypatch: pytest.MonkeyPatch) -> None:
    """Begin as a new process does: a run of an earlier test leaves its definitions' context behind."""
    monkeypatch.setattr(DefinitionsLoadContext, "_instance", None)


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    """A PostgreSQL server for this session."""
    binaries = servers.find_programs()
    if binaries is None:
        pytest.skip("no PostgreSQL here: infra/postgres.sh installs one")
    with servers.run_server(binaries) as server:
        yield server


@pytest.fixture(scope="session")
def fresh_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The home of an instance without events, to be copied: creating its databases takes seconds."""
    world = World(tmp_path_factory.mktemp("template"))
    with open_instance(world.project) as instance:
        instance.get_runs()
        instance.get_asset_keys()
    return prepare_home(world.project)


@pytest.fixture
def root(tmp_path: Path, fresh_home: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Path:
    """A folder for a project, with an empty instance."""
    monkeypatch.delenv("DAGSTER_HOME", raising=False)
    home = tmp_path / ".sluice" / "dagster"
    shutil.copytree(fresh_home, home)
    if ON_POSTGRES:
        on_postgres(home, request.getfixturevalue("postgres"))
    return tmp_path


def on_postgres(home: Path, server: Postgres) -> None:
    """Store the instance of this home in a new database."""
    with (home / "dagster.yaml").open("a") as config:
        config.write(server.render_storage(server.create_database()))


@pytest.fixture
def world(root: Path) -> World:
    return World(root)


@pytest.fixture
def instance(world: World) -> Iterator[dg.DagsterInstance]:
    with open_instance(world.project) as dagster_instance:
        yield dagster_instance
