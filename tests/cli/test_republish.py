"""`sluice republish`: its dry run, and what is wrong with how it was called."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from sluice.cli.app.invocation import Session
from sluice.cli.kafka import republish
from sluice.pipelines.model.plans import AskedRange, Request, RequestKind
from tests.assets.world import P0, P1, World
from tests.cli.conftest import Sluice, Tell

DAY = "2024-05-01"

MISUSED = {
    "--to or --resume": [],
    "--to or --resume, and not both": ["--to", "again", "--resume", "x"],
    "said anew: --where, --headers": ["--resume", "x", "--where", "true", "--headers"],
    "'rar' is no codec": ["--to", "again", "--compression", "rar"],
    "a rate of 0": ["--to", "again", "--rate", "0"],
    "rate '5 sheep'": ["--to", "again", "--rate", "5 sheep"],
    "partitions are kept, and chosen by key": ["--to", "again", "--keep-partitions", "--partition-by", "key"],
    "'hash' is no way to choose a partition": ["--to", "again", "--partition-by", "hash"],
    "'a b' is no name": ["--to", "again", "--id", "a b"],
    "has no republish nowhere": ["--resume", "nowhere"],
    "what is to be sent?": ["--to", "again"],
    "--offsets and windows together": ["--to", "again", "--offsets", "orders:0:1-2", "--window", f"{DAY}T01"],
    "--from without --until": ["--to", "again", "--from", DAY],
    "--until without --from": ["--to", "again", "--until", DAY],
    "the ledger knows no partition orders:7": ["--to", "again", "--offsets", "orders:7:1-2"],
}


@pytest.mark.parametrize("told", MISUSED)
def test_misuse_is_told_with_a_way_out(sluice: Sluice, project: Path, told: str) -> None:
    said = sluice("republish", "orders", *MISUSED[told])
    assert said.code == 2
    assert told in said.err
    assert "→" in said.err
    assert "Traceback" not in said.err


class Three:
    """A target of three partitions."""

    def partitions(self) -> int:
        return 3

    def close(self) -> None: ...


@pytest.mark.parametrize("columns", [60, 120])
def test_a_dry_run_fits_the_terminal_and_sends_nothing(
    world: World, tell: Tell, monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    for start in range(0, 50, 5):
        ranges = tuple(AskedRange(tp.topic, tp.partition, start, start + 5) for tp in (P0, P1))
        world.land_unrecorded(Request(RequestKind.OFFSETS, ranges))
    monkeypatch.setattr(Session, "open_target", lambda *_: closing(Three()))
    asked: dict[str, Any] = {"to": "again", "start": f"{DAY}T00", "end": f"{DAY}T02"}
    before = dict(world.lake.files)
    monkeypatch.setenv("COLUMNS", str(columns))
    told = tell(republish.republish, "orders", **asked)
    assert world.lake.files == before
    assert told.document["to_partitions"] == 3
    assert sum(s["rows"] for s in told.document["sources"]) == 100
    assert "A dry run: nothing was sent. Add --apply to do it." in " ".join(told.text.split())
    assert max(map(len, told.text.splitlines())) <= columns
