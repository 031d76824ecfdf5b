"""Where a project keeps its things: feeds, local state, Dagster's instance, the local Kafka. Opens no socket.

The project root is the folder that holds `feeds/`: the current one or the nearest above it, or `$SLUICE_PROJECT`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from sluice.pipelines.errors import FeedError, UsageError
from sluice.pipelines.feed.feed import Feed
from sluice.pipelines.feed.kafka_section import KafkaSettings
from sluice.pipelines.feed.load import choose_feed, demand_feed, find_feed_file, find_output, load_feed, load_feeds
from sluice.pipelines.feed.project_files import FleetSettings, NotifySettings, load_fleet, load_notify
from sluice.pipelines.feed.sections import BOOTSTRAP, LOCAL_KAFKA, LOCAL_LOGIN, LOCAL_REGISTRY

if TYPE_CHECKING:
    from sluice.resources.local.local_kafka import LocalKafka
    from sluice.resources.local.local_registry import LocalRegistry

NOWHERE = "127.0.0.1:9"
"""Used for an unset address if Kafka is not asked."""


@dataclass(frozen=True, slots=True)
class Project:
    """One folder of feeds, with its state in `.sluice/` next to them."""

    root: Path

    @classmethod
    def find(cls, start: Path | None = None, *, needs_feeds: bool = True) -> Project:
        """Return the project around `start` (the current folder). Without any, raises UsageError, or returns `start`
        as the project if it needs no feeds."""
        configured = os.environ.get("SLUICE_PROJECT")
        here = Path(configured) if configured and start is None else (start or Path.cwd())
        for folder in (here.resolve(), *here.resolve().parents):
            if (folder / "feeds").is_dir():
                return cls(folder)
        if not needs_feeds:
            return cls(here.resolve())
        raise UsageError(
            f"no folder `feeds/` in {here} or above it",
            remedy="run sluice in your project's folder, or set SLUICE_PROJECT; sluice init begins a project",
        )

    @property
    def feeds_folder(self) -> Path:
        return self.root / "feeds"

    def fleet(self) -> FleetSettings:
        """How one run lands many feeds, as `fleet.yaml` says now. Raises FeedError."""
        return load_fleet(self.root, self.environ())

    def notify(self) -> NotifySettings:
        """Where findings go, as `notify.yaml` says now. Raises FeedError."""
        return load_notify(self.root, self.environ())

    @property
    def state(self) -> Path:
        return self.root / ".sluice"

    @property
    def kafka_folder(self) -> Path:
        return self.state / "kafka"

    @property
    def local_registry(self) -> LocalRegistry:
        """The project's local schema registry, there or not."""
        from sluice.resources.local.local_registry import LocalRegistry

        return LocalRegistry(self.state / "registry")

    @property
    def dagster_home(self) -> Path:
        home = os.environ.get("DAGSTER_HOME")
        return Path(home).expanduser().absolute() if home else self.state / "dagster"

    def environ(self) -> dict[str, str]:
        """The environment for feeds. If KAFKA_BOOTSTRAP is unset, a running local Kafka takes its place. For a feed
        that names no Kafka at all, even a stopped one does: then errors say that the local Kafka does not answer."""
        env, local = dict(os.environ), self._local_kafka()
        if local is not None:
            env[LOCAL_KAFKA] = local.bootstrap
            if local.secured:
                env[LOCAL_LOGIN] = str(local.secured.login)
            if local.running:
                env.setdefault(BOOTSTRAP, local.bootstrap)
        if (self.state / "registry").exists() and (registry := self.local_registry).there:
            env[LOCAL_REGISTRY] = registry.url
        return env

    def local_bootstrap(self) -> str | None:
        """Addresses of the project's local Kafka, if it runs."""
        local = self._local_kafka()
        return local.bootstrap if local is not None and local.running else None

    def writer(self, feed: Feed) -> KafkaSettings:
        """How sample events get into the feed's Kafka: as the administrator where that is the secured local one."""
        local = self._local_kafka()
        if local is None or local.secured is None or feed.kafka.bootstrap != local.bootstrap:
            return feed.kafka
        return KafkaSettings(bootstrap=local.bootstrap, **local.client())

    def _local_kafka(self) -> LocalKafka | None:
        if not (self.kafka_folder / "cluster.json").exists():
            return None
        from sluice.resources.local.local_kafka import LocalKafka

        return LocalKafka.attach(self.kafka_folder)

    def feeds(self) -> Mapping[str, Feed]:
        """Every feed, by name. Raises FeedError naming each file that is wrong."""
        return load_feeds(self.feeds_folder, self.environ())

    def feed(self, name: str) -> Feed:
        """One feed; errors in other files do not matter. Raises FeedError if there is no feed of that name."""
        return demand_feed(name, self.find_dataset(name))

    def find_dataset(self, name: str) -> Feed:
        """One feed, or one output of a split feed by `feed.output`. Raises FeedError."""
        feed, _, output = name.partition(".")
        return find_output(self._feed(feed, self.environ()), output)

    def readable_feed(self, name: str) -> Feed:
        """One feed or output, to read landed rows: the address of Kafka may be unset. Raises FeedError."""
        feed, _, output = name.partition(".")
        return find_output(self._feed(feed, {BOOTSTRAP: NOWHERE} | self.environ()), output)

    def find_feed_file(self, name: str) -> Path:
        """The feed's file, named after it; without one, the path of a new file."""
        return find_feed_file(self.feeds_folder, name)

    def _feed(self, name: str, environ: Mapping[str, str]) -> Feed:
        path = self.find_feed_file(name)
        if path.is_file() and (feed := load_feed(path, environ, folder=self.feeds_folder)).name == name:
            return feed
        feeds = load_feeds(self.feeds_folder, environ)
        if chosen := choose_feed(name, feeds):
            return chosen
        raise FeedError(
            f"no feed {name!r} in {self.feeds_folder}", remedy=f"feeds here: {', '.join(sorted(feeds)) or 'none'}"
        )
