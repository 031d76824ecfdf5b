"""A landing on executors that have nothing of ours: what lands is what an independent consumer reads."""

from __future__ import annotations

import pytest

from bench.spark_cluster import LocalSpark
from tests.cluster.conftest import landed, on
from tests.integration.support import Place, consumed, rows
from tests.stores import Store

pytestmark = [pytest.mark.cluster, pytest.mark.spark, pytest.mark.kafka, pytest.mark.slow]


def test_bare_workers_land_what_is_there(place: Place, cluster: LocalSpark) -> None:
    feed = place.feed(**on(cluster))
    landed(feed)
    assert rows(feed) == consumed(place.kafka, place.topic)
    assert "ModuleNotFoundError" not in cluster.read_output()


def test_bare_workers_land_on_s3(place: Place, cluster: LocalSpark, s3_store: Store) -> None:
    feed = place.feed(**on(cluster), **s3_store.lines())
    landed(feed)
    assert rows(feed) == consumed(place.kafka, place.topic)
