"""Diagnoses of clusters that answer in unusual ways. Real ones: tests/cli/test_doctor.py."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import pytest
from kafka.errors import TopicAuthorizationFailedError

from sluice.pipelines.errors import KafkaUnavailable, NotAuthorized
from sluice.pipelines.feed.feed import Feed
from sluice.pipelines.model.consumer_groups import Broker
from sluice.pipelines.model.health import Health
from sluice.resources.health import kafka_checks
from sluice.resources.health.kafka_checks import ClusterVisit, OneFeed
from sluice.resources.kafka.cluster.visit import KafkaVisit
from sluice.resources.kafka.protocol.admin_api import TopicSeen

HERE = Broker(1, "a:1")


@dataclass
class Visit:
    """A visit with given answers; errors among them are raised."""

    answers: Mapping[str, Any] = field(default_factory=dict)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def raise_or_return(*_: object) -> Any:
            if isinstance(answer := self.answers[name], Exception):
                raise answer
            return answer

        return raise_or_return


def make_feed(**settings: Any) -> Feed:
    return Feed.model_validate(
        {"feed": "orders", "kafka": {"bootstrap": "a:1"}, "topics": "orders", "start": "earliest"} | settings
    )


def make_cluster_visit(**answers: Any) -> ClusterVisit:
    return ClusterVisit(make_feed().kafka, (make_feed(),), cast(KafkaVisit, Visit(answers)))


def make_feed_visit(of: Feed, **answers: Any) -> OneFeed:
    return OneFeed(of, cast(KafkaVisit, Visit(answers)))


def list_healths(diagnoses: Iterable[Any]) -> list[Health]:
    return [d.health for d in diagnoses]


@pytest.mark.parametrize(
    ("ahead", "health", "message"),
    [
        (0.0, Health.OK, "as the brokers', to the second"),
        (20.0, Health.OK, "this machine's is 20 s ahead of the brokers'"),
        (-60.0, Health.WARNING, "this machine's is 60 s behind the brokers'"),
        (600.0, Health.FAILED, "windows would end by a wrong time"),
        (None, Health.SKIPPED, "unknown: "),
        (NotAuthorized("no"), Health.SKIPPED, "unknown: "),
    ],
)
def test_clock_difference_is_diagnosed(ahead: Any, health: Health, message: str) -> None:
    (diagnosis,) = kafka_checks.clock(make_cluster_visit(ahead=ahead))
    assert diagnosis.health is health
    assert message in diagnosis.found


def test_old_or_unreachable_brokers_are_reported() -> None:
    assert list_healths(kafka_checks.brokers(make_cluster_visit(brokers=(HERE,), release=(2, 7)))) == [Health.FAILED]
    (diagnosis,) = kafka_checks.brokers(make_cluster_visit(brokers=(HERE,), release=KafkaUnavailable("no route")))
    assert (diagnosis.health, "advertised.listeners" in diagnosis.remedy) == (Health.FAILED, True)


def test_hidden_topics_and_topics_without_id_are_reported() -> None:
    topics = {
        "hidden": TopicSeen(TopicAuthorizationFailedError, "", 0, frozenset()),
        "old": TopicSeen(None, "", 3, frozenset()),
        "sound": TopicSeen(None, "x", 3, frozenset()),
    }
    diagnoses = [*kafka_checks.topics(make_feed_visit(make_feed(topics=list(topics)), topics_seen=topics))]
    assert list_healths(diagnoses) == [Health.SKIPPED, Health.FAILED, Health.OK]
    assert diagnoses[0].found == "hidden: unknown: this client may not see it; see `rights`"
