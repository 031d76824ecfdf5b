"""Landing on executors without Sluice. Landed rows equal the records that an independent consumer reads."""

from __future__ import annotations

import pytest

from bench.spark_cluster import LocalSpark
from tests.cluster.conftest import configure_spark, land_feed
from tests.integration.support import FeedProject, consume_topic, read_rows
from tests.stores import Store

pytestmark = [pytest.mark.cluster, pytest.mark.spark, pytest.mark.kafka, pytest.mark.slow]


def test_workers_without_sluice_land_the_topic(project: FeedProject, cluster: LocalSpark) -> None:
    feed = project.write_feed(**configure_spark(cluster))
    land_feed(feed)
    assert read_rows(feed) == consume_topic(project.kafka, project.topic)
    assert "ModuleNotFoundError" not in cluster.read_output()


def test_workers_without_sluice_land_on_s3(project: FeedProject, cluster: LocalSpark, s3_store: Store) -> None:
    feed = project.write_feed(**configure_spark(cluster), **s3_store.build_feed_settings())
    land_feed(feed)
    assert read_rows(feed) == consume_topic(project.kafka, project.topic)
