"""Checks Kafka for the feeds of one cluster: reachable brokers, this client's rights, and the feeds' requirements.

Checks log in as the feeds do. If no address answers, the remaining checks are skipped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, replace

from sluice.pipelines.errors import FeedError, NotAuthorized, SluiceError
from sluice.pipelines.feed.feed import Feed
from sluice.pipelines.feed.kafka_section import KafkaSettings
from sluice.pipelines.feed.rights import Operation, ResourceKind, Right, grantee, rights_of
from sluice.pipelines.feed.sections import CommitMode, OffsetStore
from sluice.pipelines.feed.topic_selection import match
from sluice.pipelines.model.consumer_groups import GroupState
from sluice.pipelines.model.health import (
    Diagnosis,
    Health,
    of_error,
    report_failure,
    report_ok,
    report_skipped,
    report_warning,
)
from sluice.pipelines.operating.describe_group import list_strangers
from sluice.pipelines.util.parallel import map_parallel
from sluice.pipelines.util.units import join_first, many, show_about, show_duration
from sluice.resources.health import Check, examine
from sluice.resources.kafka.cluster.visit import KafkaVisit
from sluice.resources.kafka.group.group import SESSION_SECONDS, TRANSACTION_SECONDS
from sluice.resources.kafka.protocol.kafka_errors import Location, explain
from sluice.resources.registry import client_of
from sluice.resources.zookeeper.zookeeper_group import ZooKeeperGroups


def examine_registry(feed: Feed) -> Iterator[Diagnosis]:
    """Yields nothing for a feed without a registry. Raises RegistryUnavailable, NotAuthorized."""
    if feed.registry is not None:
        count = len(client_of(feed.registry).subjects())
        yield report_ok("registry", f"{feed.registry.url} answers; {many(count, 'subject')}")


def examine_offsets(feed: Feed) -> Iterator[Diagnosis]:
    """Yields nothing for a feed whose offsets are in Kafka alone. Raises SetupError without kazoo,
    ZooKeeperUnavailable."""
    if not feed.offsets.in_zookeeper or feed.offsets.connect is None:
        return
    with closing(ZooKeeperGroups(feed.offsets.connect)) as groups:
        view, count = groups.view(feed.group), len(groups.fetch_committed(feed.group))
    others = list_strangers(feed, view)
    if others and feed.commit is not CommitMode.NONE:
        yield report_warning(
            "offsets",
            f"{view.coordinator}: group {feed.group} has {many(len(others), 'consumer')}: {others[0].member_id}. A run "
            "waits for them, and lands nothing while they are there",
            f"stop them; to list them: sluice groups describe --feed {feed.name}",
        )
    elif view.state == GroupState.DEAD:
        yield report_ok("offsets", f"{view.coordinator}; group {feed.group} is not there yet")
    else:
        yield report_ok("offsets", f"{view.coordinator}; group {feed.group} has {many(count, 'offset')}")


OLDEST = (2, 8)
"""The first Kafka with topic ids."""
SOME_SKEW = 30.0
"""Clock difference, in seconds, that is not reported."""
_NAMED = 5
UNSEEN = "unknown: this client may not see it; see `rights`"
"""Hidden resources are reported once, with the command that grants access."""


@dataclass(frozen=True)
class ClusterVisit:
    """One Kafka, as its feeds log in, and the visit to it."""

    settings: KafkaSettings
    feeds: tuple[Feed, ...]
    visit: KafkaVisit


@dataclass(frozen=True)
class OneFeed:
    feed: Feed
    visit: KafkaVisit

    @property
    def topics(self) -> tuple[str, ...]:
        """The names of its topics. Raises FeedError when its patterns match none."""
        return self.feed.topics.names or match(self.feed.topics, self.visit.topics())


def examine_kafka(settings: KafkaSettings, feeds: tuple[Feed, ...]) -> list[Diagnosis]:
    """Returns all diagnoses of one Kafka. With several feeds, a feed's diagnosis begins with the feed's name."""
    try:
        visit = KafkaVisit(settings)
    except FeedError as error:  # a token provider that cannot be made
        return [of_error("login", error)]
    with closing(visit):
        cluster = ClusterVisit(settings, feeds, visit)
        failures = examine(cluster, [Check("address", addresses)])
        if all(d.health is Health.FAILED for d in failures):
            rest = ", ".join([*(c.title for c in CHECKS), *(c.title for c in OF_FEED)])
            return [*failures, report_skipped(rest, "not checked: no address answers")]
        checks = [*CHECKS, *(_of_feed(c, f, alone=len(feeds) == 1) for f in feeds for c in OF_FEED)]
        return [*failures, *examine(cluster, checks)]


def _title(title: str, feed: Feed, *, alone: bool) -> str:
    return title if alone else f"{feed.name}: {title}"


def _of_feed(check: Check[OneFeed], feed: Feed, *, alone: bool) -> Check[ClusterVisit]:
    """A feed's check as one of its cluster."""

    def look(cluster: ClusterVisit) -> Iterator[Diagnosis]:
        try:
            for one in check.look(OneFeed(feed, cluster.visit)):
                yield replace(one, title=_title(one.title, feed, alone=alone))
        except NotAuthorized:
            yield report_skipped(_title(check.title, feed, alone=alone), UNSEEN)

    return Check(_title(check.title, feed, alone=alone), look)


