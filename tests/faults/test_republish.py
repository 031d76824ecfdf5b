"""A republish under faults: brokers die, leaders move, rights and disk space are lost, runs die, sleep and compete.

Kafka's console consumer reads the old topic and the new one, and the map must agree with both.
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from kafka import KafkaProducer
from kafka.admin import ACL, ACLOperation, ACLPermissionType, ResourcePattern, ResourceType
from kafka.errors import KafkaConnectionError

from sluice.pipelines.errors import CommitFenced, KafkaUnavailable, NotAuthorized, UsageError
from tests.checker import tools, way_back
from tests.checker.facts import read_lines, read_logs
from tests.faults.account import SEED, Account
from tests.faults.arena import GROUP, TRANSACTION, Arena, compute_partition, run_arena
from tests.faults.field import TRIES, Field, Run, Running
from tests.faults.nemeses import brokers, expect_clean_or_retryable, shorten_timeouts
from tests.faults.nemeses.answers import APIS, lose_answers
from tests.faults.nemeses.engines import Processes
from tests.faults.nemeses.lakes import fill_file_system, mount_tmpfs
from tests.faults.nemeses.logs import configure_topic
from tests.faults.runner import ForkedRun
from tests.integration import republish_cut
from tests.integration.support import SLUICE
from tests.resources.kafka.tools import wait_until

pytestmark = pytest.mark.faults
ROWS, PARTITIONS, STAMP = 2400, 3, 1_700_000_000_000
LANE = ROWS // PARTITIONS - 100
"""Offsets of a lane in tests with one lane for each old partition."""
MIDWAY = 2
"""Transactions that have ended before a fault begins."""
_numbers = itertools.count(1)


@dataclass
class Republish:
    """A republish of a feed's landed rows to another topic. Transactions have about a hundred rows."""

    field: Field
    target: Field
    keeps_partitions: bool
    lane_offsets: int

    @classmethod
    def prepare(cls, field: Field, lane_offsets: int = 250_000, more: int = 0, replicas: int = 3) -> Republish:
        """Land rows, each with `more` additional bytes, and create an empty target.

        The seed decides whether the republish keeps partitions.
        """
        _produce_rows(field, more)
        field.run_baseline(1)
        keeps_partitions = random.Random(f"{SEED} {field.topic}").random() < 0.5
        topic = f"{field.topic}-again"
        field.arena.create(topic, PARTITIONS if keeps_partitions else 2, first=next(_numbers), replicas=replicas)
        field.account.log(
            f"{ROWS:,} rows landed; they go to {topic}, {'as they lay' if keeps_partitions else 'by their keys'}"
        )
        return cls(field, replace(field, topic=topic), keeps_partitions, lane_offsets)

    @property
    def name(self) -> str:
        """The transactional id and the group of the marks."""
        return f"sluice-republish-{self.field.name}-again"

    @property
    def arguments(self) -> list[str]:
        ranges = [w for p in range(PARTITIONS) for w in ("--offsets", f"{self.field.topic}:{p}:0-{self._end(p)}")]
        arguments = ["republish", self.field.name, "--topic", self.target.topic, *ranges, "--id", "again", "--yes"]
        arguments += ["--keep-timestamps", "--json", "--project", str(self.field.root)]
        return [*arguments, "--keep-partitions"] if self.keeps_partitions else arguments

    @staticmethod
    def _end(partition: int) -> int:
        """Returns the end of the requested range, which leaves out some of the last offsets."""
        return ROWS // PARTITIONS - partition

    # -- runs

    def start(self, step: str = "sent", times: int = 0) -> Running:
        """Start a run that dies after it did the step `times` times; 0: never."""
        self.field.write_feed()
        self.field.runs += 1
        out = self.field.root / f"run-{self.field.runs}.out"
        arguments = [step, str(times), str(self.lane_offsets), *self.arguments, "--here"]
        return Running(ForkedRun(arguments, out, self.field.environment, republish_cut.main), out)

    def start_whole(self) -> Running:
        """Start a run with transactions of the default size."""
        self.field.write_feed()
        self.field.runs += 1
        return Running.spawn([*SLUICE, *self.arguments, "--here"], self.field.root / f"run-{self.field.runs}.out")

    def start_with_spark(self, environment: dict[str, str]) -> Running:
        """Start a run with lanes in Spark's tasks, each in one transaction."""
        self.field.write_feed()
        self.field.runs += 1
        command = [sys.executable, "-m", "tests.integration.republish_cut", "sent", "0", str(self.lane_offsets)]
        return Running.spawn([*command, *self.arguments], self.field.root / f"run-{self.field.runs}.out", environment)

    def wait_for_run(self, running: Running, about: str = "a republish") -> Run:
        run = running.wait(300)
        account = self.field.account
        account.count("runs")
        account.count("clean runs" if run.clean else "runs killed" if run.code in KILLED else "runs failed")
        account.log(f"{about}: {_summarize(run)}")
        return run

    @contextmanager
    def hold_at(self, api: str, *brokers: int) -> Iterator[Running]:
        """Start a run and hold its requests of this kind inside the block. Yields the run.

        It has ended `MIDWAY` transactions before.
        """
        before = self._transactions
        running = self.start()
        wait_until(lambda: self._transactions >= before + MIDWAY or running.process.poll() is not None, 120)
        with self.hold_requests(api, *brokers):
            wait_until(lambda: self.count_waiting(api) or running.process.poll() is not None, 120)
            assert running.process.poll() is None, running.wait()
            yield running

    @contextmanager
    def hold_requests(self, api: str, *brokers: int) -> Iterator[None]:
        """Hold requests of this kind before the brokers, by default all."""
        proxies = self.field.arena.proxies
        for broker in brokers or proxies:
            proxies[broker].hold(APIS[api])
        try:
            yield
        finally:
            for proxy in proxies.values():
                proxy.heal()

    def count_waiting(self, api: str) -> int:
        """Returns the number of held requests of this kind."""
        return sum(proxy.held.count(APIS[api]) for proxy in self.field.arena.proxies.values())

    @property
    def _transactions(self) -> int:
        return sum(proxy.requests[APIS["EndTxn"]] for proxy in self.field.arena.proxies.values())

    def run_until_clean(self) -> Run:
        """Run until a run is clean."""
        for _ in range(TRIES):
            if (run := self.wait_for_run(self.start())).clean:
                return run
        raise AssertionError(f"no clean republish in {TRIES}; the last one: {_summarize(run)}\n{run.stderr}")

    # -- the end

    def verify(self) -> None:
        """Run until clean, then assert by the console consumer that each record is there once, in order, as mapped."""
        self.run_until_clean()
        feed, kafka, keep = self.field, self.field.arena.kafka, self.field.root / "evidence"
        topics, java, status = (feed.topic, self.target.topic), tools.Java.of_local_kafka(kafka), kafka.status()
        keep.mkdir(exist_ok=True)
        data = [status.root / f"node-{broker.id}" / "data" for broker in status.brokers]
        logs = read_logs(None, tools.dump(java, data, topics, keep / "log.jsonl"))
        expected = {tp: log.list_visible(True) or set() for tp, log in logs.items()}
        scanned = tools.scan(java, kafka.bootstrap, topics, keep / "scan.jsonl", expected=expected)
        old, new = (way_back.collect_contents(read_lines(scanned), topic) for topic in topics)
        assert {(t, p): {o for q, o in offsets if q == p} for t, offsets in zip(topics, (old, new), strict=True)
                for p in range(PARTITIONS) if (t, p) in expected} == expected  # fmt: skip
        requested = {(p, o) for p, o in old if o < self._end(p)}
        folder = Path(feed.write_feed().lake, "_sluice", feed.name, "republished", "again")
        coordinates = way_back.read_map(folder, *topics)
        wrong = way_back.find_problems(old, new, coordinates, requested, same_partition=self.keeps_partitions)
        verdict = "BROKEN" if wrong else "all hold"
        feed.account.log(
            f"checker: {verdict}; {len(new):,} records by the console consumer, {len(coordinates):,} in the map"
        )
        feed.account.numbers |= {"checked": {"records compared with the log": len(new)}, "wrong": wrong[:20]}
        assert not wrong, wrong[:20]


