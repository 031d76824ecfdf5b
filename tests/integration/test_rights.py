"""The least rights, on a real secured broker: a feed lands and commits with exactly the documented rights, and without
any one of them the error names that right and the command that grants it."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from kafka import KafkaProducer

from sluice.cli.main import main
from sluice.pipelines.errors import NotAuthorized, UnknownTopic
from sluice.pipelines.feed.feed import Feed
from sluice.pipelines.feed.load import load_feed
from sluice.pipelines.feed.rights import Grantee, NamePattern, Operation, ResourceKind, Right, rights_of
from sluice.resources.kafka.cluster.cluster import KafkaCluster
from sluice.resources.local.local_kafka import LocalKafka
from sluice.resources.local.secured import USER, grant, revoke
from tests.integration.support import commit_feed, run

pytestmark = pytest.mark.kafka
FreshTopic = Callable[..., str]


@pytest.fixture
def topic(secured: LocalKafka, fresh_topic: FreshTopic) -> str:
    name = fresh_topic(cluster=secured, name="rights")
    send(secured, name, 10)
    return name


def send(secured: LocalKafka, topic: str, count: int) -> None:
    with closing(KafkaProducer(bootstrap_servers=secured.bootstrap, acks="all", **secured.client())) as producer:
        for sent in [producer.send(topic, b'{"n": "bad"}' if n % 2 else b'{"n": 1}') for n in range(count)]:
            sent.get(timeout=60)


def write_feed(secured: LocalKafka, root: Path, topics: str, **lines: str) -> Feed:
    """Write the file of a feed of the user `sluice`, and load it as a user's feed is loaded."""
    assert secured.secured is not None
    path = root / "feeds" / "orders.yaml"
    path.parent.mkdir(exist_ok=True)
    section = "\n".join(secured.secured.section(secured.bootstrap, root))
    settings = {"topics": topics, "start": "earliest", "group": f"g-{root.name}", **lines}
    path.write_text(section + "\n" + "".join(f"{k}: {v}\n" for k, v in settings.items()))
    return load_feed(path, {})


@contextmanager
def grant_rights(secured: LocalKafka, rights: list[Right]) -> Iterator[None]:
    grant(secured, rights)
    try:
        yield
    finally:
        revoke(secured, rights)


def land_and_commit(feed: Feed) -> None:
    run(feed).check()
    commit_feed(feed)


@pytest.mark.parametrize("mode", ["transactional", "plain", "none"])
def test_documented_rights_suffice_and_missing_rights_are_named(
    secured: LocalKafka, tmp_path: Path, topic: str, mode: str
) -> None:
    feed = write_feed(secured, tmp_path, topic, commit=mode)
    needed = [r for r in rights_of(feed) if not r.optional]
    for missing in needed:
        with grant_rights(secured, [r for r in needed if r != missing]):
            expect_refusal(feed, missing, secured)
    with grant_rights(secured, needed):
        land_and_commit(feed)


def test_dead_letters_need_one_more_right(
    secured: LocalKafka, tmp_path: Path, topic: str, fresh_topic: FreshTopic
) -> None:
    letters = fresh_topic(cluster=secured, name="letters")
    lines = {"format": "json", "schema": "{n: int64}", "dead_letters": f"{{topic: {letters}}}"}
    feed = write_feed(secured, tmp_path, topic, policies="{quarantine_limit: {share: 1.0}}", **lines)
    needed = [r for r in rights_of(feed) if not r.optional]
    of_letters = Right(Operation.WRITE, ResourceKind.TOPIC, letters, needed[-1].need)
    assert needed[-1] == of_letters
    with grant_rights(secured, needed[:-1]):
        expect_refusal(feed, of_letters, secured)
    with grant_rights(secured, needed):
        land_and_commit(feed)


def expect_refusal(feed: Feed, missing: Right, secured: LocalKafka) -> None:
    with pytest.raises(NotAuthorized) as caught:
        land_and_commit(feed)
    (command,) = Grantee(f"User:{USER}", secured.bootstrap).commands([missing])
    assert f"grant {missing} to User:{USER}: {command}" in caught.value.remedy


def test_patterns_are_granted_by_their_prefix(secured: LocalKafka, tmp_path: Path, fresh_topic: FreshTopic) -> None:
    names = [fresh_topic(cluster=secured, name="wide.eu"), fresh_topic(cluster=secured, name="wide.us")]
    for name in names:
        send(secured, name, 4)
    feed = write_feed(secured, tmp_path, '{include: ["wide\\\\..*"]}')
    needed = [r for r in rights_of(feed) if not r.optional]
    assert (needed[0].name, needed[0].pattern) == ("wide.", NamePattern.PREFIXED)
    with grant_rights(secured, needed[1:]), pytest.raises(UnknownTopic, match="no topic matches"):
        run(feed)
    with grant_rights(secured, needed):
        land_and_commit(feed)


def test_optional_rights_are_needed_only_for_their_purpose(secured: LocalKafka, tmp_path: Path, topic: str) -> None:
    feed = write_feed(secured, tmp_path, topic)
    needed = [r for r in rights_of(feed) if not r.optional]
    optional = {(r.operation, r.kind): r for r in rights_of(feed) if r.optional}

    def probe_rights(*rights: Right) -> tuple[bool, bool, bool]:
        with grant_rights(secured, [*needed, *rights]), closing(KafkaCluster(feed.kafka)) as cluster:
            configs, (state,) = cluster.configs([topic]), cluster.partitions([topic], feed.isolation)
            return topic in configs.topics, configs.broker.offsets_retention is not None, state.log_bytes is not None

    assert probe_rights() == (False, False, False)
    assert probe_rights(optional[Operation.DESCRIBE_CONFIGS, ResourceKind.TOPIC]) == (True, False, False)
    assert probe_rights(optional[Operation.DESCRIBE_CONFIGS, ResourceKind.CLUSTER]) == (False, True, False)
    assert probe_rights(optional[Operation.DESCRIBE, ResourceKind.CLUSTER]) == (False, False, True)


def test_commands_grant_the_documented_rights(secured: LocalKafka, tmp_path: Path, topic: str) -> None:
    """The commands run as pasted in Kafka's own tool, with the configuration file of an administrator."""
    assert secured.secured is not None
    feed = write_feed(secured, tmp_path, topic)
    rights = rights_of(feed)
    admin = str(secured.secured.java_properties())
    for command in Grantee(f"User:{USER}", secured.bootstrap).commands(r for r in rights if not r.optional):
        words = [admin if word == "admin.properties" else word for word in shlex.split(command)]
        process = secured.tool("org.apache.kafka.tools.AclCommand", *words[1:])
        assert process.returncode == 0, process.stderr
    try:
        land_and_commit(feed)
    finally:
        revoke(secured, rights)


def test_acls_command_lists_the_same_rights(
    secured: LocalKafka, tmp_path: Path, topic: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    feed = write_feed(secured, tmp_path, topic)
    monkeypatch.chdir(tmp_path)
    assert main(["acls", "orders", "--json"]) == 0
    document = json.loads(capfd.readouterr().out)
    needed = [r for r in rights_of(feed) if not r.optional]
    assert document["commands"]["required"] == Grantee(f"User:{USER}", secured.bootstrap).commands(needed)
    assert [(r["operation"], r["name"]) for r in document["rights"]] == [(r.operation, r.name) for r in rights_of(feed)]
