"""External names in Dagster's UI: its Markdown renders them without images, links or markup."""

from __future__ import annotations

from dataclasses import replace

import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from sluice.assets.checks import contract_checks, feed_checks
from sluice.assets.jobs import report_assets
from sluice.assets.specs.asset_specs import plain
from sluice.assets.steps import table_step
from sluice.pipelines.errors import Breach, CatalogUnavailable, SchemaDrifted
from sluice.pipelines.model.kafka import OpenTransaction
from sluice.pipelines.model.receipts import Drift, DriftKind
from sluice.pipelines.operating.feed_status import WatchResult
from sluice.pipelines.operating.findings import Finding
from tests.assets.world import FEED, World

EVIL = [
    "![x](https://evil.example/pixel.png)",
    "![x][y] [y]: https://evil.example",
    "[log in](https://evil.example)",
    "<img src=https://evil.example/x onerror=alert(1)>",
    "https://evil.example/?q=1 www.evil.example <https://evil.example> a@evil.example",
    "`code` *bold* __bold__ ~~gone~~ \\* &lt;b&gt;",
    "# heading",
    "12. list",
    "- list",
]
UI = MarkdownIt("commonmark").enable("strikethrough")


def list_markup_types(markdown: str) -> set[str]:
    """Returns the types of all rendered elements other than plain paragraphs."""
    blocks = UI.parse(markdown)
    types = {t.type for t in blocks} | {t.type for b in blocks for t in b.children or ()}
    return types - {"paragraph_open", "paragraph_close", "inline", "text", "text_special"}


def render_text(markdown: str) -> str:
    return "".join(t.content for b in UI.parse(markdown) for t in b.children or ())


@given(st.text(st.characters(codec="utf-8", categories=("L", "N", "P", "S"), include_characters=" "), max_size=60))
@example("12) list")
@example(EVIL[1])
@example(EVIL[5])
def test_plain_text_is_shown_without_markup(text: str) -> None:
    text = text.strip()
    assert list_markup_types(plain(text)) == set()
    assert render_text(plain(text)) == text


@pytest.mark.parametrize("text", EVIL)
def test_address_does_not_become_a_link(text: str) -> None:
    assert list_markup_types(plain(text)) == set()
    assert "://" not in plain(text)
    assert "www.evil" not in plain(text)


def test_usual_text_is_not_escaped() -> None:
    for text in ("user_id (int64) is not in the schema, 3 records", "orders:0 [1000, 1400) are gone (log start 1400)"):
        assert plain(text) == text


@pytest.mark.parametrize("name", EVIL)
def test_record_field_name_is_escaped_in_checks(tmp_path_factory: pytest.TempPathFactory, name: str) -> None:
    text = FEED + "format: json\nschema: {a: string}\n"
    world = World(tmp_path_factory.mktemp("project"), {"orders": text})
    drift = Drift(DriftKind.NEW, name, 1, 0, "string")
    world.engine.observe = lambda s: ((), (drift,))
    world.land_unrecorded()
    window = min(world.open_ledger_view().complete)
    ((_, evaluation),) = contract_checks.evaluate(world.open_ledger_view(), window)
    assert name in render_text(evaluation["description"])
    assert list_markup_types(evaluation["description"]) == set()
    refused = SchemaDrifted("no", breaches=[Breach("schema", name, "", 1, 0, ())])
    ((_, evaluation),) = contract_checks.evaluate_refused(world.make_session().feed("orders"), refused, None)
    assert list_markup_types(evaluation["description"]) == set()


@pytest.mark.parametrize("text", EVIL)
def test_catalog_error_is_escaped_in_checks(text: str) -> None:
    error = CatalogUnavailable(f"the catalog answers {text}", remedy=f"see {text}")
    description = table_step._report_failure(error)["description"]
    assert list_markup_types(description) == set()
    assert render_text(description) == f"the catalog answers {text} → see {text}"


@given(st.text(st.characters(codec="utf-8", exclude_categories=("C", "Z"), include_characters=" "), max_size=60))
@example(EVIL[0])
@example(r"a\|b|c")
def test_report_preview_rows_are_plain_text(text: str) -> None:
    text = text.strip() or "x"
    blocks = UI.enable("table").parse(report_assets._format_table(pa.table({text: [text, None]})))
    cells = [b.children for b in blocks if b.type == "inline"]
    assert ["".join(t.content for t in cell or ()) for cell in cells] == [text, text, "None"]
    assert {t.type for cell in cells for t in cell or ()} <= {"text", "text_special"}


@pytest.mark.parametrize("name", EVIL)
def test_transaction_name_is_escaped_in_health_check(name: str) -> None:
    holder = OpenTransaction(40, 77, 3, 0, name)
    finding = Finding("hanging", f"orders:0 is held back by {holder}", "ask its owner")
    assert (
        list_markup_types(feed_checks.check_health(WatchResult((finding, replace(finding, about="x"))))["description"])
        == set()
    )
