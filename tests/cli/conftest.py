"""The command line as a person or a program meets it: arguments in; exit code, stdout and stderr out."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from sluice.cli.app.invocation import Body, OpenPorts, Session, build_arguments
from sluice.cli.main import main
from sluice.cli.terminal.output import CommandOutput
from sluice.pipelines.operating.migrate_offsets import Stores
from sluice.testing.group import MemoryGroup, MemoryGroups
from tests.resources.kafka.tools import free_port

if TYPE_CHECKING:
    from sluice.pipelines.feed.feed import Feed
    from sluice.pipelines.ports import Groups, Ports
    from tests.assets.world import World

FEED = """\
kafka:
  bootstrap: 127.0.0.1:9
  bootstrap_timeout_ms: 300
topics: orders
start: earliest
"""


@dataclass(frozen=True)
class Said:
    code: int
    out: str
    err: str

    @property
    def document(self) -> dict[str, Any]:
        """The one JSON document on stdout; fails when there is anything else."""
        found = json.loads(self.out)
        assert isinstance(found, dict)
        return found

    @property
    def runs(self) -> list[dict[str, Any]]:
        """The runs of the only feed in the document of `sluice run`."""
        (feed,) = self.document["feeds"]
        return list(feed["runs"])

    @property
    def run(self) -> dict[str, Any]:
        """The only run."""
        (run,) = self.runs
        return run


Sluice = Callable[..., Said]


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project with one feed whose Kafka does not answer; commands run in it."""
    for name in ("SLUICE_PROJECT", "KAFKA_BOOTSTRAP", "DAGSTER_HOME"):
        monkeypatch.delenv(name, raising=False)
    root = tmp_path / "project"
    (root / "feeds").mkdir(parents=True)
    (root / "feeds" / "orders.yaml").write_text(FEED)
    monkeypatch.chdir(root)
    return root


@pytest.fixture
def sluice(capfd: pytest.CaptureFixture[str]) -> Sluice:
    """Runs a command in this process: `sluice("plan", "orders")`."""

    def run(*arguments: str) -> Said:
        capfd.readouterr()
        code = main(arguments)
        return Said(code, *capfd.readouterr())

    return run


@pytest.fixture
def unused_port() -> Callable[[], int]:
    """A function that names a loopback port that nobody listens on."""
    return free_port


# -- commands over ports in memory


@dataclass(frozen=True)
class Over(Session):
    """A session whose edges are a world's, and whose Kafka has `groups`."""

    world: World | None = None
    groups: MemoryGroups = field(default_factory=lambda: MemoryGroups("sluice-orders", MemoryGroup()))

    def open_ports(self, feed: Feed) -> AbstractContextManager[Ports]:
        assert self.world is not None
        return self.world.open_ports(feed)

    @contextmanager
    def shared_edges(self, feeds: Iterable[Feed]) -> Iterator[OpenPorts]:
        yield self.open_ports

    def begin_engine(self, feed: Feed, catching_up: Sequence[Feed] = (), open_ports: OpenPorts | None = None) -> None:
        """Tasks run in this process."""

    def open_groups(self, feed: Feed) -> AbstractContextManager[Groups]:
        return nullcontext(self.groups)

    def open_stores(self, feed: Feed) -> AbstractContextManager[Stores]:
        assert self.world is not None
        return nullcontext(Stores(feed.group, self.world.other_store or self.world.group, self.groups))


@dataclass(frozen=True)
class Told:
    code: int
    document: dict[str, Any]
    text: str

    @property
    def runs(self) -> list[dict[str, Any]]:
        """The runs of the only feed in the document of `sluice run`."""
        (feed,) = self.document["feeds"]
        return list(feed["runs"])

    @property
    def run(self) -> dict[str, Any]:
        """The only run."""
        (run,) = self.runs
        return run


Tell = Callable[..., Told]


def run_body(body: Body, session: Session, *arguments: Any, **options: Any) -> int | None:
    """Runs a command's function with options by name, as on the command line."""
    return body(session, *arguments, **build_arguments(body, options))


@pytest.fixture
def world(tmp_path: Path) -> World:
    from tests.assets.world import World  # late: it loads Dagster, which most commands do without

    return World(tmp_path)


@pytest.fixture
def groups(world: World) -> MemoryGroups:
    """Every group of the world's Kafka."""
    return MemoryGroups("sluice-orders", world.group)


@pytest.fixture
def tell(
    world: World, groups: MemoryGroups, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Tell:
    """Runs a command's body twice over the world: for its document, then for its text (`text=False`: only once)."""
    monkeypatch.setenv("COLUMNS", "140")

    def call(body: Body, *arguments: Any, text: bool = True, **options: Any) -> Told:
        documents = io.StringIO()
        session = Over(CommandOutput(documents), world.project.root, False, world, groups)
        code = run_body(body, session, *arguments, **options) or 0
        capfd.readouterr()
        if text:
            run_body(body, Over(CommandOutput(), world.project.root, False, world, groups), *arguments, **options)
        return Told(code, json.loads(documents.getvalue()), capfd.readouterr().out)

    return call
