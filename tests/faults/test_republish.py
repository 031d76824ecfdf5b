"""A republish under fire: brokers die and move, rights and room go, runs die, sleep and meet.

Judged by Kafka's console consumer alone: it reads the old topic and the new one, and the map must say the same.
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
from tests.checker.facts import lines, logs
from tests.faults.account import SEED, Account
from tests.faults.arena import GROUP, TRANSACTION, Arena, opened, place
from tests.faults.field import SLUICE, TRIES, Field, Run, Running
from tests.faults.nemeses import brokers, endured, hasty
from tests.faults.nemeses.answers import APIS, answers_lost
from tests.faults.nemeses.engines import Processes
from tests.faults.nemeses.lakes import filled_up, mounted
from tests.faults.nemeses.logs import configured
from tests.faults.runner import Forked
from tests.integration import republish_cut
from tests.resources.kafka.tools import until

pytestmark = pytest.mark.faults
ROWS, PARTITIONS, STAMP = 2400, 3, 1_700_000_000_000
LANE = ROWS // PARTITIONS - 100
"""Offsets of a lane, where there is one for each old partition."""
MIDWAY = 2
"""Transactions that have ended when something begins to go wrong."""
_numbers = itertools.count(1)


@dataclass
class WayBack:
    """Landed rows of a feed, and the topic that they go back to. Transactions are of about a hundred rows."""

    field: Field
    target: Field
    kept: bool
    lane_offsets: int

    @classmethod
    def ready(cls, field: Field, lane_offsets: int = 250_000, more: int = 0, replicas: int = 3) -> WayBack:
        """Rows landed, each with so many bytes `more`, and a target that is empty; the seed says whether partitions are
        kept."""
        _written(field, more)
        field.normal(1)
        kept = random.Random(f"{SEED} {field.topic}").random() < 0.5
        topic = f"{field.topic}-again"
        field.arena.create(topic, PARTITIONS if kept else 2, first=next(_numbers), replicas=replicas)
        field.account.did(f"{ROWS:,} rows landed; they go to {topic}, {'as they lay' if kept else 'by their keys'}")
        return cls(field, replace(field, topic=topic), kept, lane_offsets)

    @property
    def name(self) -> str:
        """The transactional id, and the group of the marks."""
        return f"sluice-republish-{self.field.name}-again"

    @property
    def words(self) -> list[str]:
        ranges = [w for p in range(PARTITIONS) for w in ("--offsets", f"{self.field.topic}:{p}:0-{self._end(p)}")]
        asked = ["republish", self.field.name, "--topic", self.target.topic, *ranges, "--id", "again", "--yes"]
        asked += ["--keep-timestamps", "--json", "--project", str(self.field.root)]
        return [*asked, "--keep-partitions"] if self.kept else asked

    @staticmethod
    def _end(partition: int) -> int:
        """Not all is asked for."""
        return ROWS // PARTITIONS - partition

    # -- runs

    def start(self, step: str = "sent", times: int = 0) -> Running:
        """A run in a process of its own; it dies when it has done the step so many times, unless that is 0."""
        self.field.feed()
        self.field.runs += 1
        out = self.field.root / f"run-{self.field.runs}.out"
        given = [step, str(times), str(self.lane_offsets), *self.words, "--here"]
        return Running(Forked(given, out, self.field.environment, republish_cut.main), out)

    def start_whole(self) -> Running:
        """The same with transactions as large as users have them."""
        self.field.feed()
        self.field.runs += 1
        return Running.alone([*SLUICE, *self.words, "--here"], self.field.root / f"run-{self.field.runs}.out")

    def start_with_spark(self, environment: dict[str, str]) -> Running:
        """The same with lanes in Spark's tasks, each in one transaction."""
        self.field.feed()
        self.field.runs += 1
        command = [sys.executable, "-m", "tests.integration.republish_cut", "sent", "0", str(self.lane_offsets)]
        return Running.alone([*command, *self.words], self.field.root / f"run-{self.field.runs}.out", environment)

    def ended(self, running: Running, about: str = "a republish") -> Run:
        ran = running.wait(300)
        account = self.field.account
        account.count("runs")
        account.count("clean runs" if ran.clean else "runs killed" if ran.code in KILLED else "runs failed")
        account.did(f"{about}: {_told(ran)}")
        return ran

    @contextmanager
    def caught(self, api: str, *brokers: int) -> Iterator[Running]:
        """A run, at the moment when a request of this kind waits before one of the brokers; then it passes.

        Some transactions of it have ended by then.
        """
        before = self._transactions
        running = self.start()
        until(lambda: self._transactions >= before + MIDWAY or running.process.poll() is not None, 120)
        with self.held(api, *brokers):
            until(lambda: self.waiting(api) or running.process.poll() is not None, 120)
            assert running.process.poll() is None, running.wait()
            yield running

    @contextmanager
    def held(self, api: str, *brokers: int) -> Iterator[None]:
        """Requests of this kind wait before the brokers, or before all."""
        proxies = self.field.arena.proxies
        for broker in brokers or proxies:
            proxies[broker].hold(APIS[api])
        try:
            yield
        finally:
            for proxy in proxies.values():
                proxy.heal()

    def waiting(self, api: str) -> int:
        """How many requests of this kind wait now."""
        return sum(proxy.held.count(APIS[api]) for proxy in self.field.arena.proxies.values())

    @property
    def _transactions(self) -> int:
        return sum(proxy.seen[APIS["EndTxn"]] for proxy in self.field.arena.proxies.values())

    def recovered(self) -> Run:
        """Runs until one is clean."""
        for _ in range(TRIES):
            if (ran := self.ended(self.start())).clean:
                return ran
        raise AssertionError(f"no clean republish in {TRIES}; the last one: {_told(ran)}\n{ran.noise}")

    # -- the end

    def proven(self) -> None:
        """The last run, and what Kafka's console consumer sees: each record once, in order, as the map says."""
        self.recovered()
        feed, kafka, keep = self.field, self.field.arena.kafka, self.field.root / "evidence"
        topics, java, status = (feed.topic, self.target.topic), tools.Java.of_local_kafka(kafka), kafka.status()
        keep.mkdir(exist_ok=True)
        data = [status.root / f"node-{broker.id}" / "data" for broker in status.brokers]
        held = logs(None, tools.dump(java, data, topics, keep / "log.jsonl"))
        expected = {tp: log.visible(True) or set() for tp, log in held.items()}
        scanned = tools.scan(java, kafka.bootstrap, topics, keep / "scan.jsonl", expected=expected)
        old, new = (way_back.seen(lines(scanned), topic) for topic in topics)
        assert {(t, p): {o for q, o in found if q == p} for t, found in zip(topics, (old, new), strict=True)
                for p in range(PARTITIONS) if (t, p) in expected} == expected  # fmt: skip
        asked = {(p, o) for p, o in old if o < self._end(p)}
        folder = Path(feed.feed().lake, "_sluice", feed.name, "republished", "again")
        moved = way_back.went(folder, *topics)
        wrong = way_back.broken(old, new, moved, asked, kept=self.kept)
        verdict = "BROKEN" if wrong else "all hold"
        feed.account.did(f"checker: {verdict}; {len(new):,} records by the console consumer, {len(moved):,} in the map")
        feed.account.numbers |= {"checked": {"records compared with the log": len(new)}, "wrong": wrong[:20]}
        assert not wrong, wrong[:20]


