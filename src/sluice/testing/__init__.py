"""Tests of feeds, contracts and reports, and of Sluice itself: `land`, and every port in memory.

    from sluice.testing import Message, land

Projects need only `land` (docs/testing.md). Each port of `sluice.pipelines.ports` has a module: `lake`, `cluster`,
`group`, `groups`, `engine`, `fetcher`, `liveness`, `clock`. `logs` builds record batches in the format of brokers. Code
that runs in production never imports this package.
"""

from __future__ import annotations

from sluice.testing.landing import LandedMessages, Message, land

__all__ = ["LandedMessages", "Message", "land"]
