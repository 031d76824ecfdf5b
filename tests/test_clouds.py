"""Each block of docs/clouds.md, taken by its real client: kafka-python, boto3, PySpark, Confluent's. No network."""

from __future__ import annotations

import json
import os
import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
import yaml

from sluice.pipelines.errors import FeedError, NotAuthorized
from sluice.pipelines.feed.feed import Feed
from sluice.pipelines.feed.load import load_feed
from sluice.resources.kafka.connection.sasl import MskIam
from tests.test_docs import MINIMUM, SCHEMAS

PAGE = Path(__file__).parents[1] / "docs" / "clouds.md"
BLOCKS = dict(re.findall(r"^## ([^\n]+)\n(?:(?!^## ).)*?^```yaml\n(.*?)^```$", PAGE.read_text(), re.M | re.S))
JOBS = {
    cloud: json.loads(text)
    for cloud, text in re.findall(r"^## ([^\n]+)\n(?:(?!^## ).)*?^```json\n(.*?)^```$", PAGE.read_text(), re.M | re.S)
}
ENVIRONMENT = {
    **dict.fromkeys(("CONFLUENT_KEY", "REGISTRY_KEY", "HMAC_KEY"), "KEY"),
    **dict.fromkeys(("CONFLUENT_SECRET", "REGISTRY_SECRET", "HMAC_SECRET"), "SECRET"),
    "EVENTHUBS_CONNECTION": "Endpoint=sb://acme.servicebus.windows.net/;SharedAccessKeyName=listen;SharedAccessKey=x=",
}


def build_feed(cloud: str, folder: Path, **more: Any) -> Feed:
    keys = MINIMUM | yaml.safe_load(BLOCKS[cloud]) | more
    path = folder / "feeds" / "orders.yaml"
    path.parent.mkdir()
    path.write_text(yaml.safe_dump(keys))
    if "schema_file" in keys:
        (folder / "schemas").mkdir()
        (folder / keys["schema_file"]).write_text(SCHEMAS["avro"])
    return load_feed(path, ENVIRONMENT)


def test_every_section_has_a_block() -> None:
    assert [*BLOCKS] == re.findall(r"^## (.*)$", PAGE.read_text(), re.M)


LOGINS = {
    "Amazon MSK with IAM": b'"action":"kafka-cluster:Connect"',
    "Confluent Cloud": b"KEY\0KEY\0SECRET",
    "Azure Event Hubs": b"$ConnectionString\0$ConnectionString\0Endpoint=sb://acme.servicebus.windows.net/",
}


@pytest.mark.parametrize("cloud", LOGINS)
def test_kafka_python_builds_the_login(cloud: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from kafka.net.sasl import get_sasl_mechanism
    from kafka.net.selector import NetworkSelector

    from sluice.resources.kafka.connection.connection_settings import connecting
    from sluice.resources.kafka.connection.zero_copy_transport import Manager

    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "x")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-central-1")
    settings = connecting(build_feed(cloud, tmp_path).kafka, 1 << 20)
    net = NetworkSelector(client_id="test")
    try:
        config = Manager(net, **settings.options).config
    finally:
        net.close()
    host, _, _ = settings.bootstrap.partition(":")
    login = get_sasl_mechanism(config["sasl_mechanism"])(**{**config, "host": host})
    assert config["security_protocol"] == "SASL_SSL"
    assert LOGINS[cloud] in login.auth_bytes()


@pytest.mark.parametrize("session", ["", "a/session+token="])
def test_botocore_makes_the_same_signature(monkeypatch: pytest.MonkeyPatch, session: str) -> None:
    """MSK verifies what AWS's own library signs: a presigned GET of the action Connect."""
    from botocore import auth
    from botocore.awsrequest import AWSRequest
    from botocore.credentials import Credentials

    for name, value in {"ACCESS_KEY_ID": "AK/ID", "SECRET_ACCESS_KEY": "s+/=", "SESSION_TOKEN": session}.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-central-1")
    host = "b-1.orders.x1.c2.kafka.eu-central-1.amazonaws.com"
    login = json.loads(MskIam(host=host, security_protocol="SASL_SSL").auth_bytes())
    signed_at = datetime.strptime(login["x-amz-date"], "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC)
    monkeypatch.setattr(auth, "get_current_datetime", lambda *_: signed_at)
    credentials = Credentials("AK/ID", "s+/=", session or None)
    request = AWSRequest("GET", f"https://{host}/", params={"Action": "kafka-cluster:Connect"})
    auth.SigV4QueryAuth(credentials, "kafka-cluster", "eu-central-1", expires=900).add_auth(request)
    signed = {key.lower(): value for key, (value,) in parse_qs(urlsplit(request.url).query).items()}
    assert signed.pop("action") == login["action"]
    assert {key: value for key, value in login.items() if key.startswith("x-amz-")} == signed
    assert (login["host"], login["version"]) == (host, "2020_10_22")


@pytest.mark.parametrize(
    ("environment", "text"),
    [
        ({}, "there are no credentials of AWS"),
        ({"AWS_ACCESS_KEY_ID": "AKID", "AWS_SECRET_ACCESS_KEY": "SECRET"}, "AWS's settings name no region"),
        ({"AWS_PROFILE": "absent"}, "no credentials of AWS: ProfileNotFound"),
    ],
)
def test_missing_credentials_of_msk_are_an_error_with_a_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], text: str
) -> None:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    own = {"AWS_EC2_METADATA_DISABLED": "true", "AWS_CONFIG_FILE": str(tmp_path / "none")}
    for name, value in {**own, "AWS_SHARED_CREDENTIALS_FILE": str(tmp_path / "none"), **environment}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(NotAuthorized, match=text) as caught:
        MskIam(host="b-1", security_protocol="SASL_SSL").auth_bytes()
    assert "SECRET" not in str(caught.value).replace("AWS_SECRET", "")
    assert "aws sts get-caller-identity" in caught.value.remedy