KILLED = (9, -signal.SIGKILL)


def _told(ran: Run) -> str:
    if ran.clean:
        (said,) = (line for line in ran.said if "records" in line)
        return f"sent {said['records']:,} of {said['records_in_all']:,} records in {ran.seconds:.1f} s"
    return "died" if ran.code in KILLED else ran.told


def _written(field: Field, more: int) -> None:
    """Records without key, value or headers among them; each has another time."""
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


Wrong = Callable[[WayBack], AbstractContextManager[None]]


def killed(part: Callable[[WayBack], int]) -> Wrong:
    return lambda back: brokers.killed(back.target, part(back))


def moved(internal: str) -> Wrong:
    """Leadership of the one partition moves, and with it whoever it coordinates."""

    @contextmanager
    def move(back: WayBack) -> Iterator[None]:
        arena, partition = back.field.arena, place(back.name)
        leader = arena.leaders(internal)[partition]
        to = next(b for b in arena.kafka.broker_ids if b != leader)
        arena.lead(internal, {partition: to})
        back.field.account.did(f"{internal}:{partition} moved from broker {leader} to {to}")
        yield

    return move


@contextmanager
def leaders_moved(back: WayBack) -> Iterator[None]:
    brokers.leaders_moved(back.target)
    yield


def of_transactions(back: WayBack) -> int:
    return back.field.arena.coordinator_of_transactions(back.name)


def of_marks(back: WayBack) -> int:
    return back.field.arena.coordinator(back.name)


def leader(back: WayBack) -> int:
    """Of the partition that is sent to last, where partitions are kept."""
    leaders = back.target.arena.leaders(back.target.topic)
    return leaders[max(leaders)]


IN_THE_MIDST: dict[str, tuple[str, Callable[[WayBack], int], Wrong]] = {
    "leader-killed": ("Produce", leader, killed(leader)),
    "leaders-moved": ("Produce", leader, leaders_moved),
    "coordinator-killed": ("EndTxn", of_transactions, killed(of_transactions)),
    "coordinator-moved": ("AddPartitionsToTxn", of_transactions, moved(TRANSACTION)),
    "coordinator-of-marks-killed": ("TxnOffsetCommit", of_marks, killed(of_marks)),
    "coordinator-of-marks-moved": ("TxnOffsetCommit", of_marks, moved(GROUP)),
}


