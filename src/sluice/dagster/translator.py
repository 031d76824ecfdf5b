"""How a project of one's own shows the assets of its feeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import dagster as dg

from sluice.assets.specs.asset_specs import FeedAsset


@dataclass(frozen=True)
class FeedTranslator:
    """Says how each asset is shown: the same for all by these fields, or one by one in a subclass.

    `key_prefix` goes before each key. `group_name` replaces the group, which is the feed's name, or `kafka` for topics.
    `owners` are added, and so are `tags` and `kinds`.
    """

    key_prefix: str | Sequence[str] = ()
    group_name: str | None = None
    owners: Sequence[str] = ()
    tags: Mapping[str, str] = field(default_factory=dict)
    kinds: Sequence[str] = ()

    def get_asset_spec(self, asset: FeedAsset) -> dg.AssetSpec:
        """The spec of an asset; `asset.spec` is what is shown without a translator.

        What an asset depends on, its partitions and its checks stay as they are, whatever the spec says of them.
        """
        spec = asset.spec
        if self.key_prefix:
            spec = spec.replace_attributes(key=spec.key.with_prefix(self.key_prefix))
        if self.group_name:
            spec = spec.replace_attributes(group_name=self.group_name)
        if self.kinds:
            spec = spec.replace_attributes(kinds={*spec.kinds, *self.kinds})
        return spec.merge_attributes(owners=[*self.owners], tags=dict(self.tags))
