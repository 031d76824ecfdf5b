"""Each batch, published or refused, gets an HTML page; a page that cannot be written fails no run."""

from __future__ import annotations

from dataclasses import replace

import dagster as dg
from markdown_it import MarkdownIt

from sluice.assets.events.landed_metadata import describe_hour
from sluice.assets.specs.asset_specs import landed_key
from sluice.pipelines.errors import BatchIncomplete, QuarantineExceeded
from sluice.pipelines.operating.check_text import list_figures
from sluice.pipelines.operating.check_window import Reason, WindowCheck, check_window
from sluice.pipelines.operating.hour_page import list_hour_figures, render
from sluice.pipelines.planning.windows import Losses
from sluice.pipelines.status.repeats import Cause, Copies
from tests.assets.world import FEED, P0, SECRET, World, at_hour, in_hour, read_windows

STRICT = f"{FEED}policies: {{quarantine_limit: {{share: 0.01, at_least: 1}}}}\n"


def read_pages(world: World) -> dict[str, str]:
    """Returns the pages of the lake by their names: of windows those with a T."""
    return {p.rpartition("/")[2]: d.decode() for p, d in world.lake.files.items() if p.endswith(".html")}


def test_run_writes_report_page_of_its_batch(world: World, instance: dg.DagsterInstance) -> None:
    world.run(in_hour(0))
    (batch,) = world.state().batches
    page = read_pages(world)[f"{batch}.html"]
    assert "offsets pending then" in page
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
    ((_, page),) = ((n, page) for n, page in read_pages(world).items() if "T" not in n)
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


def test_run_writes_page_of_its_hour_and_dagster_shows_the_check(world: World, instance: dg.DagsterInstance) -> None:
    world.engine.bad = 2
    world.run(in_hour(0))
    (page,) = (data for name, data in read_pages(world).items() if "T" in name)
    feed = world.make_session().feed("orders")
    with world.open_ports(feed) as ports:
        check = check_window(feed, ports, at_hour(0), (), lambda progress: None)
    metadata = read_windows(instance, landed_key("orders"))["2024-05-01T00:00"]
    sentence = "window 2024-05-01T00:00 is complete: 50 offsets of 2 partitions accounted for"
    assert sentence in page.replace("Window", "window")
    assert [*metadata][:2] == ["verdict", "check"]
    assert metadata["verdict"] == f"✓ {sentence}"
    text = metadata["check"]
    assert text.startswith(f"**✓ {sentence}**")
    assert all(figure.splitlines()[0] in text for _, figure in list_figures(check))
    assert "4 records (8.00 %): 4 not_json" in text
    assert "not_json" in page


def check_first_hour(world: World) -> WindowCheck:
    """Land the first hour, and check it."""
    world.run(in_hour(0))
    feed = world.make_session().feed("orders")
    with world.open_ports(feed) as ports:
        return check_window(feed, ports, at_hour(0), (), lambda progress: None)


def test_window_with_losses_or_rows_twice_is_never_just_complete(world: World, instance: dg.DagsterInstance) -> None:
    check = check_first_hour(world)
    assert check.rows is not None
    assert check.rows.earliest is not None
    lossy = replace(check, standing=replace(check.standing, losses=Losses(lost=3)))
    doubled = replace(check, rows=replace(check.rows, landed_twice=(check.rows.earliest,)))
    for wrong, word, text in (
        (lossy, "complete, with losses", "but 3 offsets are lost"),
        (doubled, "rows twice", "1 record landed twice, such as orders:0:0"),
    ):
        page, (figures,) = render(wrong, 0).decode(), list_hour_figures({0: wrong}).values()  # type: ignore[arg-type]
        assert f">{word}</span>" in page
        assert ">complete</span>" not in page
        assert text in page
        assert figures.state == word
        assert "✓" not in "".join(describe_hour(wrong, ""))


def test_check_in_dagster_has_causes_of_copies_and_no_markup_of_records(world: World) -> None:
    check = check_first_hour(world)
    assert check.rows is not None
    assert check.rows.earliest is not None
    evil = "<script>alert(1)</script> ![x](http://e) `a` | b"
    first = check.rows.earliest
    copies = Copies(Cause.RETRIED, 7, ((first, first),))
    repeats = replace(check.rows.repeats, copies=(copies,))
    wrong = replace(
        check, rows=replace(check.rows, repeats=repeats), clocks=evil, unchecked=(evil,), reasons=(Reason(evil, evil),)
    )
    _, text = describe_hour(wrong, "page.html")
    assert f"7 likely: {Cause.RETRIED.text}: {first} = {first}" in text
    tokens = [t for b in MarkdownIt("commonmark").enable("table").parse(text) for t in b.children or ()]
    assert not {t.type for t in tokens} & {"link_open", "image", "code_inline"}, text
    assert {t.content for t in tokens if t.type == "html_inline"} == {"<br>"}
    assert "".join(t.content for t in tokens).count(evil) == 4
