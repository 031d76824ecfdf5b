"""Keys, groups, owners and tags of feed assets in an existing Dagster project."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import dagster as dg

from sluice.assets.specs.asset_specs import FeedAsset


@dataclass(frozen=True)
class FeedTranslator:
    """Change the specs of assets: all alike with these fields, or each in a subclass.

    `key_prefix` prefixes each key. `group_name` replaces the group: the feed's name, or `kafka` for topics. `owners`,
    `tags` and `kinds` are added.
    """

    key_prefix: str | Sequence[str] = ()
    group_name: str | None = None
    owners: Sequence[str] = ()
    tags: Mapping[str, str] = field(default_factory=dict)
    kinds: Sequence[str] = ()

    def get_asset_spec(self, asset: FeedAsset) -> dg.AssetSpec:
        """Returns the spec of an asset; `asset.spec` is the default.

        Dependencies, partitions and checks of the returned spec are ignored.
        """
        spec = asset.spec
        if self.key_prefix:
            spec = spec.replace_attributes(key=spec.key.with_prefix(self.key_prefix))
        if self.group_name:
            spec = spec.replace_attributes(group_name=self.group_name)
        if self.kinds:
            spec = spec.replace_attributes(kinds={*spec.kinds, *self.kinds})
        return spec.merge_attributes(owners=[*self.owners], tags=dict(self.tags))