KILLED = (9, -signal.SIGKILL)


def _summarize(run: Run) -> str:
    if run.clean:
        (summary,) = (line for line in run.lines if "records" in line)
        return f"sent {summary['records']:,} of {summary['records_in_all']:,} records in {run.seconds:.1f} s"
    return "died" if run.code in KILLED else run.summary


def _produce_rows(field: Field, more: int) -> None:
    """Produce records with distinct timestamps, some without key, value or headers."""
    dice = random.Random(SEED)
    producer = KafkaProducer(bootstrap_servers=field.arena.kafka.bootstrap, linger_ms=50)
    for n in range(ROWS):
        producer.send(
            field.topic,
            partition=n % PARTITIONS,
            key=None if n % 13 == 0 else b"k%d" % (n % 17),
            value=None if n % 13 == 3 else b"value %d " % n * 3 + dice.randbytes(more),
            headers=[("trace", b"%d" % n), ("none", b"")] if n % 3 else None,
            timestamp_ms=STAMP + n,
        )
    producer.close()


# -- brokers


Fault = Callable[[Republish], AbstractContextManager[None]]


def kill_broker(part: Callable[[Republish], int]) -> Fault:
    return lambda republish: brokers.kill_brokers(republish.target, part(republish))


def move_coordinator(internal: str) -> Fault:
    """Move leadership of the coordinator partition in the internal topic."""

    @contextmanager
    def move(republish: Republish) -> Iterator[None]:
        arena, partition = republish.field.arena, compute_partition(republish.name)
        leader = arena.find_leaders(internal)[partition]
        to = next(b for b in arena.kafka.broker_ids if b != leader)
        arena.move_leaders(internal, {partition: to})
        republish.field.account.log(f"{internal}:{partition} moved from broker {leader} to {to}")
        yield

    return move