def test_pyspark_accepts_a_databricks_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from pyspark.sql.connect.client import DefaultChannelBuilder

    monkeypatch.setenv("SPARK_CONNECT_AUTHENTICATE_TOKEN", "dapi-secret")
    spark = build_feed("Databricks", tmp_path).spark
    channel = DefaultChannelBuilder(spark.master)
    assert (channel.secure, channel.token, channel.endpoint) == (
        True,
        "dapi-secret",
        "dbc-1.cloud.databricks.com:443",
    )
    assert channel.metadata() == [("x-databricks-cluster-id", "0123-456789-abcdefgh")]


def test_a_token_in_the_master_is_refused(tmp_path: Path) -> None:
    """Every error of Spark names the master."""
    with pytest.raises(FeedError, match=r"spark\.master: has a token") as refused:
        build_feed("Databricks", tmp_path, spark={"master": "sc://host:443/;token=dapi-secret"})
    assert "dapi-secret" not in str(refused.value)
    assert "SPARK_CONNECT_AUTHENTICATE_TOKEN" in refused.value.remedy


@pytest.mark.parametrize("cloud", ["EMR", "Dataproc"])
def test_spark_accepts_the_settings(cloud: str, tmp_path: Path) -> None:
    from pyspark import SparkConf

    from sluice.resources.spark.executors import get_master, is_connect

    feed = build_feed(cloud, tmp_path)
    conf = SparkConf(loadDefaults=False).setMaster(get_master(feed.spark)).setAll([*feed.spark.conf.items()])
    assert conf.get("spark.master") == "yarn"
    assert not is_connect(feed.spark)
    assert {key: conf.get(key) for key in feed.spark.conf} == feed.spark.conf


LAKES = {
    **dict.fromkeys(("Amazon MSK with IAM", "EMR", "AWS Glue"), "https://acme-lake.s3.amazonaws.com/kafka"),
    "Dataproc": "https://storage.googleapis.com/acme-lake/kafka",
}


@pytest.mark.parametrize("cloud", LAKES)
def test_boto3_signs_requests_to_the_lake(cloud: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from sluice.pipelines.feed.stores import place
    from sluice.resources.lake.s3 import S3Client

    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "KEY")
    settings = build_feed(cloud, tmp_path).s3
    client = S3Client(place("s3://acme-lake"), settings).client
    url = client.generate_presigned_url("get_object", {"Bucket": "acme-lake", "Key": "kafka"})
    assert url.startswith(f"{LAKES[cloud]}?")
    assert client.meta.region_name == settings.region


def test_confluent_client_accepts_the_registry(tmp_path: Path) -> None:
    from confluent_kafka.schema_registry import SchemaRegistryClient

    registry = build_feed("Confluent Cloud", tmp_path).registry
    assert registry is not None
    user = f"{registry.username}:{registry.password}"
    SchemaRegistryClient({"url": registry.url, "basic.auth.user.info": user})


def test_glue_client_accepts_the_registry(tmp_path: Path) -> None:
    from sluice.resources.registry import client_of

    registry = build_feed("AWS Glue", tmp_path).registry
    assert registry is not None
    assert registry.glue == ("eu-central-1", "orders")
    assert type(client_of(registry)).__name__ == "GlueClient"


REQUESTS = {"AWS Glue": ("glue", "CreateJob"), "EMR": ("emr", "AddJobFlowSteps")}


@pytest.mark.parametrize("cloud", REQUESTS)
def test_botocore_accepts_the_job(cloud: str) -> None:
    import botocore.session
    from botocore.validate import ParamValidator

    service, operation = REQUESTS[cloud]
    shape = botocore.session.get_session().get_service_model(service).operation_model(operation).input_shape
    request = JOBS[cloud] if cloud == "AWS Glue" else {"JobFlowId": "j-1", "Steps": [JOBS[cloud]]}
    assert not (errors := ParamValidator().validate(request, shape)).has_errors(), errors.generate_report()


def test_every_job_is_tested() -> None:
    """tests/matrix checks the block of Databricks with its SDK."""
    assert {*JOBS} == {*REQUESTS, "Databricks"}
