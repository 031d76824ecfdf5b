"""Tests of feeds, contracts and reports, and of Sluice itself: `land`, and every port in memory.

    from sluice.testing import Message, land

Projects need only `land` (docs/testing.md). Ports of `sluice.pipelines.ports` are in `lake`, `cluster` (with the
fetcher), `group` and `engine` (with clock and liveness). `logs` builds record batches in the format of brokers. Code
that runs in production never imports this package.
"""

from __future__ import annotations

from sluice.testing.landing import LandedMessages, Message, land

__all__ = ["LandedMessages", "Message", "land"]