@contextmanager
def move_leaders(republish: Republish) -> Iterator[None]:
    brokers.move_leaders(republish.target)
    yield


def get_transaction_coordinator(republish: Republish) -> int:
    return republish.field.arena.find_transaction_coordinator(republish.name)


def get_mark_coordinator(republish: Republish) -> int:
    return republish.field.arena.find_coordinator(republish.name)


def find_last_leader(republish: Republish) -> int:
    """Returns the leader of the last partition, which a republish that keeps partitions sends to last."""
    leaders = republish.target.arena.find_leaders(republish.target.topic)
    return leaders[max(leaders)]


IN_THE_MIDST: dict[str, tuple[str, Callable[[Republish], int], Fault]] = {
    "leader-killed": ("Produce", find_last_leader, kill_broker(find_last_leader)),
    "leaders-moved": ("Produce", find_last_leader, move_leaders),
    "coordinator-killed": ("EndTxn", get_transaction_coordinator, kill_broker(get_transaction_coordinator)),
    "coordinator-moved": ("AddPartitionsToTxn", get_transaction_coordinator, move_coordinator(TRANSACTION)),
    "coordinator-of-marks-killed": ("TxnOffsetCommit", get_mark_coordinator, kill_broker(get_mark_coordinator)),
    "coordinator-of-marks-moved": ("TxnOffsetCommit", get_mark_coordinator, move_coordinator(GROUP)),
}


@pytest.mark.parametrize("what", IN_THE_MIDST)
def test_republish_while_a_broker(field: Field, what: str) -> None:
    """The run continues with another broker or fails with an error. The next run continues."""
    api, find_broker, inject = IN_THE_MIDST[what]
    republish = Republish.prepare(field)
    with ExitStack() as stack:
        with republish.hold_at(api, find_broker(republish)) as running:
            stack.enter_context(inject(republish))
        run = republish.wait_for_run(running)
        if what.endswith("moved"):
            assert run.clean, run
        expect_clean_or_retryable(run)
    republish.verify()


@pytest.mark.parametrize("api", ["AddOffsetsToTxn", "EndTxn"], ids=["aborted", "committed"])
def test_republish_while_a_partition_has_no_leader(field: Field, api: str) -> None:
    """Kafka drops a transaction's marker without a leader. When the leader is back, its records have its outcome."""
    republish = Republish.prepare(field, replicas=1)
    with ExitStack() as stack:
        with republish.hold_at(api) as running:
            running.process.kill()
            running.process.wait()
            stack.enter_context(brokers.kill_brokers(republish.target, find_last_leader(republish)))
        republish.wait_for_run(running, "a republish that has sent a transaction's records")
        wait_until(lambda: _has_no_leader(republish), 60)
        expect_clean_or_retryable(republish.wait_for_run(republish.start(), "a republish without the leader"))
    republish.verify()


