"""The secured local Kafka: all clients are authenticated, all operations need a grant, and secrets stay private."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
from kafka import KafkaAdminClient
from kafka.errors import KafkaError, TopicAuthorizationFailedError

from sluice.pipelines.errors import KafkaUnavailable, SetupError
from sluice.pipelines.feed.rights import Operation, ResourceKind, Right
from sluice.resources.kafka.connection.zero_copy_transport import client_of
from sluice.resources.local.local_kafka import LocalKafka
from sluice.resources.local.secured import ADMIN, USER, USERS, Secured, grant


def _guard(cluster: LocalKafka) -> Secured:
    assert cluster.secured is not None
    return cluster.secured


def test_users_log_in_by_password_or_certificate_without_default_rights(secured: LocalKafka) -> None:
    by_certificate = _guard(secured).client(ADMIN, by_certificate=True)
    with KafkaAdminClient(bootstrap_servers=secured.certificate_bootstrap, **by_certificate) as admin:
        admin.create_topics({"closed": {"num_partitions": 1}}, wait_for_metadata=True)
    for address, login in (
        (secured.bootstrap, secured.client(USER)),
        (secured.certificate_bootstrap, _guard(secured).client(USER, by_certificate=True)),
    ):
        with KafkaAdminClient(bootstrap_servers=address, **login) as client:
            assert "closed" not in client.list_topics()
            with pytest.raises(TopicAuthorizationFailedError):
                client.create_topics({"mine": {"num_partitions": 1}})
    with KafkaAdminClient(bootstrap_servers=secured.bootstrap, **secured.client(ADMIN)) as admin:
        assert "closed" in admin.list_topics()


def test_no_listener_is_plaintext(secured: LocalKafka) -> None:
    for address in (secured.bootstrap, secured.certificate_bootstrap):
        with pytest.raises(KafkaError):
            client_of(KafkaAdminClient, bootstrap_servers=address, bootstrap_timeout_ms=1000)


def test_kafka_command_line_tools_log_in_with_the_client_file(secured: LocalKafka) -> None:
    tool = "org.apache.kafka.tools.AclCommand"
    for user, code in ((ADMIN, 0), (USER, 1)):
        config = ("--command-config", str(_guard(secured).java_properties(user)))
        process = secured.tool(tool, "--bootstrap-server", secured.bootstrap, *config, "--list")
        assert process.returncode == code, process.stderr


def test_secret_files_are_private_and_secrets_on_no_command_line(secured: LocalKafka) -> None:
    folder = _guard(secured).folder
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}
    pid = secured.status().brokers[0].pid
    visible = Path(f"/proc/{pid}/cmdline").read_bytes() + secured.status().brokers[0].log.read_bytes()
    for user in USERS:
        assert _guard(secured).password(user).encode() not in visible
        assert _guard(secured).password(user) not in repr(_guard(secured))
    assert not (folder / "scram.arguments").exists()


def test_acl_rejected_by_kafka_is_an_error(secured: LocalKafka) -> None:
    right = Right(Operation.DESCRIBE, ResourceKind.CLUSTER, "of-another-name", "")
    with pytest.raises(KafkaUnavailable, match=f"changing the rights of {USER}"):
        grant(secured, [right])


def test_cluster_cannot_change_between_secured_and_plain(secured: LocalKafka, kafka: LocalKafka) -> None:
    with pytest.raises(SetupError, match="is secured, and stays so"):
        LocalKafka(secured.status().root).start()
    with pytest.raises(SetupError, match="is not secured, and stays so"):
        LocalKafka(kafka.status().root, secure=True).start()
    assert LocalKafka.attach(secured.status().root).status().answering
