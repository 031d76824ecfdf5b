"""The ledgers of the model compress many of their entries: those of more than a few hundred bytes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from sluice.pipelines.ledger import entries


@pytest.fixture(autouse=True, scope="package")
def compressed_entries() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(entries, "PACKED_FROM", 700)
        yield
