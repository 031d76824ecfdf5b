"""The table of rights: those that each feed needs, the commands that grant them, and docs/security.md agrees."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from sluice.pipelines.feed.feed import Feed
from sluice.pipelines.feed.rights import Grantee, Right, rights_of

PAGE = (Path(__file__).parents[3] / "docs" / "security.md").read_text()
LEAST: Mapping[str, Any] = {"feed": "orders", "kafka": {"bootstrap": "k:1"}, "topics": "orders", "start": "earliest"}
CASES: Mapping[str, Mapping[str, Any]] = {
    "transactional": {},
    "plain": {"commit": "plain"},
    "none": {"commit": "none"},
    "dead_letters": {"dead_letters": {"topic": "bad"}},
}


def make_feed(**lines: Any) -> Feed:
    return Feed.model_validate({**LEAST, **lines})


def test_the_page_has_exactly_the_rights_of_the_table() -> None:
    rows = re.findall(r"^\| ([A-Z_]+) \| (topic|group|transactional-id|cluster) \| (.+?) \| (.+?) \|$", PAGE, re.M)
    documented = {(operation, kind, "optional" in when, need) for operation, kind, when, need in rows}
    needed = {
        (r.operation, r.kind, r.optional, r.need) for lines in CASES.values() for r in rights_of(make_feed(**lines))
    }
    assert documented == needed
    for operation, kind, when, need in rows:
        for mode in set(re.findall(r"`(?:commit: )?(\w+)`", when)):
            assert (operation, kind, need) in {
                (r.operation, r.kind, r.need) for r in rights_of(make_feed(**CASES[mode]))
            }


def test_both_names_of_a_certificate_are_shown() -> None:
    needed = [rights_of(make_feed())[0]]
    remedy = Grantee("User:CN=ingest", "k:1").remedy(needed)
    assert remedy.startswith(
        "grant READ on topic orders to User:CN=ingest (or to the name that the brokers' ssl.principal.mapping"
    )
    assert "mapping" not in Grantee("User:ingest", "k:1").remedy(needed)


def test_the_page_grants_a_feed_by_the_commands_that_sluice_prints() -> None:
    commands = re.findall(r"^    (kafka-acls .*?) \\\n +(.*)$", PAGE, re.M)
    needed = [r for r in rights_of(make_feed()) if not r.optional]
    assert [" ".join(parts) for parts in commands] == Grantee("User:ingest", "kafka.example:9093").commands(needed)


@pytest.mark.parametrize(
    ("include", "granted"),
    [
        (["orders-.*"], ["topics orders-…"]),
        ([r"shop\.orders\..+", r"shop\..*"], ["topics shop.…"]),
        (["orders-?x", "b"], ["topics b…", "topics orders…"]),
        (["a|b"], ["all topics"]),
        ([".*-eu"], ["all topics"]),
        ([], ["all topics"]),
    ],
)
def test_patterns_are_granted_by_prefix(include: list[str], granted: list[str]) -> None:
    read = [
        r.what for r in rights_of(make_feed(topics={"include": include, "exclude": ["x"]})) if r.operation == "READ"
    ]
    assert read == [*granted, "group sluice-orders"]


def test_names_that_a_shell_would_read_are_quoted() -> None:
    def make_command(right: Right) -> str:
        return Grantee("User:CN=in gest", "k:1").commands([right])[0]

    last = make_command(rights_of(make_feed(group="$(rm)"))[1])
    assert "--allow-principal 'User:CN=in gest'" in last
    assert last.endswith("--group '$(rm)'")
