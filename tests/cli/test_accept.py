"""`sluice accept`: its preview, its confirmation, and the loss that it records."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sluice.cli.maintain import accept
from sluice.pipelines.errors import NothingToAccept, UsageError
from tests.assets.world import P0, World
from tests.cli.conftest import Invoke


@pytest.fixture
def deleted(world: World) -> World:
    """A landed feed whose topic lost five pending offsets."""
    world.run()
    state = world.cluster.states[P0]
    end = state.high_watermark + 10
    world.cluster.states[P0] = replace(state, log_start=end - 5, last_stable_offset=end, high_watermark=end)
    return world


def test_a_dry_run_lists_the_loss_and_changes_nothing(deleted: World, invoke: Invoke) -> None:
    before = dict(deleted.lake.files)
    preview = invoke(accept.accept, "orders", event="lost", reason="INC-7", dry_run=True)
    assert (preview.document["applied"], len(preview.document["lost"]), deleted.lake.files) == (False, 1, before)
    assert "A dry run: nothing was changed." in preview.text
    done = invoke(accept.accept, "orders", event="lost", reason="INC-7", yes=True, text=False).document
    assert done == preview.document | {"applied": True}
    with pytest.raises(NothingToAccept):
        invoke(accept.accept, "orders", event="lost", reason="INC-7", dry_run=True)


def test_a_loss_needs_a_confirmation(deleted: World, invoke: Invoke) -> None:
    before = dict(deleted.lake.files)
    with pytest.raises(UsageError, match=r"not confirmed: Give up 5 offsets of feed orders\?"):
        invoke(accept.accept, "orders", event="lost", reason="INC-7")
    assert deleted.lake.files == before
