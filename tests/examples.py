"""How many examples a property is shown."""

from __future__ import annotations

from hypothesis import settings


def examples(count: int) -> int:
    """`count`, as a share of what the profile gives properties that name no number: 100, and 20 in `make quick`."""
    return max(1, count * settings().max_examples // 100)