# -- the cluster


def addresses(cluster: ClusterVisit) -> Iterator[Diagnosis]:
    """Check each bootstrap address separately: clients take any of them, so a dead one costs time until it
    matters."""
    names = cluster.settings.bootstrap.split(",")
    errors = map_parallel(lambda name: _error_of(lambda: cluster.visit.reach(name)), names, patience=0)
    none_answers = all(errors)
    for name, error in zip(names, errors, strict=True):
        if error is None:
            yield report_ok("address", f"{name} answers{_login(cluster.settings)}")
        elif none_answers:
            yield of_error("address", error)
        else:
            yield report_warning("address", error.message, error.remedy)


def _login(settings: KafkaSettings) -> str:
    """Returns the security protocol and the user of the login, as part of a message."""
    protocol = settings.security_protocol or "PLAINTEXT"
    who = f" as {settings.sasl_plain_username}" if settings.sasl_plain_username else ""
    return f", {protocol} {settings.sasl_mechanism}{who}" if protocol.startswith("SASL") else f", {protocol}"


def _error_of(ask: Callable[[], object]) -> SluiceError | None:
    try:
        ask()
    except SluiceError as error:
        return error
    return None


def brokers(cluster: ClusterVisit) -> Iterator[Diagnosis]:
    """Check each broker at its advertised address: tasks read from all of them."""
    visible = cluster.visit.brokers()

    def release(id: int) -> tuple[int, ...] | SluiceError:
        try:
            return cluster.visit.release(id)
        except SluiceError as error:
            return error

    releases = map_parallel(release, [b.id for b in visible], patience=0)
    for broker, answer in zip(visible, releases, strict=True):
        if isinstance(answer, SluiceError):
            advertised = f"clients are sent to {broker.address} (advertised.listeners): it must be right from here, too"
            yield report_failure("broker", answer.message, advertised)
            continue
        text = f"{broker.id} at {broker.address} answers, protocol of Kafka {'.'.join(map(str, answer))}"
        if answer < OLDEST:
            yield report_failure("broker", text, "Sluice needs brokers of Apache Kafka 2.8 or newer")
        else:
            yield report_ok("broker", text)


def clock(cluster: ClusterVisit) -> Iterator[Diagnosis]:
    """Windows end by this machine's clock; a feed's `window.max_skew` bounds how far timestamps may be ahead of
    it."""
    try:
        ahead = cluster.visit.ahead()
    except SluiceError:
        ahead = None
    if ahead is None:
        yield report_skipped("clock", "unknown: this needs DESCRIBE on the cluster, and KRaft of Kafka 3.3 or newer")
        return
    difference = f"this machine's is {show_about(int(abs(ahead) * 1000))} {'ahead of' if ahead > 0 else 'behind'}"
    limit = min(f.window.max_skew for f in cluster.feeds) / 1000
    if abs(ahead) > limit:
        yield report_failure(
            "clock", f"{difference} the brokers': windows would end by a wrong time", "set the clocks right (NTP)"
        )
    elif abs(ahead) > SOME_SKEW:
        yield report_warning("clock", f"{difference} the brokers'", "set the clocks right (NTP)")
    else:
        yield report_ok("clock", "as the brokers', to the second" if abs(ahead) < 1 else f"{difference} the brokers'")


