"""A canary in every secret of a feed, from the environment and from files: no output and no command line shows it.

The commands cover invalid feed files, a feed whose Kafka refuses the password, and a feed that lands in a store by real
Spark tasks with an event log, with a quarantine, a report and a replay; all with debug logs.
"""

from __future__ import annotations

import base64
import json
import os
import sqlite3
import subprocess
import sys
import threading
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import parse_qs, quote

import pytest

from sluice.pipelines.feed.load import load_feed
from sluice.resources.lake import open_lake
from sluice.resources.local.local_kafka import LocalKafka
from tests.clouds import CloudStore, sign_token
from tests.integration.canaries import find_canaries, read_everything
from tests.resources.kafka.tools import open_producer
from tests.stores import Store

pytestmark = pytest.mark.usefixtures("default_engine")

CANARIES = {
    "CANARY_KAFKA": "canary-kafka-Xq7/rT+2",
    "CANARY_S3": "canary-s3-Mz4/wK+9",
    "CANARY_TOKEN": "canary-token-Bv8/nH+1",
    "CANARY_SPARK": "canary-spark-Gd5/yL+6",
    "CANARY_OAUTH": "canary-oauth-Pn2/cF+8",
    "CANARY_REGISTRY": "canary-registry-Ts6/mD+3",
    "CANARY_CATALOG": "canary-catalog-Jw3pN8",
    "CANARY_ACCOUNT": "canaryaccount/Kq7+rT2Xyz",
    "CANARY_NOTIFY": "canary-notify-Vb9/xC+4",
}
IN_FILES = {
    "kafka": "canary-file-kafka-Hs2/bN+7",
    "s3": "canary-file-s3-Lk6/pV+3",
    "spark": "canary-file-spark-Wd1/jC+5",
    "plain": "canary-file-plain-Zr8/mQ+4",
}
"""Canaries by the name of their file in the project's folder of secrets. Fields that are not secret use `plain`."""
SECRETS = "secrets"
AVRO = '{"type": "record", "name": "Order", "fields": [{"name": "id", "type": "int"}]}'
KNOWN_CONTENT = {
    "/log/0": b"quarantined",
    ".parquet": b"sluice.plan_hash",
    "reports/": b"<table",
    "report.html": b"<table",
    "runs.db snapshots": b"catch_up",
    ".db": b"ASSET_MATERIALIZATION",
    "compute_logs": b"",
    ".err": b"",
    "events/": b"SparkListenerTaskEnd",
    "/cmdline": b"java",
    "stderr": b"wrong.yaml",
}
"""Places that could hold a canary, each with a text that it certainly holds: proof that the search reads it."""
ORDERS = """
kafka: {bootstrap: '%s'}
topics: '%s'
start: earliest
format: json
schema: {id: int32 not null, name: string}
%s
landing: {compression: none}
policies: {quarantine_limit: {share: 1}}
spark:
  master: local[1,3]
  conf:
    spark.hadoop.fs.s3a.secret.key: "${CANARY_SPARK}"
    spark.my.password: "${file:secrets/spark}"
    spark.eventLog.enabled: true
    spark.eventLog.compress: false
    spark.eventLog.dir: '%s'
"""
S3 = """
lake: %s
s3: {endpoint: '%s', region: '%s', access_key_id: visible, secret_access_key: "${file:secrets/s3}",
     session_token: "${CANARY_TOKEN}"}
"""
AZURE = """
lake: %s
azure: {endpoint: '%s', account: devstoreaccount1, sas_token: "${file:secrets/azure}"}
"""
GOOGLE = """
lake: %s
gcs: {endpoint: '%s', token: "${CANARY_TOKEN}"}
"""
LOCKED = """
kafka:
  bootstrap: '%s'
  bootstrap_timeout_ms: 1000
  security_protocol: SASL_PLAINTEXT
  sasl_mechanism: PLAIN
  sasl_plain_username: reader
  sasl_plain_password: "${CANARY_KAFKA}"
topics: orders
start: earliest
"""
MOUNTED = """
kafka:
  bootstrap: '%s'
  bootstrap_timeout_ms: 1000
  security_protocol: SASL_SSL
  sasl_mechanism: PLAIN
  sasl_plain_username: reader
  sasl_plain_password: "${file:secrets/kafka}"
  ssl_password: "${file:secrets/kafka}"
  proxy_url: "socks5://reader:${file:secrets/kafka}@127.0.0.1:9"
topics: orders
start: earliest
lake: s3://bucket
s3: {endpoint: "http://127.0.0.1:9", retries: 1, access_key_id: "${file:secrets/s3}",
     secret_access_key: "${file:secrets/s3}", session_token: "${file:secrets/s3}"}
spark: {conf: {spark.my.password: "${file:secrets/spark}"}}
"""
REMOTE = """
kafka:
  bootstrap: '%s'
  bootstrap_timeout_ms: 1000
  security_protocol: SASL_PLAINTEXT
  sasl_mechanism: OAUTHBEARER
  sasl_oauth_token_endpoint: http://127.0.0.1:9/token
  sasl_oauth_client_id: ingest
  sasl_oauth_client_secret: "${CANARY_OAUTH}"
topics: orders
start: earliest
format: avro
schema_file: order.avsc
"""
REMOTES = {
    "login": 'registry: {url: "http://127.0.0.1:9", username: reader, password: "${CANARY_REGISTRY}"}',
    "google": 'lake: gs://bucket\ngcs: {endpoint: "http://127.0.0.1:9", token: "${CANARY_TOKEN}", retries: 1}',
    "azure": "lake: az://container\n"
    'azure: {endpoint: "http://127.0.0.1:9", account: devstoreaccount1, account_key: "${CANARY_ACCOUNT}", retries: 1}',
    "rest": 'registry: {url: "http://127.0.0.1:9", token: "${CANARY_REGISTRY}"}\n'
    'table: {iceberg: {name: db.x, catalog: {type: rest, uri: "http://127.0.0.1:9", token: "${CANARY_CATALOG}",'
    ' credential: "reader:${CANARY_CATALOG}"}}}',
    "sql": "table: {iceberg: {name: db.x, catalog: {type: sql,"
    ' uri: "postgresql+psycopg2://reader:${CANARY_CATALOG}@127.0.0.1:9/x"}}}',
}
"""More sections of feeds, with addresses that do not answer."""
NOTIFY = """
webhook: "https://127.0.0.1:9/${CANARY_NOTIFY}"
email: {server: 127.0.0.1, user: a, password: "${CANARY_NOTIFY}", sender: a@example.com, to: [b@example.com]}
"""
WRONG_TOO = """
kafka: {bootstrap: "${file:secrets/plain}", security_protocol: "${file:secrets/plain}"}
topics: ["${file:secrets/plain}"]
start: "${file:secrets/plain}"
lake: "s3://${file:secrets/plain}"
s3: {endpoint: "${file:secrets/plain}", retries: "${file:secrets/plain}"}
spark: {conf: {spark.shown: "${file:secrets/plain}"}}
"""
WRONG = """
kafka: {bootstrap: "${CANARY_KAFKA}", sasl_plain_password: "${CANARY_KAFKA}", security_protocol: "${CANARY_KAFKA}"}
topics: ["${CANARY_S3}"]
start: "${CANARY_TOKEN}"
lake: "s3://${CANARY_S3}"
s3: {endpoint: "${CANARY_S3}", retries: "${CANARY_S3}", secret_access_key: "${CANARY_S3}"}
spark: {conf: "${CANARY_SPARK}"}
"${CANARY_KAFKA}": 1
"""
DAY = [
    ["feeds", "list", "--debug"],
    ["feeds", "list", "--json"],
    ["feeds", "check"],
    ["doctor", "--debug", "--json"],
    ["run", "wrong", "--json"],
    ["run", "locked", "--debug", "--json"],
    ["run", "locked_too", "--debug"],
    ["run", "mounted", "--debug", "--json"],
    ["plan", "mounted", "--debug"],
    ["run", "wrong_too", "--json"],
    ["run", "login", "--debug", "--json"],
    ["schema", "pull", "login", "--debug"],
    ["schema", "pull", "rest", "--debug", "--json"],
    ["status", "--debug"],
    ["table", "status", "rest", "--debug"],
    ["table", "status", "sql", "--debug", "--json"],
    ["run", "orders", "--debug"],
    ["quarantine", "replay", "orders", "--debug"],
    ["report", "orders", "--output", "report.html"],
    ["audit", "orders", "--rescan", "--debug", "--json"],
]
SCRIPT = """
import json, sys
from sluice.cli.main import main
print(json.dumps([main(a) for a in json.loads(sys.argv[1])]))
"""
CONTRACT = {
    "name": "orders",
    "expectations": [
        {
            "type": "expect_column_values_to_be_between",
            "kwargs": {"column": "id", "min_value": 0},
            "severity": "warning",
        }
    ],
    "meta": {"great_expectations_version": "1.24.1"},
}


