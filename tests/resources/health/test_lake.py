"""Diagnoses of lakes in object stores. Folders are tested with the command: tests/cli/test_doctor.py."""

from __future__ import annotations

from collections.abc import Iterator

import boto3
import pytest

from sluice.pipelines.feed.stores import S3Settings
from sluice.pipelines.model.health import Diagnosis, Health
from sluice.resources.health.lake_checks import examine_lake
from sluice.resources.lake import open_store
from tests.clouds import CloudStore
from tests.resources.lake.s3_faults import Proxy, Rule, run_proxy
from tests.stores import Store


def by_title(diagnoses: list[Diagnosis]) -> dict[str, Diagnosis]:
    return {d.title: d for d in diagnoses}


def test_lake_on_s3_is_examined_read_only(s3_store: Store) -> None:
    address = s3_store.make_address()
    before = by_title(examine_lake(address, s3_store.settings))
    assert before["listing"].found == f"{address}: it can be listed, and nothing has landed yet"
    assert (before["clock"].health, before["conditional writes"].health) == (Health.OK, Health.SKIPPED)
    assert before["rights"].found == "this user may read, remove, end uploads, list uploads below the lake"
    assert "does not show it" in before["right to write"].found, "moto answers 500 to an unknown upload"
    assert [*open_store(address, s3_store.settings).list("")] == [], "it reads only"

    open_store(address, s3_store.settings).put_if_absent("_sluice/orders/log/0.json", b"{}")
    after = by_title(examine_lake(address, s3_store.settings))
    assert {d.health for t, d in after.items() if t != "right to write"} == {Health.OK}
    assert after["listing"].found == f"{address}: the ledger can be listed"


def test_missing_bucket_and_unreachable_store_are_reported(s3_store: Store) -> None:
    nowhere = by_title(examine_lake("s3://no-such-bucket-here", s3_store.settings))
    assert nowhere["listing"].health is Health.FAILED
    assert "no-such-bucket-here" in nowhere["listing"].found
    settings = {"endpoint": "http://127.0.0.1:9", "region": "x", "access_key_id": "a", "secret_access_key": "hunter2"}
    away = examine_lake("s3://lake", S3Settings.model_validate(settings))
    assert [d.title for d in away if d.health is Health.FAILED] == ["listing"]
    assert "hunter2" not in repr(away)


REQUESTS_ON_S3 = [
    (r"^GET \S+list-type=", "list", "s3:ListBucket on the bucket"),
    (r"^GET [^?]+/\.probe/[0-9a-f]+$", "read", "s3:GetObject below the prefix"),
    (r"^PUT ", "write", "s3:PutObject below the prefix"),
    (r"^DELETE [^?]+$", "remove", "s3:DeleteObject below the prefix"),
    (r"^DELETE \S+uploadId", "end uploads", "s3:AbortMultipartUpload below the prefix"),
    (r"^GET \S+\?uploads", "list uploads", "s3:ListBucketMultipartUploads on the bucket"),
]


@pytest.mark.parametrize(("request_line", "right", "name"), REQUESTS_ON_S3)
def test_missing_s3_permission_is_reported_by_name(s3_store: Store, request_line: str, right: str, name: str) -> None:
    with run_proxy(s3_store.settings.endpoint or "") as proxy:
        proxy.rules[:] = [Rule(request_line, "refuse", times=-1, status=403, code="AccessDenied")]
        settings = s3_store.settings.model_copy(update={"endpoint": proxy.endpoint})
        failed = [d for d in examine_lake(s3_store.make_address(), settings) if d.health is Health.FAILED]
    assert [(d.title, d.remedy) for d in failed] == [(f"right to {right}", f"grant {name}")]


def test_s3_versioning_is_reported_and_no_objects_are_left(s3_store: Store) -> None:
    client = boto3.client(
        "s3", endpoint_url=s3_store.settings.endpoint, aws_access_key_id="x", aws_secret_access_key="x",
        region_name="us-east-1",
    )  # fmt: skip
    client.create_bucket(Bucket="versions")
    client.put_bucket_versioning(Bucket="versions", VersioningConfiguration={"Status": "Enabled"})
    report = by_title(examine_lake("s3://versions/x", s3_store.settings))
    assert report["versioning"].found.startswith("the bucket keeps replaced and removed objects")
    there = client.list_object_versions(Bucket="versions")
    assert not {"Versions", "DeleteMarkers"} & there.keys(), "it reads only"


@pytest.fixture(params=["azure", "google"])
def cloud(request: pytest.FixtureRequest) -> CloudStore:
    pytest.importorskip("obstore")
    store: CloudStore = request.getfixturevalue(f"{request.param}_store")
    return store


@pytest.fixture
def proxy(cloud: CloudStore) -> Iterator[Proxy]:
    with run_proxy(cloud.settings.endpoint or "") as between:
        yield between


def test_lake_in_cloud_is_examined_read_only(cloud: CloudStore) -> None:
    address = cloud.make_address()
    before = by_title(examine_lake(address, cloud.settings))
    assert before["listing"].found == f"{address}: it can be listed, and nothing has landed yet"
    assert (before["clock"].health, before["conditional writes"].health) == (Health.OK, Health.SKIPPED)
    assert before["rights"].found == "this user may read, write, remove below the lake"
    assert [*open_store(address, cloud.settings).list("")] == [], "it reads only"
    open_store(address, cloud.settings).put_if_absent("_sluice/orders/log/0.json", b"{}")
    after = examine_lake(address, cloud.settings)
    assert {d.health for d in after} == {Health.OK}


