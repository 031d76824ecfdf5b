"""What is told of a cluster that answers in unusual ways. Real ones: tests/cli/test_doctor.py."""

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
    """A visit with these answers; an error is raised."""

    answers: Mapping[str, Any] = field(default_factory=dict)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def answer(*_: object) -> Any:
            if isinstance(said := self.answers[name], Exception):
                raise said
            return said

        return answer


def feed(**said: Any) -> Feed:
    return Feed.model_validate(
        {"feed": "orders", "kafka": {"bootstrap": "a:1"}, "topics": "orders", "start": "earliest"} | said
    )


def cluster(**answers: Any) -> ClusterVisit:
    return ClusterVisit(feed().kafka, (feed(),), cast(KafkaVisit, Visit(answers)))


def one(of: Feed, **answers: Any) -> OneFeed:
    return OneFeed(of, cast(KafkaVisit, Visit(answers)))


def healths(found: Iterable[Any]) -> list[Health]:
    return [d.health for d in found]


@pytest.mark.parametrize(
    ("ahead", "health", "said"),
    [
        (0.0, Health.OK, "as the brokers', to the second"),
        (20.0, Health.OK, "this machine's is 20 s ahead of the brokers'"),
        (-60.0, Health.WARNING, "this machine's is 60 s behind the brokers'"),
        (600.0, Health.FAILED, "windows would end by a wrong time"),
        (None, Health.SKIPPED, "unknown: "),
        (NotAuthorized("no"), Health.SKIPPED, "unknown: "),
    ],
)
def test_clocks(ahead: Any, health: Health, said: str) -> None:
    (found,) = kafka_checks.clock(cluster(ahead=ahead))
    assert found.health is health
    assert said in found.found


def test_brokers_that_are_old_or_advertise_what_cannot_be_reached() -> None:
    assert healths(kafka_checks.brokers(cluster(brokers=(HERE,), release=(2, 7)))) == [Health.FAILED]
    (found,) = kafka_checks.brokers(cluster(brokers=(HERE,), release=KafkaUnavailable("no route")))
    assert (found.health, "advertised.listeners" in found.remedy) == (Health.FAILED, True)


def test_topics_that_are_hidden_or_have_no_id() -> None:
    seen = {
        "hidden": TopicSeen(TopicAuthorizationFailedError, "", 0, frozenset()),
        "old": TopicSeen(None, "", 3, frozenset()),
        "sound": TopicSeen(None, "x", 3, frozenset()),
    }
    found = [*kafka_checks.topics(one(feed(topics=list(seen)), topics_seen=seen))]
    assert healths(found) == [Health.SKIPPED, Health.FAILED, Health.OK]
    assert found[0].found == "hidden: unknown: this client may not see it; see `rights`"