def build_s3(request: pytest.FixtureRequest, _: pytest.MonkeyPatch) -> str:
    store: Store = request.getfixturevalue("s3_store")
    if not store.local:
        pytest.skip("a real store takes no made-up keys")
    return S3 % (store.make_address(), store.settings.endpoint, store.settings.region)


def build_azure(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Build the section with a real SAS token, whose signature is a canary, too."""
    store: CloudStore = request.getfixturevalue("azure_store")
    token = sign_token("rcwdl")
    monkeypatch.setitem(IN_FILES, "azure", token)
    monkeypatch.setitem(IN_FILES, "signature", parse_qs(token)["sig"][0])
    return AZURE % (store.make_address(), store.settings.endpoint)


def build_google(request: pytest.FixtureRequest, _: pytest.MonkeyPatch) -> str:
    store: CloudStore = request.getfixturevalue("google_store")
    return GOOGLE % (store.make_address(), store.settings.endpoint)


@pytest.fixture(params=[build_s3, build_azure, build_google], ids=["s3", "azure", "google"])
def project(
    tmp_path: Path,
    kafka: LocalKafka,
    fresh_topic: Callable[..., str],
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> Path:
    topic, lake = fresh_topic(), request.param(request, monkeypatch)
    with open_producer(kafka) as producer:
        for value in (b'{"id": -1, "name": "a"}', b'{"id": 2}', b"no json"):
            producer.send(topic, value)
    feeds = tmp_path / "project" / "feeds"
    feeds.mkdir(parents=True)
    events = tmp_path / "scratch" / "events"
    events.mkdir(parents=True)
    texts = {
        "orders": ORDERS % (kafka.bootstrap, topic, lake, events),
        "locked": LOCKED % kafka.bootstrap,
        "locked_too": LOCKED.replace("${CANARY_KAFKA}", "${file:secrets/kafka}") % kafka.bootstrap,
        "mounted": MOUNTED % kafka.bootstrap,
        "wrong": WRONG,
        "wrong_too": WRONG_TOO,
    } | {name: REMOTE % kafka.bootstrap + more for name, more in REMOTES.items()}
    for name, text in texts.items():
        (feeds / f"{name}.yaml").write_text(text)
    (feeds.parent / "order.avsc").write_text(AVRO)
    (feeds.parent / "notify.yaml").write_text(NOTIFY)
    secrets = feeds.parent / SECRETS
    secrets.mkdir()
    for name, secret in IN_FILES.items():
        (secrets / name).write_text(f"{secret}\n")
    (feeds / "orders.contract.json").write_text(json.dumps(CONTRACT))
    return feeds.parent


@pytest.mark.spark
def test_no_output_contains_a_secret(project: Path, tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    env = os.environ | CANARIES | {"TMPDIR": str(scratch), "SPARK_LOCAL_DIRS": str(scratch)}
    for name in ("SLUICE_PROJECT", "KAFKA_BOOTSTRAP", "DAGSTER_HOME"):
        env.pop(name, None)
    command = [sys.executable, "-c", SCRIPT, json.dumps(DAY)]
    with _record_command_lines() as command_lines:
        process = subprocess.run(command, cwd=project, env=env, capture_output=True, check=False)
    assert process.returncode == 0, process.stderr.decode()[-3000:]
    codes = dict(zip(map(" ".join, DAY), json.loads(process.stdout.splitlines()[-1]), strict=True))
    assert codes["run orders --debug"] == 0, process.stderr.decode()[-3000:]
    assert codes["audit orders --rescan --debug --json"] == 0
    assert (codes["run wrong --json"], codes["run locked --debug --json"]) == (2, 1)
    assert (codes["run wrong_too --json"], codes["run locked_too --debug"]) == (2, 1)
    assert codes["run mounted --debug --json"] == 2, "the secret in the file is not valid in a proxy's address"

    outputs = [("stdout", process.stdout), ("stderr", process.stderr)]
    contents = [*_read_everything(project, scratch), *outputs, *(("/proc/0/cmdline", line) for line in command_lines)]
    assert find_canaries(contents, _encode_forms()) == set()
    for kind, text in KNOWN_CONTENT.items():
        assert any(kind in name and text in data for name, data in contents), f"the search did not read {kind}"


def test_search_detects_a_canary(tmp_path: Path) -> None:
    secret = CANARIES["CANARY_S3"]
    with sqlite3.connect(tmp_path / "a.db") as db:
        db.execute("create table t (x blob, y text)")
        db.execute("insert into t values (?, ?)", (zlib.compress(f"so {secret} it is".encode()), "nothing"))
    (tmp_path / "b").write_text(json.dumps({"a": secret}))
    (tmp_path / "c").write_text(base64.b64encode(secret.encode()).decode())
    (tmp_path / "d").write_text(quote(secret, safe=""))
    assert len(find_canaries(read_everything(tmp_path), _encode_forms())) == 4


# -- search


@contextmanager
def _record_command_lines() -> Iterator[set[bytes]]:
    """Collect the command lines of all processes that exist while the block runs."""
    command_lines: set[bytes] = set()
    finished = threading.Event()

    def watch() -> None:
        while not finished.wait(0.2):
            for path in Path("/proc").glob("[0-9]*/cmdline"):
                with suppress(OSError):
                    command_lines.add(path.read_bytes())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield command_lines
    finally:
        finished.set()
        watcher.join()


def _encode_forms() -> Iterator[bytes]:
    for secret in (*CANARIES.values(), *IN_FILES.values()):
        yield from (text.encode() for text in (secret, quote(secret), quote(secret, safe=""), json.dumps(secret)[1:-1]))
        yield base64.b64encode(secret.encode())


def _read_everything(project: Path, scratch: Path) -> Iterator[tuple[str, bytes]]:
    """Read all that the commands wrote: the project with Dagster's home and logs, the lake, and scratch files."""
    yield from (file for file in read_everything(project) if Path(file[0]).parent != project / SECRETS)
    yield from read_everything(scratch)
    lake = open_lake(load_feed(project / "feeds" / "orders.yaml", CANARIES))
    yield from ((path, lake.get(path) or b"") for path in lake.list(""))