CHECKS: tuple[Check[ClusterVisit], ...] = (
    Check("broker", brokers),
    Check("clock", clock),
)


# -- each feed


def topics(of: OneFeed) -> Iterator[Diagnosis]:
    """Check that each topic exists and has an id."""
    visible = of.visit.topics_seen(of.topics)
    sound = []
    for name, topic in visible.items():
        if topic.is_hidden:
            yield report_skipped("topics", f"{name}: {UNSEEN}")
        elif topic.error:
            yield of_error("topics", explain(topic.error(), grantee(of.feed.kafka), f"topic {name}", Location(name)))
        elif not topic.id:
            yield report_failure(
                "topics", f"{name} has no topic id", "Sluice needs inter.broker.protocol.version 2.8 or newer"
            )
        else:
            sound.append(f"{name} ({many(topic.partitions, 'partition')}, id {topic.id})")
    if sound:
        yield report_ok("topics", join_first(sound, _NAMED))


def dead_letters(of: OneFeed) -> Iterator[Diagnosis]:
    """Check that the dead-letter topic exists: a run never creates it."""
    if of.feed.dead_letters is None:
        return
    name = of.feed.dead_letters.topic
    topic = of.visit.topics_seen([name])[name]
    if topic.is_hidden:
        yield report_skipped("dead letters", f"{name}: {UNSEEN}")
    elif topic.error:
        failure = explain(topic.error(), grantee(of.feed.kafka), f"topic {name}", Location(name))
        yield of_error("dead letters", failure)
    else:
        yield report_ok("dead letters", f"{name} ({many(topic.partitions, 'partition')})")


def offsets(of: OneFeed) -> Iterator[Diagnosis]:
    """Check that ZooKeeper answers, for a feed whose offsets are there."""
    return examine_offsets(of.feed)


def registry(of: OneFeed) -> Iterator[Diagnosis]:
    """Check that the schema registry answers, for a feed that has one."""
    return examine_registry(of.feed)


def group(of: OneFeed) -> Iterator[Diagnosis]:
    """Check that the group answers and has no other member."""
    if of.feed.offsets.store is not OffsetStore.KAFKA:
        return
    view = of.visit.group(of.feed.group)
    coordinator = f"coordinator {view.coordinator.id} at {view.coordinator.address}"
    if view.state == GroupState.DEAD:
        yield report_ok("group", f"{of.feed.group} is not there yet, the first commit makes it; {coordinator}")
        return
    others = list_strangers(of.feed, view)
    if others and of.feed.commit is not CommitMode.NONE:
        first = f"{others[0].client_id} at {others[0].host}"
        yield report_warning(
            "group",
            f"{of.feed.group} has {many(len(others), 'member')} that {'is' if len(others) == 1 else 'are'} not ours: "
            f"{first}. Runs land, and commit when it has left",
            f"sluice groups describe --feed {of.feed.name}",
        )
    else:
        yield report_ok("group", f"{of.feed.group}, {view.state}; {coordinator}")


def session(of: OneFeed) -> Iterator[Diagnosis]:
    """Check that the brokers allow our session timeout in the group."""
    if of.feed.commit is CommitMode.NONE or of.feed.offsets.store is not OffsetStore.KAFKA:
        return
    requested, limits = of.feed.kafka.session_timeout_ms or int(SESSION_SECONDS * 1000), of.visit.limits()
    lowest, highest = limits.min_session, limits.max_session
    if lowest is None or highest is None:
        yield report_skipped("group session", UNSEEN)
        return
    allowed = f"the brokers allow {show_duration(lowest)} to {show_duration(highest)}"
    if lowest <= requested <= highest:
        yield report_ok("group session", f"{show_duration(requested)}; {allowed}")
    else:
        yield report_failure(
            "group session",
            f"ours in the group is to last {show_duration(requested)}, {allowed}",
            f"set kafka.session_timeout_ms in the feed to {lowest} at least and {highest} at most"
            " (the brokers' group.min.session.timeout.ms and group.max.session.timeout.ms)",
        )