def _has_no_leader(republish: Republish) -> bool:
    with suppress(KafkaConnectionError):  # the admin client may ask the dead broker
        return -1 in republish.target.arena.find_leaders(republish.target.topic).values()
    return False


def test_republish_with_lost_responses(field: Field) -> None:
    """Brokers carry out requests, and the answers are lost."""
    republish = Republish.prepare(field)
    apis = ("InitProducerId", "AddPartitionsToTxn", "Produce", "AddOffsetsToTxn", "TxnOffsetCommit", "EndTxn")
    with ExitStack() as stack:
        losses = [stack.enter_context(lose_answers(field, api, 2)) for api in apis]
        expect_clean_or_retryable(republish.wait_for_run(republish.start()))
        assert all(loss.count for loss in losses), [loss.api for loss in losses if not loss.count]
    republish.verify()


def test_republish_throttled_by_a_quota(field: Field) -> None:
    """A full transaction exceeds its timeout under the quota. The run reports the throttling and ends cleanly."""
    client = "slowed"
    kafka = f"{{bootstrap: '{field.arena.proxied_bootstrap}', client_id: {client}, transaction_timeout_ms: 20000}}"
    republish = Republish.prepare(field.with_settings(kafka=kafka), more=1000)
    with _limit_client(field, client, 20_000):
        run = republish.wait_for_run(republish.start_whole(), "with a quota of 20 kB/s on each broker")
    assert run.clean, run
    (summary,) = (line for line in run.lines if "records" in line)
    assert summary["throttled_ms"] > 0
    field.account.log(
        f"throttled by brokers for {summary['throttled_ms'] / 1000:.0f} s; {summary['transactions']} transactions"
    )
    republish.verify()


@contextmanager
def _limit_client(field: Field, client: str, rate: int) -> Iterator[None]:
    """Set a quota by Kafka's tool: the bytes a second that the client may produce to each broker."""
    entity = ("--alter", "--entity-type", "clients", "--entity-name", client)

    def change_config(*change: str) -> None:
        kafka = field.arena.kafka
        result = kafka.tool("kafka.admin.ConfigCommand", "--bootstrap-server", kafka.bootstrap, *entity, *change)
        assert result.returncode == 0, result.stderr

    change_config("--add-config", f"producer_byte_rate={rate}")
    try:
        yield
    finally:
        change_config("--delete-config", "producer_byte_rate")


# -- runs


def test_republish_killed_after_each_step(field: Field) -> None:
    """A run with lanes dies after each step of a transaction, of a lane, and of the republish. The next continues."""
    republish, draw = Republish.prepare(field, lane_offsets=LANE), random.Random(SEED)
    steps = [s for s in republish_cut.STEPS if s not in ("lane", "all")] * 2
    for step in [*draw.sample(steps, len(steps)), "lane", "lane", "all"]:
        times = 1 if step == "all" else draw.randint(1, 2)
        run = republish.wait_for_run(republish.start(step, times), about=f"a republish (after {step})")
        assert run.clean or run.code in KILLED, run
    republish.verify()


def test_two_republishes_of_one_plan_at_once(field: Field) -> None:
    """The run that began last continues. One that wakes after another has sent all is fenced."""
    republish = Republish.prepare(field)
    with republish.hold_at("EndTxn") as sleeper:
        sleeper.process.send_signal(signal.SIGSTOP)
        field.account.log("it is stopped (SIGSTOP)")
    rivals = [republish.start(), republish.start()]
    for run in [republish.wait_for_run(rival) for rival in rivals]:
        if not run.clean:
            run.expect_error(CommitFenced, mentions="another run carries republish again of orders out now")
    republish.run_until_clean()
    sleeper.process.send_signal(signal.SIGCONT)
    run = republish.wait_for_run(sleeper, about="the one that slept")
    assert not run.clean
    run.expect_error(CommitFenced)
    republish.verify()


