"""Fixtures: a project over memory, with a Dagster instance of its own that holds nothing yet."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import dagster as dg
import pytest

from sluice.assets.instance import open_instance, prepare_home
from tests.assets.world import World


@pytest.fixture(scope="session")
def fresh_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An instance without events: making its databases takes seconds, copying them does not."""
    world = World(tmp_path_factory.mktemp("template"))
    with open_instance(world.project) as instance:
        instance.get_runs()
        instance.get_asset_keys()
    return prepare_home(world.project)


@pytest.fixture
def root(tmp_path: Path, fresh_home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for a project, with an instance that holds nothing yet."""
    monkeypatch.delenv("DAGSTER_HOME", raising=False)
    shutil.copytree(fresh_home, tmp_path / ".sluice" / "dagster")
    return tmp_path


@pytest.fixture
def world(root: Path) -> World:
    return World(root)


@pytest.fixture
def instance(world: World) -> Iterator[dg.DagsterInstance]:
    with open_instance(world.project) as opened:
        yield opened
