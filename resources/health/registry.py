"""The schema registry of an Avro feed: does it answer, and take the login?"""

from __future__ import annotations

from collections.abc import Iterator

from sluice.pipelines.feed.feed import Feed
from sluice.pipelines.vocabulary.health import Diagnosis, ok
from sluice.pipelines.vocabulary.units import many
from sluice.resources.registry import RegistryClient


def examine_registry(feed: Feed) -> Iterator[Diagnosis]:
    """Nothing for a feed without a registry. Raises RegistryUnavailable, NotAuthorized."""
    if feed.registry is not None:
        count = len(RegistryClient(feed.registry).subjects())
        yield ok("registry", f"{feed.registry.url} answers; {many(count, 'subject')}")