NAMES_IN_CLOUDS = [
    (r"^GET \S*(comp=list|list-type=)", "list", "storage.objects.list", "Storage Blob Data Reader"),
    (r"^GET \S+probe(/|%2F)[0-9a-f]+$", "read", "storage.objects.get", "Storage Blob Data Reader"),
    (r"^PUT ", "write", "storage.objects.create and storage.objects.delete", "Storage Blob Data Contributor"),
    (r"^(DELETE|POST .*comp=batch)", "remove", "storage.objects.delete", "Storage Blob Data Contributor"),
]


@pytest.mark.parametrize(("request_line", "right", "google", "azure"), NAMES_IN_CLOUDS)
def test_missing_cloud_permission_is_reported_by_name(
    cloud: CloudStore, proxy: Proxy, request_line: str, right: str, google: str, azure: str
) -> None:
    proxy.rules[:] = [Rule(request_line, "refuse", times=-1, status=403, code="AccessDenied")]
    report = examine_lake(cloud.make_address(), cloud.pass_through(proxy.endpoint).settings)
    (failed,) = (d for d in report if d.health is Health.FAILED)
    assert failed.title == f"right to {right}"
    assert (azure if cloud.scheme == "az" else google) in failed.remedy


@pytest.mark.parametrize(
    ("letters", "right"), [("rwd", "list"), ("wdl", "read"), ("rdl", "write"), ("rwl", "remove"), ("rcdl", "")]
)
def test_missing_sas_token_permission_is_reported(azure_store: CloudStore, letters: str, right: str) -> None:
    pytest.importorskip("obstore")
    report = by_title(examine_lake(azure_store.make_address(), azure_store.with_token(letters).settings))
    (missing,) = set("rwdl") - set(letters)
    assert report["SAS token"].found == f"it lacks {missing}"
    failed = {t for t, d in report.items() if d.health is Health.FAILED} - {"SAS token"}
    assert failed == ({f"right to {right}"} if right else set()), "the store itself agrees"
    if right:
        assert f"the letter {missing} of a SAS token" in report[f"right to {right}"].remedy


def test_expiry_of_sas_token_is_reported(azure_store: CloudStore) -> None:
    pytest.importorskip("obstore")
    fine = by_title(examine_lake(azure_store.make_address(), azure_store.with_token("rcwdl", 30 * 86_400).settings))
    assert fine["SAS token"].health is Health.OK
    assert fine["rights"].health is Health.OK
    soon = by_title(examine_lake(azure_store.make_address(), azure_store.with_token("rcwdl").settings))
    assert soon["SAS token"].health is Health.WARNING
    store = azure_store.with_token("rcwdl", -60)
    over = by_title(examine_lake(azure_store.make_address(), store.settings))
    assert over["SAS token"].found.startswith("it expired at")
    assert "expired at" in over["credentials"].found
    for report in (fine, soon, over):
        assert "sig=" not in repr(report)


def test_wrong_clock_is_reported_with_refused_requests(cloud: CloudStore, proxy: Proxy) -> None:
    proxy.rules[:] = [
        Rule("^GET /$", "skew", times=-1, seconds=-1200),
        Rule("comp=list|list-type", "refuse", times=-1, status=403, code="AuthenticationFailed"),
    ]
    report = by_title(examine_lake(cloud.make_address(), cloud.pass_through(proxy.endpoint).settings))
    assert (report["clock"].health, report["clock"].remedy) == (Health.FAILED, "set this machine's clock (NTP)")
    assert "20 min" in report["clock"].found
    assert report["credentials"].health is Health.FAILED


def test_missing_cloud_bucket_and_unreachable_store_are_reported(cloud: CloudStore) -> None:
    nowhere = examine_lake(f"{cloud.scheme}://nowhere/x", cloud.settings)
    (failed,) = (d for d in nowhere if d.health is Health.FAILED)
    assert failed.found == "there is no bucket or container nowhere"
    away = examine_lake(cloud.make_address(), cloud.pass_through("http://127.0.0.1:9").settings)
    (failed,) = (d for d in away if d.health is Health.FAILED)
    assert failed.title == "listing"


def test_azure_versioning_and_immutability_policy_are_reported(azure_store: CloudStore) -> None:
    pytest.importorskip("obstore")
    with run_proxy(azure_store.settings.endpoint or "") as proxy:
        store = azure_store.pass_through(proxy.endpoint)
        address = store.make_address()
        open_store(address, store.settings).put_if_absent("_sluice/orders/log/0.json", b"{}")
        headers = {"x-ms-version-id": "2026-11-26T00:00:00Z", "x-ms-immutability-policy-until-date": "soon"}
        proxy.rules[:] = [Rule("^GET .*sig=", "add", times=-1, headers=headers)]
        report = by_title(examine_lake(address, store.settings))
    assert report["versioning"].found.startswith("the container keeps")
    assert report["retention"].health is Health.FAILED
