"""Fixtures that run commands: arguments in; exit code, stdout and stderr, or the document and the text, out."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import pytest

from sluice.cli.app.invocation import Body, Session, build_arguments
from sluice.cli.main import main
from sluice.cli.terminal.output import CommandOutput
from sluice.pipelines.operating.migrate_offsets import Stores
from sluice.testing.group import MemoryGroup, MemoryGroups
from tests.resources.kafka.tools import free_port

if TYPE_CHECKING:
    from sluice.pipelines.feed.feed import Feed
    from sluice.pipelines.operating.feed_status import OpenPorts
    from sluice.pipelines.ports import Groups, Ports
    from tests.assets.world import World

FEED = """\
kafka:
  bootstrap: 127.0.0.1:9
  bootstrap_timeout_ms: 300
topics: orders
start: earliest
"""


class OfRuns:
    """The runs in a document of `sluice run`."""

    document: Any

    @property
    def runs(self) -> list[dict[str, Any]]:
        """The runs of the only feed."""
        (feed,) = self.document["feeds"]
        return list(feed["runs"])

    @property
    def run(self) -> dict[str, Any]:
        """The only run."""
        (run,) = self.runs
        return run


@dataclass(frozen=True)
class CommandResult(OfRuns):
    """Exit code and output of a command."""

    code: int
    out: str
    err: str

    @property
    def document(self) -> dict[str, Any]:
        """The JSON document on stdout; fails if there is any other output."""
        document = json.loads(self.out)
        assert isinstance(document, dict)
        return document


Sluice = Callable[..., CommandResult]


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
    """Return a function that runs a command in this process: `sluice("plan", "orders")`."""

    def run(*arguments: str) -> CommandResult:
        capfd.readouterr()
        code = main(arguments)
        return CommandResult(code, *capfd.readouterr())

    return run


@pytest.fixture(autouse=True)
def pinned_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare every document that a command prints with the golden file."""
    original = CommandOutput.print_document

    def print_document(self: CommandOutput, result: object = MappingProxyType({}), /, **more: object) -> None:
        if self.json:
            from tests.cli.documents import check_printed  # late: it loads all commands

            check_printed(result, more)
        original(self, result, **more)

    monkeypatch.setattr(CommandOutput, "print_document", print_document)


@pytest.fixture
def unused_port() -> Callable[[], int]:
    """Return a function that finds a loopback port without a listener."""
    return free_port


# -- commands with ports in memory


@dataclass(frozen=True)
class WorldSession(Session):
    """A session with the ports of `world`; its Kafka has `groups`."""

    world: World | None = None
    groups: MemoryGroups = field(default_factory=lambda: MemoryGroups("sluice-orders", MemoryGroup()))

    def open_ports(self, feed: Feed) -> AbstractContextManager[Ports]:
        assert self.world is not None
        return self.world.open_ports(feed)

    @contextmanager
    def share_ports(self, feeds: Iterable[Feed]) -> Iterator[OpenPorts]:
        yield self.open_ports

    def begin_engine(self, feed: Feed, catching_up: Sequence[Feed] = (), open_ports: OpenPorts | None = None) -> None:
        """Do nothing: tasks run in this process."""

    def open_groups(self, feed: Feed) -> AbstractContextManager[Groups]:
        return nullcontext(self.groups)

    def open_stores(self, feed: Feed) -> AbstractContextManager[Stores]:
        assert self.world is not None
        return nullcontext(Stores(feed.group, self.world.other_store or self.world.group, self.groups))


@dataclass(frozen=True)
class BodyResult(OfRuns):
    """Exit code, JSON document and text of a command's function."""

    code: int
    document: dict[str, Any]
    text: str


Invoke = Callable[..., BodyResult]


def run_body(body: Body, session: Session, *arguments: Any, **options: Any) -> int | None:
    """Run a command's function with options by name, as on the command line."""
    return body(session, *arguments, **build_arguments(body, options))


@pytest.fixture
def world(tmp_path: Path) -> World:
    from tests.assets.world import World  # late: it loads Dagster, which most commands do without

    return World(tmp_path)


@pytest.fixture
def groups(world: World) -> MemoryGroups:
    """All consumer groups of the world's Kafka."""
    return MemoryGroups("sluice-orders", world.group)


@pytest.fixture
def invoke(
    world: World, groups: MemoryGroups, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Invoke:
    """Run a command's function twice on the world: for its document, then for its text (`text=False`: only once)."""
    monkeypatch.setenv("COLUMNS", "140")

    def call(body: Body, *arguments: Any, text: bool = True, **options: Any) -> BodyResult:
        documents = io.StringIO()
        session = WorldSession(CommandOutput(documents), world.project.root, False, world, groups)
        code = run_body(body, session, *arguments, **options) or 0
        capfd.readouterr()
        if text:
            run_body(
                body, WorldSession(CommandOutput(), world.project.root, False, world, groups), *arguments, **options
            )
        return BodyResult(code, json.loads(documents.getvalue()), capfd.readouterr().out)

    return call
