"""Schema registries: Confluent, Apicurio and Karapace over REST, and AWS Glue."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sluice.pipelines.feed.feed import Feed
from sluice.pipelines.feed.kafka_section import RegistrySettings
from sluice.pipelines.lake.schemas import KeptSchemas
from sluice.pipelines.ports import Lake
from sluice.pipelines.records.shape import READERS
from sluice.pipelines.util import extras

if TYPE_CHECKING:
    from sluice.resources.registry.confluent import RegistryClient
    from sluice.resources.registry.glue import GlueClient


def client_of(settings: RegistrySettings) -> RegistryClient | GlueClient:
    """The client of a feed's registry. Picklable; it asks nothing yet."""
    if settings.glue is None:
        from sluice.resources.registry.confluent import RegistryClient  # late: most feeds have no registry

        return RegistryClient(settings)
    with extras.name_missing():
        from sluice.resources.registry.glue import GlueClient  # late: only Glue's registry needs boto3

    return GlueClient(settings)


def writers_of(feed: Feed, lake: Lake, *, keep: bool = True) -> KeptSchemas | None:
    """The writers' schemas of a feed whose readers ask for them; None for any other. Read-only callers store none of
    them in the lake."""
    types = tuple(dict.fromkeys(READERS[reader.format].registered for reader in feed.readers if reader.asks))
    if not types:
        return None
    client = client_of(feed.registry) if feed.registry else None
    context = feed.registry.context if feed.registry else ""
    return KeptSchemas(lake, feed.stored, client, keep=keep, types=types, context=context)
