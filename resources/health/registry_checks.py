"""The schema registry of a feed: does it answer, and take the login?"""

from __future__ import annotations

from collections.abc import Iterator

from sluice.pipelines.feed.feed import Feed
from sluice.pipelines.model.health import Diagnosis, ok
from sluice.pipelines.util.units import many
from sluice.resources.registry.confluent import client_of


def examine_registry(feed: Feed) -> Iterator[Diagnosis]:
    """Yields nothing for a feed without a registry. Raises RegistryUnavailable, NotAuthorized."""
    if feed.registry is not None:
        count = len(client_of(feed.registry).subjects())
        yield ok("registry", f"{feed.registry.url} answers; {many(count, 'subject')}")
