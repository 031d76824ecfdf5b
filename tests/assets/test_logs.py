"""Logs as JSON: each line names its run, feed and batch, on stderr and in the run's log in Dagster."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from sluice.assets.execution import run_feeds
from sluice.assets.instance.instance import open_instance
from sluice.pipelines.util import logs
from tests.assets.world import CATCH_UP, SECRET, World, in_hour

Lines = list[dict[str, Any]]


@pytest.fixture
def world(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.setenv(logs.VARIABLE, "json")
    return World(tmp_path)


@contextmanager
def log_as_command_line() -> Iterator[None]:
    """Set up logging as `--log-format json` does."""
    handler = logs.Line(also=(outside := os.dup(2)))
    root, ours = logging.getLogger(), logging.getLogger(logs.OURS)
    level = ours.level
    root.addHandler(handler)
    ours.setLevel(logging.INFO)
    yield
    root.removeHandler(handler)
    ours.setLevel(level)
    os.close(outside)


def parse_lines(text: str) -> Lines:
    """Parse all lines; each must be an object with all keys."""
    lines = [json.loads(line) for line in text.splitlines()]
    for line in lines:
        assert [*line][:8] == ["time", "level", "logger", *logs.ABOUT]
        assert line["message"]
        assert line["time"].endswith("Z")
    return lines


def read_stored_lines(world: World) -> Lines:
    """Returns the newest run's stderr lines in Dagster's storage, over all steps."""
    with open_instance(world.project) as instance:
        run = instance.get_runs(limit=1)[0].run_id
        files = sorted(Path(instance.storage_directory()).glob(f"{run}/compute_logs/*.err"))
    return [line for file in files for line in parse_lines(file.read_text())]


def test_run_is_logged_as_json_lines(world: World, capfd: pytest.CaptureFixture[str]) -> None:
    with log_as_command_line():
        outcome = world.run(in_hour(0))
    assert outcome.error is None
    lines = parse_lines(capfd.readouterr().err)
    mine = [line for line in lines if line["run"] == outcome.run_id]
    assert {(line["run"], line["feed"]) for line in lines} == {(outcome.run_id, "orders")}
    assert {"2024-05-01T00:00"} <= {line["window"] for line in mine}
    stages = [line["message"].split()[0] for line in mine]
    assert {"plan", "land", "prove", "publish", "commit"} <= {*stages}
    tasks = [line for line in mine if line["logger"] == "sluice.tasks" and line["task"] is not None]
    assert tasks
    assert {line["batch"] for line in tasks} == {max(world.state().batches)}
    assert sum(line["offset_ranges"] for line in tasks) == 2
    assert SECRET not in json.dumps(lines)
    in_dagster = read_stored_lines(world)
    assert [line for line in in_dagster if line["logger"] == "sluice.tasks"]
    assert {line["message"] for line in in_dagster} <= {line["message"] for line in mine}


def test_log_lines_name_their_feed_in_a_run_of_several_feeds(world: World, capfd: pytest.CaptureFixture[str]) -> None:
    world.project.feeds_folder.joinpath("again.yaml").write_text(
        world.project.feeds_folder.joinpath("orders.yaml").read_text()
    )
    with log_as_command_line():
        run_feeds(
            world.project, dict.fromkeys(("orders", "again"), CATCH_UP), lambda _: lambda _: None, world.open_ports
        )
    tasks = [line for line in parse_lines(capfd.readouterr().err) if line["task"] is not None]
    assert {line["feed"] for line in tasks} == {"orders", "again"}


def test_text_format_logs_no_json(
    world: World, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(logs.VARIABLE, "text")
    world.run(in_hour(0))
    assert "{" not in capfd.readouterr().err


def test_invalid_message_arguments_do_not_stop_logging(capfd: pytest.CaptureFixture[str]) -> None:
    log = logging.getLogger("a library's")
    log.propagate = False  # pytest's own handler raises
    log.addHandler(logs.Line())
    log.warning("%d records", "no")
    log.warning("after")
    output = capfd.readouterr().err
    assert "Logging error" in output
    assert '"message": "after"' in output
