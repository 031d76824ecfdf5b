"""Each batch, published or refused, gets an HTML page; a page that cannot be written fails no run."""

from __future__ import annotations

import dagster as dg

from sluice.pipelines.errors import BatchIncomplete, QuarantineExceeded
from tests.assets.world import FEED, P0, SECRET, World, in_hour

STRICT = f"{FEED}policies: {{quarantine_limit: {{share: 0.01, at_least: 1}}}}\n"


def read_pages(world: World) -> dict[str, str]:
    return {p.rpartition("/")[2]: d.decode() for p, d in world.lake.files.items() if p.endswith(".html")}


def test_run_writes_report_page_of_its_batch(world: World, instance: dg.DagsterInstance) -> None:
    world.run(in_hour(0))
    (batch,) = world.state().batches
    page = read_pages(world)[f"{batch}.html"]
    assert "Lag" in page
    assert "made without asking Kafka" not in page
    assert SECRET not in page
    assert "127.0.0.1" not in page


def test_refused_batch_gets_report_page(world: World, instance: dg.DagsterInstance) -> None:
    (world.project.feeds_folder / "orders.yaml").write_text(STRICT)
    world.engine.bad = 5
    assert isinstance(world.run(in_hour(0)).error, QuarantineExceeded)
    ((name, page),) = read_pages(world).items()
    (batch,) = world.state().batches.values()
    assert name == f"{batch.id}-{batch.owner.token}.html"
    assert "more than the feed allows; nothing is published" in page
    assert "no JSON value begins here" in page


def test_partly_published_batch_gets_report_page(world: World, instance: dg.DagsterInstance) -> None:
    world.engine.failing = {P0}
    assert isinstance(world.run(in_hour(0)).error, BatchIncomplete)
    ((_, page),) = read_pages(world).items()
    assert "published in part" in page
    assert "does not match its CRC" in page


def test_failed_report_write_does_not_fail_the_run(world: World, instance: dg.DagsterInstance) -> None:
    put = world.lake.put

    def refuse_pages(path: str, data: bytes) -> None:
        if path.endswith(".html"):
            raise RuntimeError("the disk is full")
        put(path, data)

    world.lake.put = refuse_pages  # type: ignore[method-assign]
    assert world.run(in_hour(0)).error is None
    assert read_pages(world) == {}
