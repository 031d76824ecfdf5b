"""Kerberos, on a real KDC and a real broker with ACLs: feeds land and commit by tickets; each misuse has its remedy."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from unittest.mock import patch

import pytest
from kafka import KafkaAdminClient, KafkaProducer

from sluice.cli.main import main
from sluice.pipelines.batch.land import land
from sluice.pipelines.errors import BatchIncomplete, NotAuthorized
from sluice.pipelines.feed.feed import Feed
from sluice.pipelines.feed.load import load_feed
from sluice.pipelines.feed.rights import grantee, rights_of
from sluice.pipelines.model.receipts import ENGINE, Outcome, TaskTraffic
from sluice.pipelines.ports import Job
from sluice.resources.liveness import new_owner
from sluice.resources.local.local_kafka import LocalKafka
from sluice.resources.local.secured import Secured, SecuredNode, grant
from sluice.resources.spark import executor
from tests.integration.support import CATCH_UP, InlineEngine, open_inline_ports, read_rows
from tests.kerberos import REALM, Realm, find_faketime, open_realm, require_kerberos
from tests.resources.kafka.tools import free_port, wait_until

pytestmark = pytest.mark.kafka
JAAS = "com.sun.security.auth.module.Krb5LoginModule"
USER, BROKER = "ingest", "kafka/127.0.0.1"
RECORDS = 200


@pytest.fixture(scope="module")
def realm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Realm]:
    require_kerberos()
    with open_realm(tmp_path_factory.mktemp("realm")) as running, pytest.MonkeyPatch.context() as patched:
        running.add(BROKER)
        running.add(USER)
        for name, value in running.variables.items():
            patched.setenv(name, value)
        yield running


@pytest.fixture(scope="module")
def addresses() -> dict[str, str]:
    """The broker's address for each security protocol."""
    return {"SASL_PLAINTEXT": f"127.0.0.1:{free_port()}"}


@pytest.fixture(scope="module")
def kerberos_broker(
    realm: Realm, addresses: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LocalKafka]:
    """A broker that takes tickets with and without TLS."""
    keytab = realm.folder / "kafka.keytab"
    login = f'{JAAS} required useKeyTab=true storeKey=true keyTab="{keytab}" principal="{BROKER}@{REALM}";'
    settings = {"sasl.kerberos.service.name": "kafka"}
    for listener, mechanisms in {"sasl_ssl": "SCRAM-SHA-512,GSSAPI", "sasl_plaintext": "GSSAPI"}.items():
        settings[f"listener.name.{listener}.sasl.enabled.mechanisms"] = mechanisms
        settings[f"listener.name.{listener}.gssapi.sasl.jaas.config"] = login
    original = Secured.listeners

    def add_listener(self: Secured, node: SecuredNode) -> dict[str, str]:
        listeners = original(self, node)
        for name in ("listeners", "advertised.listeners"):
            listeners[name] += f",SASL_PLAINTEXT://{addresses['SASL_PLAINTEXT']}"
        listeners["listener.security.protocol.map"] += ",SASL_PLAINTEXT:SASL_PLAINTEXT"
        return listeners

    root = tmp_path_factory.mktemp("kerberized")
    with patch.object(Secured, "listeners", add_listener), pytest.MonkeyPatch.context() as patched:
        patched.setenv("JDK_JAVA_OPTIONS", f"-Djava.security.krb5.conf={realm.configuration}")
        with LocalKafka(root, keep=False, secure=True, settings=settings) as cluster:
            addresses["SASL_SSL"] = cluster.bootstrap
            yield cluster