@pytest.mark.parametrize("what", IN_THE_MIDST)
def test_republish_while_a_broker(field: Field, what: str) -> None:
    """It goes on with another one, or says what is wrong; then the next run goes on."""
    api, where, wrong = IN_THE_MIDST[what]
    back = WayBack.ready(field)
    with ExitStack() as stack:
        with back.caught(api, where(back)) as running:
            stack.enter_context(wrong(back))
        ran = back.ended(running)
        if what.endswith("moved"):
            assert ran.clean, ran
        endured(ran)
    back.proven()


@pytest.mark.parametrize("api", ["AddOffsetsToTxn", "EndTxn"], ids=["aborted", "committed"])
def test_republish_while_a_partition_has_no_leader(field: Field, api: str) -> None:
    """Kafka drops a transaction's marker where no leader is. When the leader is back, its records end as it ended."""
    back = WayBack.ready(field, replicas=1)
    with ExitStack() as stack:
        with back.caught(api) as running:
            running.process.kill()
            running.process.wait()
            stack.enter_context(brokers.killed(back.target, leader(back)))
        back.ended(running, "a republish that has sent a transaction's records")
        until(lambda: _has_no_leader(back), 60)
        endured(back.ended(back.start(), "a republish without the leader"))
    back.proven()


def _has_no_leader(back: WayBack) -> bool:
    with suppress(KafkaConnectionError):  # the admin client may ask the dead broker
        return -1 in back.target.arena.leaders(back.target.topic).values()
    return False


def test_republish_whose_answers_are_lost(field: Field) -> None:
    """Brokers did what they were asked for, and nobody heard of it."""
    back = WayBack.ready(field)
    asked = ("InitProducerId", "AddPartitionsToTxn", "Produce", "AddOffsetsToTxn", "TxnOffsetCommit", "EndTxn")
    with ExitStack() as stack:
        losing = [stack.enter_context(answers_lost(field, api, 2)) for api in asked]
        endured(back.ended(back.start()))
        assert all(one.lost for one in losing), [one.api for one in losing if not one.lost]
    back.proven()


def test_republish_that_a_quota_slows_down(field: Field) -> None:
    """Kafka takes little of it, and less than what would fill a transaction in its time. It says so, and ends."""
    client = "slowed"
    kafka = f"{{bootstrap: '{field.arena.behind}', client_id: {client}, transaction_timeout_ms: 20000}}"
    back = WayBack.ready(field.with_settings(kafka=kafka), more=1000)
    with _quota(field, client, 20_000):
        ran = back.ended(back.start_whole(), "with a quota of 20 kB/s on each broker")
    assert ran.clean, ran
    (said,) = (line for line in ran.said if "records" in line)
    assert said["throttled"] > 0
    field.account.did(f"throttled by brokers for {said['throttled']:.0f} s; {said['transactions']} transactions")
    back.proven()


@contextmanager
def _quota(field: Field, client: str, rate: int) -> Iterator[None]:
    """As Kafka's own tool sets it: bytes a second of what this client produces, on each broker."""
    whom = ("--alter", "--entity-type", "clients", "--entity-name", client)

    def configured(*change: str) -> None:
        kafka = field.arena.kafka
        said = kafka.tool("kafka.admin.ConfigCommand", "--bootstrap-server", kafka.bootstrap, *whom, *change)
        assert said.returncode == 0, said.stderr

    configured("--add-config", f"producer_byte_rate={rate}")
    try:
        yield
    finally:
        configured("--delete-config", "producer_byte_rate")


# -- runs


def test_republish_killed_after_each_step(field: Field) -> None:
    """In lanes: a run dies after each step of a transaction, of a lane, and of the whole; the next one goes on."""
    back, draw = WayBack.ready(field, lane_offsets=LANE), random.Random(SEED)
    steps = [s for s in republish_cut.STEPS if s not in ("lane", "all")] * 2
    for step in [*draw.sample(steps, len(steps)), "lane", "lane", "all"]:
        times = 1 if step == "all" else draw.randint(1, 2)
        ran = back.ended(back.start(step, times), about=f"a republish (after {step})")
        assert ran.clean or ran.code in KILLED, ran
    back.proven()