def transactions(of: OneFeed) -> Iterator[Diagnosis]:
    """Check that the transactional id has a coordinator and that the brokers allow our transaction timeout."""
    if of.feed.commit is not CommitMode.TRANSACTIONAL:
        return
    coordinator = of.visit.coordinator(of.feed.transactional_id)
    requested = of.feed.kafka.transaction_timeout_ms or int(TRANSACTION_SECONDS * 1000)
    limit = of.visit.limits().transaction_max_timeout
    summary = f"{of.feed.transactional_id}; coordinator {coordinator.id} at {coordinator.address}"
    if limit is not None and requested > limit:
        yield report_failure(
            "transactions",
            f"{summary}. Ours may last {show_duration(requested)}, the brokers allow {show_duration(limit)}",
            f"set kafka.transaction_timeout_ms in the feed to {limit} or less (the brokers'"
            " transaction.max.timeout.ms)",
        )
    else:
        yield report_ok("transactions", summary)


def rights(of: OneFeed) -> Iterator[Diagnosis]:
    """Check each right that the feed needs."""
    for right in rights_of(of.feed):
        lacking = _LACKING[right.kind](of, right)
        if lacking is None:
            yield report_skipped("rights", f"{right}, {right.need}: the brokers do not report it")
        elif not lacking:
            yield report_ok("rights", f"{right}, {right.need}")
        else:
            where = f" ({', '.join(lacking[:_NAMED])})" if lacking != [right.name] else ""
            tell = report_warning if right.optional else report_failure
            yield tell(
                "rights",
                f"{right} is missing{where}; it is needed {right.need}",
                grantee(of.feed.kafka).remedy([right]),
            )


Lacking = list[str] | None
"""The resources on which a right is missing; None if the brokers do not report rights."""


def _lacking_on_topics(of: OneFeed, right: Right) -> Lacking:
    names = {*of.topics, *([of.feed.dead_letters.topic] if of.feed.dead_letters else [])}
    covered = sorted(n for n in names if right.covers(right.kind, n))
    visible = of.visit.topics_seen(covered)
    untold = right.operation is Operation.DESCRIBE_CONFIGS  # does not imply DESCRIBE: hidden resources may have it
    if any((untold and t.is_hidden) or (not t.error and not t.may) for t in visible.values()):
        return None
    return [
        n for n in covered if visible[n].is_hidden or (not visible[n].error and right.operation not in visible[n].may)
    ]


def _lacking_on_group(of: OneFeed, right: Right) -> Lacking:
    try:
        may = of.visit.group_rights(right.name)
    except NotAuthorized:
        return [right.name]
    return None if not may else [] if right.operation in may else [right.name]


def _lacking_on_transactional_id(of: OneFeed, right: Right) -> Lacking:
    try:
        return [] if of.visit.may_write(right.name, of.feed.group) else [right.name]
    except NotAuthorized:
        return [right.name]


def _lacking_on_cluster(of: OneFeed, right: Right) -> Lacking:
    may = of.visit.cluster_rights()
    if not may and right.operation is not Operation.DESCRIBE:
        return None  # brokers report nothing without DESCRIBE
    return [] if right.operation in may else [right.name]


_LACKING: Mapping[ResourceKind, Callable[[OneFeed, Right], Lacking]] = {
    ResourceKind.TOPIC: _lacking_on_topics,
    ResourceKind.GROUP: _lacking_on_group,
    ResourceKind.TRANSACTIONAL_ID: _lacking_on_transactional_id,
    ResourceKind.CLUSTER: _lacking_on_cluster,
}


OF_FEED: tuple[Check[OneFeed], ...] = (
    Check("topics", topics),
    Check("rights", rights),
    Check("group", group),
    Check("group session", session),
    Check("offsets", offsets),
    Check("registry", registry),
    Check("transactions", transactions),
    Check("dead letters", dead_letters),
)
