"""A real Apache Kafka on this machine: one or three KRaft nodes on loopback, for demo, tests and a first try.

Promises: `start` returns when every broker answers and sees all the others, or raises with the broker's own
last words. A cluster started again on the same folder has the same ports and data. `stop` ends only processes
that this folder's records name. The nodes are daemons: a cluster that is kept outlives us and is found again
by `attach`; one that is thrown away ends with us, however we end.

    with LocalKafka(Path(".sluice/kafka"), brokers=3) as kafka:
        KafkaConsumer(bootstrap_servers=kafka.bootstrap)

The folder contains `cluster.json` (settings and ports), `node-<id>/` with `server.properties`, `server.log`,
`data/` and `process.json` (its process); of a secured cluster `secure/`, which `secured` makes.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import random
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Self

from sluice.pipelines.errors import SetupError
from sluice.pipelines.model.receipts import Progress, Reporter
from sluice.pipelines.util.documents import Derived
from sluice.pipelines.util.locks import locking
from sluice.resources.local import java, properties
from sluice.resources.local.process import Process, spawn
from sluice.resources.local.properties import HOST
from sluice.resources.local.secured import ADMIN, LISTENERS, Secured, last_certificate, reload_settings

VERSION = "4.3.1"
ARTIFACTS = (
    java.Artifact("org.apache.kafka", "kafka_2.13", VERSION),
    # The tools bring all of Kafka Connect for one command that we do not use.
    java.Artifact("org.apache.kafka", "kafka-tools", VERSION, without=("org.apache.kafka:connect-runtime",)),
    # Kafka names no SLF4J binding; without one a broker that fails to start logs nothing.
    java.Artifact("org.apache.logging.log4j", "log4j-slf4j-impl", "2.25.4"),
)
START_SECONDS = 180.0
STOP_SECONDS = 20.0
HANDOVER_SECONDS = 120.0  # of a broker that moves its leaderships to others before it ends
_LOOKS = 6  # at a listener's certificate
_POLL = 0.1  # seconds between two questions to a broker that does not answer yet
# Below the range from which systems take the ports of outgoing connections: a client that tries again and
# again to reach a stopped broker could otherwise be given the broker's own port.
_PORTS = range(20_000, 30_000)

# The full compiler costs who ends soon more than it brings: twice the CPU of a start.
_SOON_OVER = ("-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC")
_BROKER = ("-Xmx512m", "-XX:+ExitOnOutOfMemoryError", "-Dsluice.log.level=INFO")
_SERVER, _STORAGE_TOOL = "kafka.Kafka", "kafka.tools.StorageTool"
_COMMAND = ("-Xmx256m", "-Dsluice.log.level=WARN", *_SOON_OVER)
_LOG4J = """<Configuration status="WARN" shutdownHook="disable">
  <Appenders>
    <Console name="err" target="SYSTEM_ERR"><PatternLayout pattern="[%d] %p %m (%c)%n"/></Console>
  </Appenders>
  <Loggers><Root level="${sys:sluice.log.level}"><AppenderRef ref="err"/></Root></Loggers>