@pytest.fixture
def tickets(realm: Realm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file in which this process and its tasks look for tickets; there is none yet."""
    path = tmp_path / "tickets"
    monkeypatch.setenv("KRB5CCNAME", f"FILE:{path}")
    return path


@dataclass
class Project:
    """A project folder with feeds that log in by tickets."""

    root: Path
    kafka: LocalKafka
    addresses: Mapping[str, str]
    topic: str

    def write_feed(self, protocol: str = "SASL_PLAINTEXT", engine: str = "processes", **login: str) -> Feed:
        """Write the file of the feed `orders`, and grant its user the required rights."""
        assert self.kafka.secured
        section = {"bootstrap": self.addresses[protocol], "security_protocol": protocol, "sasl_mechanism": "GSSAPI"}
        if protocol == "SASL_SSL":
            section["ssl_cafile"] = str(self.kafka.secured.ca)
        lines = {"kafka": json.dumps(section | login), "topics": self.topic, "start": "earliest", "engine": engine}
        lines |= {"group": f"g-{self.topic}", "limits": "{slice_bytes: 8KiB, task_bytes: 8KiB}"}
        path = self.root / "feeds" / "orders.yaml"
        path.parent.mkdir(exist_ok=True)
        path.write_text("".join(f"{k}: {v}\n" for k, v in lines.items()))
        feed = load_feed(path, {})
        grant(self.kafka, [r for r in rights_of(feed) if not r.optional], USER)
        return feed

    def run(self, *command: str) -> int:
        """Run a command of the CLI on this project; `run` without Dagster."""
        more = ["--no-dagster"] if command[0] == "run" else []
        return main([*command, *more, "--project", str(self.root)])


@pytest.fixture
def project(
    kerberos_broker: LocalKafka, addresses: dict[str, str], tmp_path: Path, fresh_topic: Callable[..., str]
) -> Project:
    topic = fresh_topic(partitions=2, cluster=kerberos_broker, name="kerberized")
    with closing(
        KafkaProducer(bootstrap_servers=kerberos_broker.bootstrap, linger_ms=20, **kerberos_broker.client())
    ) as sender:
        for n in range(RECORDS):
            sender.send(topic, b"%d" % n, partition=n % 2)
        sender.flush()
    return Project(tmp_path, kerberos_broker, addresses, topic)


def check_all_landed(project: Project, feed: Feed) -> None:
    assert sorted(int(row["value"]) for row in read_rows(feed)) == list(range(RECORDS))
    with KafkaAdminClient(bootstrap_servers=project.kafka.bootstrap, **project.kafka.client()) as admin:
        committed = admin.list_group_offsets(feed.group)[feed.group]
    assert [o.offset for o in committed.values()] == [RECORDS // 2] * 2


@pytest.mark.parametrize(
    ("protocol", "engine"),
    [
        ("SASL_PLAINTEXT", "processes"),
        ("SASL_SSL", "processes"),
        pytest.param("SASL_SSL", "spark", marks=[pytest.mark.spark, pytest.mark.slow]),
    ],
)
def test_feed_lands_and_commits_by_a_ticket(
    project: Project, realm: Realm, tickets: Path, monkeypatch: pytest.MonkeyPatch, protocol: str, engine: str
) -> None:
    monkeypatch.delenv(ENGINE)
    realm.get_ticket(USER, tickets)
    feed = project.write_feed(protocol, engine)
    assert project.run("run", "orders") == 0
    check_all_landed(project, feed)
    assert project.run("doctor", "orders") == 0
    assert f"User:{USER}" in "".join(grantee(feed.kafka).commands(rights_of(feed)))
    assert not [p for p in project.root.rglob("*") if p.is_file() and b".keytab" in p.read_bytes()]


def test_keytab_gives_tickets_without_kinit(project: Project, realm: Realm, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each process gets its own, in memory."""
    monkeypatch.setenv("KRB5CCNAME", "MEMORY:sluice")
    feed = project.write_feed()
    assert project.run("run", "orders") != 0
    monkeypatch.setenv("KRB5_CLIENT_KTNAME", str(realm.folder / f"{USER}.keytab"))
    assert project.run("run", "orders") == 0
    check_all_landed(project, feed)


class Expiring(InlineEngine):
    """An engine whose ticket expires after the first offset range; `renew` is the remedy of an operator."""

    def __init__(self, expired: Path, tickets: Path, renew: Callable[[], None]) -> None:
        self._expired, self._tickets, self._renew = expired, tickets, renew
        self.offset_ranges = 0

    def run(self, job: Job, tasks: Sequence[int]) -> list[Outcome]:
        work, outcomes = executor.TaskWork.of(job, tasks, tries=1), []
        for row in executor.run(work, range(len(work.queues))):
            if isinstance(sent := executor.sent_in(*row), TaskTraffic):
                continue
            outcomes.append(sent)
            self.offset_ranges += 1
            if self.offset_ranges == 1:
                shutil.copyfile(self._expired, self._tickets)
                self._renew()
        return outcomes


@pytest.mark.parametrize("renewed", [True, False])
def test_ticket_expires_during_a_landing(project: Project, realm: Realm, tickets: Path, renewed: bool) -> None:
    """Later connections need a valid ticket: the landing goes on with the new one, or the next run lands the rest."""
    expired = tickets.with_name("expired")
    realm.get_ticket(USER, expired, "-l", "1s")
    wait_until(lambda: not realm.has_ticket(expired))
    realm.get_ticket(USER, tickets)
    feed = project.write_feed()
    engine = Expiring(expired, tickets, lambda: realm.get_ticket(USER, tickets) if renewed else None)
    with open_inline_ports(feed) as ports:
        landed = land(feed, replace(ports, engine=engine), CATCH_UP, new_owner("test"), lambda progress: None)
    if renewed:
        landed.check()
        assert engine.offset_ranges > 1
    else:
        with pytest.raises(BatchIncomplete, match=r"Ticket expired|context has expired") as caught:
            landed.check()
        assert "kinit -k -t KEYTAB PRINCIPAL" in caught.value.remedy
        realm.get_ticket(USER, tickets)
    assert project.run("run", "orders") == 0
    check_all_landed(project, feed)


@pytest.mark.parametrize(
    ("fault", "login", "text", "remedy"),
    [
        ("no ticket", {}, "No Kerberos credentials available", "kinit -k -t KEYTAB PRINCIPAL"),
        ("broken tickets", {}, "Credential cache is empty", "kinit -k -t KEYTAB PRINCIPAL"),
        ("", {"sasl_kerberos_service_name": "other"}, "Server other/127.0.0.1@SLUICE.TEST", "klist -k KEYTAB"),
        ("", {"sasl_kerberos_domain_name": "elsewhere"}, "Server kafka/elsewhere@SLUICE.TEST", "klist -k KEYTAB"),
        ("no KDC", {}, "Cannot contact any KDC for realm 'SLUICE.TEST'", "start the KDC"),
        ("no realm", {}, 'Cannot find KDC for realm "SLUICE.TEST"', "KRB5_CONFIG"),
        ("no package", {}, "gssapi is not installed", "pip install 'kafka-sluice[kerberos]'"),
    ],
)
def test_each_misuse_names_the_command_to_type(
    project: Project,
    realm: Realm,
    tickets: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    fault: str,
    login: dict[str, str],
    text: str,
    remedy: str,
) -> None:
    project.write_feed(**login)
    with monkeypatch.context() as wrong:
        if fault != "no ticket":
            realm.get_ticket(USER, tickets)
        if fault == "broken tickets":
            tickets.write_bytes(tickets.read_bytes()[:100])
        elif fault == "no KDC":
            broken = realm.configuration.read_text().replace(f":{realm.port}", ":1")
            (project.root / "krb5.conf").write_text(broken)
            wrong.setenv("KRB5_CONFIG", str(project.root / "krb5.conf"))
        elif fault == "no realm":
            wrong.setenv("KRB5_CONFIG", str(project.root / "no-such-file"))
        elif fault == "no package":
            wrong.setitem(sys.modules, "gssapi", None)
            wrong.delitem(sys.modules, "gssapi.exceptions", raising=False)
        assert project.run("run", "orders") != 0
        assert project.run("doctor", "orders") != 0
    printed = " ".join("".join(capfd.readouterr()).split())
    assert printed.count(text) >= 2
    assert printed.count(remedy) >= 2
    assert "Traceback" not in printed
    assert "unforeseen" not in printed
    assert ".keytab" not in printed
    realm.get_ticket(USER, tickets)
    feed = project.write_feed()  # as the remedy says
    assert project.run("run", "orders") == 0
    check_all_landed(project, feed)


def test_broker_with_another_key_is_reported(project: Project, realm: Realm, tickets: Path) -> None:
    """The KDC's key of the broker changed, and the broker's keytab did not."""
    feed = project.write_feed()
    realm.run("kadmin.local", "-q", f"cpw -randkey {BROKER}@{REALM}")
    realm.get_ticket(USER, tickets)
    with pytest.raises(NotAuthorized, match="SASL_AUTHENTICATION_FAILED") as caught, open_inline_ports(feed) as ports:
        ports.cluster.cluster_id()
    assert "kvno SERVICE/HOST" in caught.value.remedy
    assert "klist -k KEYTAB" in caught.value.remedy
    assert "password" not in caught.value.remedy
    realm.run("kadmin.local", "-q", f"ktadd -k {realm.folder / 'kafka.keytab'} {BROKER}@{REALM}")
    realm.get_ticket(USER, tickets)
    assert project.run("run", "orders") == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shift", "server", "text"),
    [
        ("+20m", "the KDC", "Clock skew too great"),
        ("-20m", "the KDC", "Clock skew too great"),
        ("+20m", "the broker", "SASL_AUTHENTICATION_FAILED"),
        ("-20m", "nobody", "Ticket not yet valid"),
    ],
)
def test_wrong_clock_is_reported(
    project: Project, realm: Realm, tickets: Path, shift: str, server: str, text: str
) -> None:
    """The KDC notices, unless the ticket for the broker is there: `server` does."""
    library = find_faketime()
    project.write_feed()
    realm.get_ticket(USER, tickets)
    if server != "the KDC":
        realm.run("kvno", BROKER, tickets=tickets)
    done = subprocess.run(
        [f"{Path(sys.executable).parent}/sluice", "run", "orders", "--no-dagster", "--project", str(project.root)],
        env={**os.environ, "LD_PRELOAD": library, "FAKETIME": shift},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
        check=False,
    )
    printed = " ".join(done.stdout.split())
    assert done.returncode == 1, printed
    assert text in printed
    assert "(timedatectl)" in printed
    assert "Traceback" not in printed