def test_two_republishes_of_one_plan_at_once(field: Field) -> None:
    """The one that began last goes on. One that slept wakes up when another has sent all: it is fenced."""
    back = WayBack.ready(field)
    with back.caught("EndTxn") as sleeper:
        sleeper.process.send_signal(signal.SIGSTOP)
        field.account.did("it is stopped (SIGSTOP)")
    rivals = [back.start(), back.start()]
    for ran in [back.ended(rival) for rival in rivals]:
        if not ran.clean:
            ran.stopped_by(CommitFenced, says="another run carries republish again of orders out now")
    back.recovered()
    sleeper.process.send_signal(signal.SIGCONT)
    ran = back.ended(sleeper, about="the one that slept")
    assert not ran.clean
    ran.stopped_by(CommitFenced)
    back.proven()


@pytest.mark.spark
def test_republish_by_tasks_whose_worker_and_driver_are_killed(field: Field) -> None:
    """Lanes wait in mid-transaction. A task is tried again; what outlives its driver for a moment is fenced."""
    back, processes = WayBack.ready(field, lane_offsets=LANE), Processes()
    with processes.killed(), back.held("Produce"):
        running = back.start_with_spark(processes.environment)

        def sending() -> set[int]:
            assert running.process.poll() is None, running.wait()
            return {p.pid for p in processes.workers(field.arena)} if back.waiting("Produce") else set()

        before = until(sending, 300)
        victim = min(before)
        os.kill(victim, signal.SIGKILL)
        field.account.did(f"lanes wait to send; worker {victim} of {len(before)} was killed (SIGKILL)")
        until(lambda: sending() - before, 120)
        running.process.kill()
        field.account.did("its task was tried again; the driver was killed (SIGKILL)")
        late = back.start()
    assert back.ended(running, "with Spark").code in KILLED
    endured(back.ended(late, "another one, at once"))
    processes.gone()
    back.proven()


# -- a small Kafka, which has an authorizer


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A small file system."""
    found = tmp_path_factory.mktemp("small") / "disk"
    with ExitStack() as stack:
        try:
            stack.enter_context(mounted(found, "192m"))
        except OSError as error:
            pytest.skip(f"a file system of its own needs the right to mount one: {error.strerror}")
        yield found


@pytest.fixture(scope="module")
def small_arena(disk: Path) -> Iterator[Arena]:
    settings = {
        "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
        "allow.everyone.if.no.acl.found": "true",
    }
    with opened(disk / "kafka", 1, settings) as made:
        yield made


@pytest.fixture
def small(small_arena: Arena, account: Account, tmp_path: Path) -> Iterator[Field]:
    small_arena.heal()
    yield hasty(Field.fresh(small_arena, tmp_path, account))
    small_arena.heal()


def test_republish_while_kafka_is_full(small: Field, disk: Path) -> None:
    """A broker whose disk is full ends. What it acknowledged before is there when there is room again."""
    back = WayBack.ready(small)
    with ExitStack() as stack:
        with back.caught("Produce") as running:
            stack.enter_context(filled_up(small, disk, "the disk of Kafka"))
        back.ended(running).stopped_by(KafkaUnavailable)
        until(lambda: not small.arena.kafka.running, 60)
        small.account.did("the broker has ended")
    small.arena.heal()
    back.proven()


def test_republish_that_the_target_takes_no_longer(small: Field) -> None:
    """In mid-way a right is taken away, or the topic's settings change. Given back, it goes on."""
    back = WayBack.ready(small)
    topic, name = back.target.topic, back.name
    lacking = {
        "WRITE on topic": (ResourceType.TOPIC, topic, ACLOperation.WRITE),
        "READ on group": (ResourceType.GROUP, name, ACLOperation.READ),
        "WRITE on transactional id": (ResourceType.TRANSACTIONAL_ID, name, ACLOperation.WRITE),
    }
    for told, right in lacking.items():
        with ExitStack() as stack:
            with back.caught("AddPartitionsToTxn") as running:
                stack.enter_context(_forbidden(small, *right))
            back.ended(running).stopped_by(NotAuthorized, says=told)
    with back.caught("AddPartitionsToTxn") as running:
        configured(back.target, message_timestamp_before_max_ms="3600000")
    ran = back.ended(running)
    assert (ran.code, ran.error) == (2, UsageError.__name__), ran
    assert any(".before.max.ms" in line.get("remedy", "") for line in ran.said)
    configured(back.target, message_timestamp_before_max_ms=str((1 << 63) - 1))
    back.proven()


@contextmanager
def _forbidden(field: Field, kind: ResourceType, name: str, operation: ACLOperation) -> Iterator[None]:
    """Nobody may do that with it, and everything else, until the block ends."""
    rules = {ACLOperation.ALL: ACLPermissionType.ALLOW, operation: ACLPermissionType.DENY}
    acls = [ACL("User:*", "*", what, rule, ResourcePattern(kind, name)) for what, rule in rules.items()]
    with field.arena.admin() as admin:
        admin.create_acls(acls)
        field.account.did(f"{operation.name} on {kind.name} {name} is forbidden")
        yield
        admin.delete_acls(acls)
        field.account.did("it is allowed again")
