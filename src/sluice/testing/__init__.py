"""For tests of feeds, contracts and reports, and of Sluice itself: `land`, and every port in memory.

    from sluice.testing import Message, land

`land` is all that a project needs (docs/testing.md). The ports of `sluice.pipelines.ports` are here by module: `lake`,
`cluster`, `group`, `groups`, `engine`, `fetcher`, `liveness`, `clock`. `logs` builds record batches as brokers hold
them. Nothing that runs in production imports this package.
"""

from __future__ import annotations

from sluice.testing.landing import LandedMessages, Message, land

__all__ = ["LandedMessages", "Message", "land"]
