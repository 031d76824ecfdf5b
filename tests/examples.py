"""The number of examples that Hypothesis tries for a property."""

from __future__ import annotations

from hypothesis import settings


def scale_examples(count: int) -> int:
    """Scale `count` to the profile: its `max_examples` is 100, and 20 in `make quick`."""
    return max(1, count * settings().max_examples // 100)
