"""`sluice republish`: its dry run, and its errors for wrong arguments."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from sluice.cli.app.invocation import Session
from sluice.cli.kafka import republish
from sluice.pipelines.errors import UsageError
from tests.assets.world import World
from tests.cli.conftest import Invoke, Sluice

DAY = "2024-05-01"

MISUSED = {
    "give either --topic or --resume": [],
    "either --topic or --resume": ["--topic", "again", "--resume", "x"],
    "contradict it: --where, --headers": ["--resume", "x", "--where", "true", "--headers"],
    "unknown codec --compression 'rar'": ["--topic", "again", "--compression", "rar"],
    "a rate of 0": ["--topic", "again", "--rate", "0"],
    "rate '5 sheep'": ["--topic", "again", "--rate", "5 sheep"],
    "partitions are kept, and chosen by key": ["--topic", "again", "--keep-partitions", "--partition-by", "key"],
    "'hash' is no way to choose a partition": ["--topic", "again", "--partition-by", "hash"],
    "'a b' is no name": ["--topic", "again", "--id", "a b"],
    "has no republish nowhere": ["--resume", "nowhere"],
    "no windows or offsets": ["--topic", "again"],
    "--offsets together with windows": ["--topic", "again", "--offsets", "orders:0:1-2", "--window", f"{DAY}T01"],
    "--from without --to": ["--topic", "again", "--from", DAY],
    "--to without --from": ["--topic", "again", "--to", DAY],
    "the ledger knows no partition orders:7": ["--topic", "again", "--offsets", "orders:7:1-2"],
}


@pytest.mark.parametrize("message", MISUSED)
def test_misuse_is_reported_with_a_remedy(sluice: Sluice, project: Path, message: str) -> None:
    result = sluice("republish", "orders", *MISUSED[message])
    assert result.code == 2
    assert message in result.err
    assert "→" in result.err
    assert "Traceback" not in result.err


class ThreePartitionTarget:
    """A target topic with three partitions."""

    def partitions(self) -> int:
        return 3

    def close(self) -> None: ...


@pytest.mark.parametrize("columns", [60, 120])
def test_a_dry_run_fits_the_terminal_and_sends_nothing(
    world: World, invoke: Invoke, monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    world.land_in_pieces()
    monkeypatch.setattr(Session, "open_target", lambda *_: closing(ThreePartitionTarget()))
    options: dict[str, Any] = {"topic": "again", "start": f"{DAY}T00", "end": f"{DAY}T02"}
    before = dict(world.lake.files)
    monkeypatch.setenv("COLUMNS", str(columns))
    result = invoke(republish.republish, "orders", **options, dry_run=True)
    assert world.lake.files == before
    assert result.document["partitions"] == 3
    assert sum(s["rows"] for s in result.document["sources"]) == 100
    assert "A dry run: nothing was sent." in " ".join(result.text.split())
    assert max(map(len, result.text.splitlines())) <= columns
    with pytest.raises(UsageError, match="not confirmed: Send these rows to again"):
        invoke(republish.republish, "orders", **options)
    assert world.lake.files == before