</Configuration>
"""


@dataclass(frozen=True)
class BrokerStatus:
    """One broker: its address, that for clients with a certificate, and, while it runs, its pid."""

    id: int
    address: str
    certificate_address: str | None
    pid: int | None
    log: Path

    @property
    def running(self) -> Derived[bool]:
        return self.pid is not None


@dataclass(frozen=True)
class ClusterStatus:
    """Result of `status`: `answering` is true when every broker answered and saw all the others."""

    root: Path
    version: str
    cluster_id: str
    bootstrap: str
    answering: bool
    secure: bool
    brokers: tuple[BrokerStatus, ...]

    @property
    def running(self) -> bool:
        return all(broker.running for broker in self.brokers)


@dataclass(frozen=True)
class _ClusterSettings:
    """Content of `cluster.json`: ports are (broker, controller) by node, and of a secured one that for clients with
    certificates; settings go on top of our own."""

    version: str
    cluster_id: str
    keep: bool
    ports: tuple[tuple[int, ...], ...]
    settings: dict[str, str] = field(default_factory=dict)
    secure: bool = False


class LocalKafka:
    """One local cluster in one folder; `keep=False` throws the data away when it is stopped.

    `root` is the cluster's folder, made when missing; `brokers` is 1 or 3; a `secure` one has TLS, users and ACLs, as
    `secured` says: neither can change later. `settings` are Kafka server properties on top of ours, remembered with
    the cluster.
    """

    def __init__(
        self,
        root: Path,
        brokers: int = 1,
        keep: bool = True,
        settings: Mapping[str, str] | None = None,
        secure: bool = False,
    ) -> None:
        if brokers not in (1, 3):
            raise SetupError(f"a local cluster of {brokers} brokers", remedy="ask for 1 or 3")
        self._root = root.absolute()
        self._brokers = brokers
        self._keep = keep
        self._settings = dict(settings or {})
        self._secure = secure
        self._guard: subprocess.Popen[bytes] | None = None

    @classmethod
    def attach(cls, root: Path) -> LocalKafka:
        """The cluster that lives in `root`, running or not; raises SetupError when there is none."""
        if (cluster := _read_cluster(root)) is None:
            raise SetupError(f"no local Kafka in {root}", remedy="start one: sluice kafka start")
        return cls(root, len(cluster.ports), cluster.keep, secure=cluster.secure)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def bootstrap(self) -> str:
        """The brokers' addresses, as clients take them: `127.0.0.1:port,…`."""
        return ",".join(node.address for node in self._nodes())

    @property
    def certificate_bootstrap(self) -> str:
        """Where a secured cluster's brokers listen for clients with a certificate."""
        return ",".join(node.certificate_address or "" for node in self._nodes())

    @property
    def secured(self) -> Secured | None:
        """Certificates and users of a secured cluster."""
        return Secured(self._root / "secure") if self._secure else None

    def client(self, user: str = ADMIN) -> dict[str, Any]:
        """kafka-python's settings for a user of this cluster, without the address; none where it is plain."""
        return self.secured.client(user) if self.secured else {}

    @property
    def broker_ids(self) -> tuple[int, ...]:
        return tuple(node.id for node in self._nodes())

    def start(self, report: Reporter = lambda progress: None) -> Self:
        """Start what does not run and wait until all brokers answer; does nothing to a cluster that runs.

        `report` gets the progress of a download. Raises SetupError with a broker's last lines when one ends or does
        not answer in time; nothing that this call started is left running then.
        """
        _jars(report)
        report(Progress("starting Kafka"))
        self._root.mkdir(parents=True, exist_ok=True)
        with self._lock():
            fresh = self._settle_what_it_is()
            launched: list[_BrokerNode] = []
            try:
                self._launch(launched)
                _await_answers(self._nodes())
            except BaseException:
                _end([node.folder for node in launched], 0)
                if not self._keep or fresh:
                    # Nothing was written to a fresh cluster; the next start may choose other ports for it.
                    self._throw_away()
                self._dismiss_guard()
                raise
        return self

    @property
    def running(self) -> bool:
        """Returns whether every broker's process lives; opens no socket."""
        return all(node.running for node in self._nodes())

    def stop(self) -> None:
        """End this folder's brokers, and only those; a cluster that is not kept is removed with its data."""
        if (self._root / "cluster.json").exists():
            with self._lock():
                # By the folders, not by cluster.json, which may be damaged.
                orderly = self._keep or _classes(_SERVER, self._root).archive is None
                _end(self._root.glob("node-[0-9]*"), STOP_SECONDS if orderly else 0)
                if not self._keep:
                    self._throw_away()
        self._dismiss_guard()

    def status(self) -> ClusterStatus:
        """Returns the running brokers and whether the cluster answers now; asks each running broker once."""
        cluster, nodes = self._cluster(), self._nodes()
        return ClusterStatus(
            root=self._root,
            version=cluster.version,
            cluster_id=cluster.cluster_id,
            bootstrap=self.bootstrap,
            answering=all(node.running and node.sees(len(nodes)) for node in nodes),
            secure=cluster.secure,
            brokers=tuple(
                BrokerStatus(node.id, node.address, node.certificate_address, node.pid, node.log) for node in nodes
            ),
        )

    def kill_broker(self, broker: int, number: signal.Signals = signal.SIGKILL) -> None:
        """Send one broker a signal; for one that ends it, wait until it has ended."""
        if (process := self._node(broker).process) is None:
            return
        process.send(number)
        if number in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT) and not process.wait(HANDOVER_SECONDS):
            raise SetupError(f"broker {broker} did not end on {number.name}", remedy="send it SIGKILL")

    def start_broker(self, *brokers: int) -> None:
        """Start brokers and wait until they answer and see every broker that runs.

        Those of a majority that is away answer only once all of them are started.
        """
        nodes = [self._node(broker) for broker in brokers]
        with self._lock():
            for node in nodes:
                if not node.running:
                    node.launch(self._cluster().keep)
            _await_answers(nodes, sum(member.running for member in self._nodes()))

    def renew(self) -> None:
        """New certificates for a secured cluster's brokers and users. Returns when brokers that run show theirs."""
        if (secured := self.secured) is None:
            raise SetupError(f"the local Kafka in {self._root} has no certificates", remedy="it is not a secured one")
        with self._lock():
            secured.prepare(self.broker_ids, self.bootstrap, renew=True)
            for node in self._nodes():
                if node.running:
                    self.reload_certificate(node.id, secured.broker_file(node.id))

    def reload_certificate(self, broker: int, keystore: Path, listeners: Sequence[str] = LISTENERS) -> None:
        """Let a running broker load its key and certificate from that file, for new connections (KIP-226).

        Returns when each of the listeners shows that certificate. Connects by certificate: the certificate of
        the listener for passwords may be invalid.
        """
        from kafka import KafkaAdminClient
        from kafka.admin import ConfigResource, ConfigResourceType

        from sluice.resources.kafka.connection.zero_copy_transport import client_of

        node = self._node(broker)
        if node.secured is None:
            raise SetupError(f"the local Kafka in {self._root} has no certificates", remedy="it is not a secured one")
        wanted = ConfigResource(ConfigResourceType.BROKER, str(broker), reload_settings(keystore, listeners))
        login = node.secured.client(ADMIN, by_certificate=True)
        with contextlib.closing(
            client_of(KafkaAdminClient, bootstrap_servers=node.certificate_address, **login)
        ) as client:
            client.alter_configs([wanted], raise_on_unknown=False)
        node.await_certificate(keystore, listeners)

    def tool(
        self, main_class: str, *args: str, stdin: str = "", timeout: float | None = 120
    ) -> subprocess.CompletedProcess[str]:
        """Run one of Kafka's own Java tools, e.g. `org.apache.kafka.tools.GetOffsetShell`, to its end.

        Bytes that are no UTF-8 come back as surrogate escapes. A failed tool raises nothing: check `returncode`.
        """
        self._root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory() as spare:
            classes = _classes(main_class, Path(spare))
            done = subprocess.run(
                _java_command(self._root, (*_COMMAND, *classes.options), main_class, *args),
                input=stdin,
                timeout=timeout,
                capture_output=True,
                encoding="utf-8",
                errors="surrogateescape",
                check=False,
            )
            if done.returncode == 0:  # one that failed did not load all
                classes.keep()
        return done

    def _cluster(self) -> _ClusterSettings:
        if (cluster := _read_cluster(self._root)) is None:
            raise SetupError(f"no local Kafka in {self._root}", remedy="start it first")
        return cluster

    def _nodes(self) -> list[_BrokerNode]:
        cluster = self._cluster()
        return [
            _BrokerNode(self._root, number, self.secured if cluster.secure else None, *ports)
            for number, ports in enumerate(cluster.ports, start=1)
        ]

    def _node(self, broker: int) -> _BrokerNode:
        for node in self._nodes():
            if node.id == broker:
                return node
        raise SetupError(f"no broker {broker} in {self._root}", remedy=f"there are {self.broker_ids}")

    def _settle_what_it_is(self) -> bool:
        """Write `cluster.json`; true when there was none."""
        existing = _read_cluster(self._root)
        if existing and len(existing.ports) != self._brokers:
            raise SetupError(
                f"the local Kafka in {self._root} has {len(existing.ports)} brokers, not {self._brokers}",
                remedy="start it with that number, or stop it and remove the folder",
            )
        if existing and existing.secure is not self._secure:
            kind = "secured" if existing.secure else "not secured"
            raise SetupError(
                f"the local Kafka in {self._root} is {kind}, and stays so",
                remedy=f"to have the other kind, stop it and remove {self._root} with all data in it",
            )
        cluster = _ClusterSettings(
            version=VERSION,
            cluster_id=existing.cluster_id if existing else _new_cluster_id(),
            keep=self._keep,
            ports=existing.ports if existing else free_ports(self._brokers, 3 if self._secure else 2),
            settings=(existing.settings if existing else {}) | self._settings,
            secure=self._secure,
        )
        _write_json(self._root / "cluster.json", asdict(cluster))
        return existing is None

    def _launch(self, launched: list[_BrokerNode]) -> None:
        """Start the nodes that do not run, adding each to `launched` before it is."""
        if not self._keep and self._guard is None:
            # A watchdog: when its input closes, we have ended, and it stops our remaining processes.
            self._guard = subprocess.Popen(
                [sys.executable, "-m", "sluice.resources.local.local_kafka", str(self._root)],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        cluster, nodes = self._cluster(), self._nodes()
        idle = [node for node in nodes if not node.running]
        if self.secured:
            self.secured.prepare([node.id for node in idle], self.bootstrap)
        for node in idle:
            node.configure(cluster, nodes)
        _format(idle, cluster.cluster_id)
        for node in idle:
            launched.append(node)
            node.launch(cluster.keep)

    def _throw_away(self) -> None:
        """Remove what we put into the folder, and the folder when nothing else is in it."""
        for folder in (*self._root.glob("node-[0-9]*"), *self._root.glob("secure")):
            shutil.rmtree(folder)
        for name in ("cluster.json", "log4j2.xml", "lock"):
            (self._root / name).unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            self._root.rmdir()

    def _dismiss_guard(self) -> None:
        if self._guard:
            self._guard.communicate()
            self._guard = None

    def _lock(self) -> AbstractContextManager[None]:
        """Only one process at a time starts or stops the nodes of a folder."""
        return locking(self._root / "lock")


@dataclass(frozen=True)
class _BrokerNode:
    """One broker, which is also a controller, and its folder."""

    root: Path
    id: int
    secured: Secured | None
    port: int
    controller_port: int
    certificate_port: int = 0

    @property
    def folder(self) -> Path:
        return self.root / f"node-{self.id}"

    @property
    def log(self) -> Path:
        return self.folder / "server.log"

    @property
    def address(self) -> str:
        return f"{HOST}:{self.port}"

    @property
    def certificate_address(self) -> str | None:
        return f"{HOST}:{self.certificate_port}" if self.secured else None

    @property
    def process(self) -> Process | None:
        return _process_in(self.folder)

    @property
    def pid(self) -> int | None:
        return process.pid if (process := self.process) else None

    @property
    def running(self) -> bool:
        return self.process is not None

    @property
    def classes(self) -> java.SharedClasses:
        return _classes(_SERVER, self.folder)

    def configure(self, cluster: _ClusterSettings, nodes: list[_BrokerNode]) -> None:
        self.folder.mkdir(mode=0o700, exist_ok=True)
        listeners = self.secured.listeners(self) if self.secured else properties.plain_listeners(self)
        text = properties.to_text(properties.of_node(self, nodes) | listeners | cluster.settings)
        _write(self.folder / "server.properties", text)

    def launch(self, keep: bool) -> None:
        for port in (self.port, self.controller_port, *((self.certificate_port,) if self.secured else ())):
            if not _is_free(port):
                raise SetupError(
                    f"port {port} of local broker {self.id} is taken by another process",
                    remedy=f"stop what listens on {HOST}:{port} and start again",
                )
        if self.log.exists():
            self.log.replace(self.folder / "server.previous.log")
        options = _BROKER if keep else (*_BROKER, *_SOON_OVER)
        command = _java_command(self.root, (*options, *self.classes.options), _SERVER, "server.properties")
        _write_json(self.folder / "process.json", asdict(spawn(command, self.folder, self.log)))

    def sees(self, brokers: int) -> bool:
        """Returns whether this broker answers now and sees that number of serving brokers."""
        # Late, since definitions and the CLI only ask for addresses: the client takes 0.3 s to import.
        from kafka import KafkaAdminClient
        from kafka.errors import KafkaError

        from sluice.resources.kafka.connection.zero_copy_transport import client_of

        try:
            with socket.create_connection((HOST, self.port), timeout=1):
                pass
            settings = {"request_timeout_ms": 3000, "bootstrap_timeout_ms": 3000}
            settings |= self.secured.client(ADMIN) if self.secured else {}
            client = client_of(KafkaAdminClient, bootstrap_servers=self.address, **settings)
            with contextlib.closing(client):
                known_brokers = client.describe_cluster()["brokers"]
                return sum(not broker.get("is_fenced", False) for broker in known_brokers) == brokers
        except (OSError, KafkaError):
            return False

    def await_certificate(self, keystore: Path, listeners: Sequence[str]) -> None:
        """Until the listeners show the certificate in that file. Raises SetupError."""
        wanted, deadline = last_certificate(keystore.read_bytes()).decode(), time.monotonic() + START_SECONDS
        ports = dict(zip(LISTENERS, (self.port, self.certificate_port, self.controller_port), strict=True))
        for port in (ports[listener] for listener in listeners):
            # Brokers take connections by several threads, which load it one after the other.
            while any(ssl.get_server_certificate((HOST, port), timeout=10) != wanted for _ in range(_LOOKS)):
                if time.monotonic() > deadline:
                    raise self.failure(f"did not load its certificate within {START_SECONDS:.0f} s")
                time.sleep(_POLL)

    def failure(self, what: str) -> SetupError:
        lines = self.log.read_text(errors="replace").splitlines() if self.log.exists() else []
        worst = [line for line in lines if " ERROR " in line or " FATAL " in line or line.startswith("Caused by")]
        excerpt = [*worst[:5], *(line for line in lines[-15:] if line not in worst[:5])]
        return SetupError(
            "\n".join([f"local broker {self.id} {what}; its log:", *(line[:400] for line in excerpt)]),
            remedy=f"fix the cause that it names; if its data is damaged, remove {self.root} and start again",
        )


def _format(nodes: list[_BrokerNode], cluster_id: str) -> None:
    """Give each new node its storage; a node that has it keeps it."""

    def classes(node: _BrokerNode) -> java.SharedClasses:
        return _classes(_STORAGE_TOOL, node.folder)

    new = [node for node in nodes if not (node.folder / "data" / "meta.properties").exists()]
    arguments = [_STORAGE_TOOL, "format", "-t", cluster_id, "-c", "server.properties"]
    with contextlib.ExitStack() as ends:
        running = []
        for node in new:
            with node.log.open("wb") as sink:
                users = [f"@{node.secured.scram_arguments()}"] if node.secured else []
                command = _java_command(node.root, (*_COMMAND, *classes(node).options), *arguments, *users)
                process = subprocess.Popen(command, cwd=node.folder, stdout=sink, stderr=subprocess.STDOUT)
                running.append(ends.enter_context(process))
                ends.callback(process.kill)  # if we are interrupted
        codes = [process.wait() for process in running]
    for secured in {node.secured for node in new if node.secured}:
        secured.scram_arguments().unlink()
    for node, code in zip(new, codes, strict=True):
        if code:
            raise node.failure("could not format its storage")
        classes(node).keep()


def _await_answers(nodes: list[_BrokerNode], brokers: int | None = None) -> None:
    deadline = time.monotonic() + START_SECONDS
    for node in nodes:
        while not node.sees(brokers or len(nodes)):
            if ended := next((member for member in nodes if not member.running), None):
                raise ended.failure("ended while it was starting")
            if time.monotonic() > deadline:
                raise node.failure(f"did not answer within {START_SECONDS:.0f} s")
            time.sleep(_POLL)


def _process_in(folder: Path) -> Process | None:
    """The process that runs the node of this folder now."""
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
        document = json.loads((folder / "process.json").read_text())
        process = Process(int(document["pid"]), str(document["born"]))
        return process if process.pid > 0 and process.alive else None
    return None


def _end(folders: Iterable[Path], grace: float) -> None:
    """End the nodes of these folders, all at the same time."""
    running = [(folder, process) for folder in folders if (process := _process_in(folder))]
    for _, process in running:
        process.send(signal.SIGTERM if grace else signal.SIGKILL)
    for folder, process in running:
        if process.end(grace) and grace:
            _classes(_SERVER, folder).keep()


def _java_command(root: Path, options: Sequence[str], *main: str) -> list[str]:
    config = root / "log4j2.xml"
    _write(config, _LOG4J)
    return [
        *(str(java.find_java()), *options, "-Djava.awt.headless=true"),
        f"-Dlog4j2.configurationFile={config.as_uri()}",
        *("-cp", f"{_jars()}/*", *main),
    ]


def _classes(main: str, spare: Path) -> java.SharedClasses:
    """Of one of Kafka's programs; a run that archives them leaves that in the `spare` folder."""
    return java.SharedClasses(_jars(), main, spare / "classes.jsa")


def _jars(report: Reporter = lambda progress: None) -> Path:
    return java.jars(f"kafka-{VERSION}", ARTIFACTS, report)


def free_ports(brokers: int, of_each: int) -> tuple[tuple[int, ...], ...]:
    """Returns `of_each` free ports for each broker, below the range of outgoing connections."""
    candidates = iter(random.sample(_PORTS, len(_PORTS)))
    free = (port for port in candidates if _is_free(port))
    return tuple(tuple(islice(free, of_each)) for _ in range(brokers))


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
    return True


def _new_cluster_id() -> str:
    """Returns a random id in Kafka's format, without a leading dash, which its tools would read as an option."""
    while (cluster_id := base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")).startswith("-"):
        pass
    return cluster_id


def _read_cluster(root: Path) -> _ClusterSettings | None:
    path = root / "cluster.json"
    try:
        document: dict[str, Any] = json.loads(path.read_text())
        ports = tuple(tuple(int(port) for port in ports) for ports in document["ports"])
        settings = {str(key): str(value) for key, value in document["settings"].items()}
        version, cluster_id, secure = (
            str(document["version"]),
            str(document["cluster_id"]),
            bool(document.get("secure")),
        )
        return _ClusterSettings(version, cluster_id, bool(document["keep"]), ports, settings, secure)
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise SetupError(f"{path} cannot be read: {error!r}", remedy=f"remove {root} and start again") from error


def _write_json(path: Path, value: dict[str, Any]) -> None:
    _write(path, json.dumps(value, indent=1))


def _write(path: Path, text: str) -> None:
    """Replace a file whole; only we may read it, since settings can hold the passwords of a listener."""
    partial = path.with_suffix(f".{os.getpid()}.partial")
    partial.touch(mode=0o600)
    partial.write_text(text)
    os.replace(partial, path)


if __name__ == "__main__":
    sys.stdin.read()
    with contextlib.suppress(SetupError):
        LocalKafka.attach(Path(sys.argv[1])).stop()
