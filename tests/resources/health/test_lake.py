"""What is told of a lake on S3. Folders are told of through the command: tests/cli/test_doctor.py."""

from __future__ import annotations

from sluice.pipelines.feed.s3_section import S3Settings
from sluice.pipelines.model.health import Diagnosis, Health
from sluice.resources.health.lake_checks import examine_lake
from sluice.resources.lake.s3_lake import S3Lake
from tests.stores import Store


def by_title(found: list[Diagnosis]) -> dict[str, Diagnosis]:
    return {d.title: d for d in found}


def test_a_lake_on_s3(s3_store: Store) -> None:
    address = s3_store.lake()
    before = by_title(examine_lake(address, s3_store.settings))
    assert before["listing"].found == f"{address}: it can be listed, and nothing has landed yet"
    assert (before["clock"].health, before["conditional writes"].health) == (Health.OK, Health.SKIPPED)
    assert [*S3Lake(address, s3_store.settings).list("")] == [], "it reads only"

    S3Lake(address, s3_store.settings).put_if_absent("_sluice/orders/log/0.json", b"{}")
    after = by_title(examine_lake(address, s3_store.settings))
    assert {d.health for d in after.values()} == {Health.OK}
    assert after["listing"].found == f"{address}: the ledger can be listed"


def test_a_bucket_that_is_not_there_and_a_store_that_is_away(s3_store: Store) -> None:
    nowhere = by_title(examine_lake("s3://no-such-bucket-here", s3_store.settings))
    assert nowhere["listing"].health is Health.FAILED
    assert "no-such-bucket-here" in nowhere["listing"].found
    said = {"endpoint": "http://127.0.0.1:9", "region": "x", "access_key_id": "a", "secret_access_key": "hunter2"}
    away = examine_lake("s3://lake", S3Settings.model_validate(said))
    assert {d.health for d in away} == {Health.FAILED}
    assert "hunter2" not in repr(away)