@pytest.mark.spark
def test_republish_in_tasks_with_killed_worker_and_driver(field: Field) -> None:
    """Lanes wait in mid-transaction. A task is retried, and tasks that outlive their driver are fenced."""
    republish, processes = Republish.prepare(field, lane_offsets=LANE), Processes()
    with processes.kill_at_exit(), republish.hold_requests("Produce"):
        running = republish.start_with_spark(processes.environment)

        def list_waiting_workers() -> set[int]:
            assert running.process.poll() is None, running.wait()
            return {p.pid for p in processes.list_workers(field.arena)} if republish.count_waiting("Produce") else set()

        before = wait_until(list_waiting_workers, 300)
        victim = min(before)
        os.kill(victim, signal.SIGKILL)
        field.account.log(f"lanes wait to send; worker {victim} of {len(before)} was killed (SIGKILL)")
        wait_until(lambda: list_waiting_workers() - before, 120)
        running.process.kill()
        field.account.log("its task was tried again; the driver was killed (SIGKILL)")
        rival = republish.start()
    assert republish.wait_for_run(running, "with Spark").code in KILLED
    expect_clean_or_retryable(republish.wait_for_run(rival, "another one, at once"))
    processes.wait_until_gone()
    republish.verify()


# -- a small Kafka, which has an authorizer


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The mount point of a small file system."""
    folder = tmp_path_factory.mktemp("small") / "disk"
    with ExitStack() as stack:
        try:
            stack.enter_context(mount_tmpfs(folder, "192m"))
        except OSError as error:
            pytest.skip(f"a file system of its own needs the right to mount one: {error.strerror}")
        yield folder


@pytest.fixture(scope="module")
def small_arena(disk: Path) -> Iterator[Arena]:
    settings = {
        "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
        "allow.everyone.if.no.acl.found": "true",
    }
    with run_arena(disk / "kafka", 1, settings) as arena:
        yield arena


@pytest.fixture
def small(small_arena: Arena, account: Account, tmp_path: Path) -> Iterator[Field]:
    small_arena.heal()
    yield shorten_timeouts(Field.create(small_arena, tmp_path, account))
    small_arena.heal()


def test_republish_while_kafka_is_full(small: Field, disk: Path) -> None:
    """A broker with a full disk ends. Acknowledged records are there when it has room again."""
    republish = Republish.prepare(small)
    with ExitStack() as stack:
        with republish.hold_at("Produce") as running:
            stack.enter_context(fill_file_system(small, disk, "the disk of Kafka"))
        republish.wait_for_run(running).expect_error(KafkaUnavailable)
        wait_until(lambda: not small.arena.kafka.running, 60)
        small.account.log("the broker has ended")
    small.arena.heal()
    republish.verify()


def test_republish_rejected_by_the_target(small: Field) -> None:
    """During the run a right is revoked or the topic's settings change. Once restored, the next run continues."""
    republish = Republish.prepare(small)
    topic, name = republish.target.topic, republish.name
    lacking = {
        "WRITE on topic": (ResourceType.TOPIC, topic, ACLOperation.WRITE),
        "READ on group": (ResourceType.GROUP, name, ACLOperation.READ),
        "WRITE on transactional id": (ResourceType.TRANSACTIONAL_ID, name, ACLOperation.WRITE),
    }
    for denial, right in lacking.items():
        with ExitStack() as stack:
            with republish.hold_at("AddPartitionsToTxn") as running:
                stack.enter_context(_deny(small, *right))
            republish.wait_for_run(running).expect_error(NotAuthorized, mentions=denial)
    with republish.hold_at("AddPartitionsToTxn") as running:
        configure_topic(republish.target, message_timestamp_before_max_ms="3600000")
    run = republish.wait_for_run(running)
    assert (run.code, run.error) == (2, UsageError.__name__), run
    assert any(".before.max.ms" in line.get("remedy", "") for line in run.lines)
    configure_topic(republish.target, message_timestamp_before_max_ms=str((1 << 63) - 1))
    republish.verify()


@contextmanager
def _deny(field: Field, kind: ResourceType, name: str, operation: ACLOperation) -> Iterator[None]:
    """Deny the operation on the resource to all users inside the block. All else stays allowed."""
    rules = {ACLOperation.ALL: ACLPermissionType.ALLOW, operation: ACLPermissionType.DENY}
    acls = [ACL("User:*", "*", what, permission, ResourcePattern(kind, name)) for what, permission in rules.items()]
    with field.arena.connect_admin() as admin:
        admin.create_acls(acls)
        field.account.log(f"{operation.name} on {kind.name} {name} is forbidden")
        yield
        admin.delete_acls(acls)
        field.account.log("it is allowed again")
