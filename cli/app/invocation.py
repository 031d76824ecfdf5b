"""One invocation of `sluice`: the options that every command has, and how a function becomes a command.

    @command(app)
    def plan(session: Session, feed: FeedName) -> int | None: ...

The function gets a session instead of the common options and returns its exit code (None: 0). A parameter whose type
is a dataclass stands for several options, one for each field; see `cli.options`.
"""

from __future__ import annotations

import functools
import inspect
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer
from typer.core import TyperCommand, TyperGroup

from sluice.cli.app import completers
from sluice.cli.app.feed_choice import All, FeedNames, run_each
from sluice.cli.app.parameters import flag, option
from sluice.cli.terminal.output import CommandOutput, safe
from sluice.cli.terminal.process import fast_imports
from sluice.pipelines.errors import UsageError
from sluice.pipelines.util import logs

if TYPE_CHECKING:
    from dagster import DagsterInstance

    from sluice.assets.specs.feed_files import FeedFiles
    from sluice.pipelines.feed.feed import Feed
    from sluice.pipelines.operating.feed_status import OpenPorts
    from sluice.pipelines.operating.migrate_offsets import Stores
    from sluice.pipelines.ports import Groups, Ports, Target
    from sluice.resources.project import Project

Body = Callable[..., int | None]

ProjectFolder = Annotated[
    Path | None, option("--project", "FOLDER", "The project: the folder with feeds/, or a folder below it.")
]
Json = Annotated[bool, flag("--json", "Print a JSON document instead of tables.")]
Debug = Annotated[bool, flag("--debug", "Show logs, and tracebacks of errors.")]
LogFormat = Annotated[
    str | None,
    option(
        "--log-format",
        "text|json",
        "Format of logs on stderr and in the log of the run.",
        show_default=f"${logs.VARIABLE}, or text",
    ),
]
_COMMON: dict[str, tuple[Any, Any]] = {
    "context": (typer.Context, inspect.Parameter.empty),
    "project": (ProjectFolder, None),
    "as_json": (Json, False),
    "debug": (Debug, False),
    "log_format": (LogFormat, None),
}

FeedName = Annotated[
    str,
    typer.Argument(
        metavar="FEED",
        help="Name of a feed, as in feeds/FEED.yaml.",
        show_default=False,
        autocompletion=completers.complete_feeds,
    ),
]

SomeFeeds = Annotated[str, "names or patterns"]
"""The name of a feed in a command that takes several, by names and patterns, and is called for each."""
EachFeed = Annotated[str, "names, patterns or --all"]
"""As SomeFeeds, or all feeds of the project by --all."""


@dataclass(frozen=True)
class Session:
    """Everything that a command works with."""

    terminal: CommandOutput
    folder: Path | None
    debug: bool
    dagster: bool = field(default=True, kw_only=True)
    """Whether the command may load Dagster: its runs use it, and it knows runs that have ended."""

    @functools.cached_property
    def project(self) -> Project:
        """The project around the folder given, or the current one. Raises UsageError."""
        from sluice.resources.project import Project

        return Project.find(self.folder)

    @functools.cached_property
    def files(self) -> FeedFiles:
        """The project's feed files, each by itself: a broken one does not stop a command for another."""
        with fast_imports():
            from sluice.assets.specs.feed_files import read_feeds

        return read_feeds(self.project, self.project.environ())

    def feed(self, name: str) -> Feed:
        """Returns one feed. Raises FeedError for an invalid or missing file."""
        return self.files.feed(name)

    def find_dataset(self, name: str) -> Feed:
        """Returns one feed, or one output of a split feed by `feed.output`. Raises FeedError as `feed`."""
        return self.files.find_dataset(name)

    def begin_engine(self, feed: Feed, catching_up: Sequence[Feed] = (), open_ports: OpenPorts | None = None) -> None:
        """Start the feed's engine on this machine while the caller loads Dagster and plans the batch.

        Where feeds only catch up, it starts if one of them may have something pending, by ports of `open_ports`. While
        this process has one thread, the pool of workers is forked from it and shares its imports.
        """
        from sluice.pipelines.batch.survey import has_pending
        from sluice.pipelines.model.receipts import EngineKind

        def is_pending(one: Feed) -> bool:
            with (open_ports or self.open_ports)(one) as ports:
                return has_pending(one, ports)

        def is_needed() -> bool:
            alike = [f for f in catching_up if f.spark == feed.spark]
            return not alike or any(map(is_pending, alike))

        if feed.engine is EngineKind.SPARK:
            from sluice.resources.spark import engine

            engine.begin(feed.spark, is_needed)
        else:
            from sluice.resources import local_engine

            local_engine.begin(is_needed)

    @contextmanager
    def open_ports(self, feed: Feed) -> Iterator[Ports]:
        """The feed's ports, with what Dagster knows about runs; no connection is opened before the first question."""
        from sluice.resources.open_ports import open_ports

        with open_ports(feed) as ports:
            yield self._add_dagster_runs(ports)

    @contextmanager
    def share_ports(self, feeds: Iterable[Feed]) -> Iterator[OpenPorts]:
        """`open_ports` for many feeds: those of one Kafka share connections and answers."""
        with fast_imports():
            from sluice.resources.open_ports import share_ports

        with share_ports(feeds) as open_one:

            @contextmanager
            def open_informed(feed: Feed) -> Iterator[Ports]:
                with open_one(feed) as ports:
                    yield self._add_dagster_runs(ports)

            yield open_informed

    def _add_dagster_runs(self, ports: Ports) -> Ports:
        if not self.dagster:
            return ports
        from sluice.resources.liveness import Informed

        return replace(ports, liveness=Informed(ports.liveness, self._list_ended_runs))

    def open_dagster(self) -> AbstractContextManager[DagsterInstance | None]:
        """The project's Dagster; None where it is not installed."""
        if find_spec("dagster") is None:
            return nullcontext()
        from sluice.assets.instance.instance import open_instance

        return open_instance(self.project)

    def _list_ended_runs(self, runs: Iterable[str]) -> Mapping[str, str]:
        """Returns the final statuses of runs that the project's Dagster knows as ended.

        Dagster is loaded only for this, if it is installed and in use.
        """
        if find_spec("dagster") is None or not self.project.dagster_home.is_dir():
            return {}
        from sluice.assets.instance.instance import ended_runs

        return ended_runs(self.project, runs)

    def open_groups(self, feed: Feed) -> AbstractContextManager[Groups]:
        """All groups of the store that the feed's offsets are in; no connection is opened before the first question."""
        from sluice.resources.open_ports import open_groups

        return open_groups(feed)

    def open_stores(self, feed: Feed) -> AbstractContextManager[Stores]:
        """Both stores of the feed's group. Raises UsageError without ZooKeeper's address."""
        from sluice.resources.open_ports import open_stores

        return open_stores(feed)

    def open_target(self, feed: Feed, topic: str) -> AbstractContextManager[Target]:
        """A topic of the feed's Kafka to ask about."""
        from sluice.resources.open_ports import open_target

        return open_target(feed, topic)


def command(app: typer.Typer, name: str | None = None) -> Callable[[Body], Body]:
    """Register the function as a command of `app`; it gains `--project`, `--json`, `--debug` and `--log-format`.

    Paragraphs of its docstring that begin with `$` are examples.
    """

    def register(body: Body) -> Body:
        @functools.wraps(body)
        def run(
            context: typer.Context,
            project: Path | None,
            as_json: bool,
            debug: bool,
            log_format: str | None,
            **options: Any,
        ) -> int | None:
            _log(debug, log_format)
            session = Session(context.obj, project, debug)
            if not takes_each:
                return body(session, **build_arguments(body, options))

            def run_one(feed: str) -> int | None:
                return body(session, **build_arguments(body, options | {"feed": feed}))

            everything, names = options.pop("every_feed", None), options["feed"] or ()
            return run_each(session.files, names, run_one, session.terminal, everything=everything)

        takes_each = any(p.annotation in (EachFeed, SomeFeeds) for p in _list_parameters(body))
        signature = _build_signature(_list_parameters(body))
        run.__signature__ = signature  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in signature.parameters.values()}
        del run.__wrapped__
        # Paragraphs flow, `$ …` examples keep their lines.
        paragraphs = inspect.cleandoc(body.__doc__ or "").split("\n\n")
        text = "\n\n".join(f"\b\n{p}" if p.startswith("$") else p.replace("\n", " ") for p in paragraphs)
        app.command(name, cls=Command, help=text, no_args_is_help=False)(run)
        return body

    return register


def _build_signature(parameters: Iterable[inspect.Parameter]) -> inspect.Signature:
    own = [option.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in parameters for option in _expand(p)]
    common = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
        for name, (annotation, default) in _COMMON.items()
    ]
    return inspect.Signature(own + common)


def _expand(parameter: inspect.Parameter) -> Iterator[inspect.Parameter]:
    """The parameter, or if its type is a dataclass, those of the fields."""
    if parameter.annotation in (EachFeed, SomeFeeds):
        yield parameter.replace(annotation=FeedNames, default=None)
        if parameter.annotation == EachFeed:
            yield parameter.replace(name="every_feed", annotation=All, default=False)
        return
    if not is_dataclass(parameter.annotation):
        yield parameter
        return
    for one in _list_fields(parameter):
        yield from _expand(one)


def build_arguments(body: Body, options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments of a command's function. Options that are missing keep their defaults.

    Raises TypeError for an unknown option.
    """
    parameters = _list_parameters(body)
    if unknown := options.keys() - _build_signature(parameters).parameters.keys():
        raise TypeError(f"{body.__name__}() has no option {min(unknown)}")
    return _build_arguments(parameters, options)


def _build_arguments(parameters: Iterable[inspect.Parameter], options: Mapping[str, Any]) -> dict[str, Any]:
    arguments: dict[str, Any] = {}
    for parameter in parameters:
        if isinstance(kind := parameter.annotation, type) and is_dataclass(kind):
            arguments[parameter.name] = kind(**_build_arguments(_list_fields(parameter), options))
        elif parameter.name in options:
            arguments[parameter.name] = options[parameter.name]
    return arguments


def _list_parameters(body: Body) -> list[inspect.Parameter]:
    return [p for p in inspect.signature(body, eval_str=True).parameters.values() if p.name != "session"]


def _list_fields(parameter: inspect.Parameter) -> list[inspect.Parameter]:
    hints = get_type_hints(parameter.annotation, include_extras=True)
    return [
        inspect.Parameter(
            f.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if f.default is MISSING else f.default,
            annotation=hints[f.name],
        )
        for f in fields(parameter.annotation)
    ]


class Harmless(logging.Formatter):
    """Escapes control characters: logs of libraries contain text from brokers and stores."""

    def format(self, record: logging.LogRecord) -> str:
        return safe(super().format(record))


def _log(debug: bool, log_format: str | None) -> None:
    """Logs go to stderr. Libraries' warnings about retries are dropped: Sluice reports the error, if any."""
    wanted = log_format or os.environ.get(logs.VARIABLE) or logs.FORMATS[0]
    if wanted not in logs.FORMATS:
        where = "" if log_format else f" in ${logs.VARIABLE}"
        raise UsageError(f"unknown log format {wanted!r}{where}", remedy=f"use {' or '.join(logs.FORMATS)}")
    if log_format:
        os.environ[logs.VARIABLE] = log_format  # for what this process starts
    handler: logging.Handler = logging.StreamHandler()
    handler.setFormatter(Harmless("%(asctime)s %(name)s %(message)s"))
    if logs.as_json():
        handler = logs.Line(also=os.dup(2))
        logging.getLogger(logs.OURS).setLevel(logging.INFO)
    logging.basicConfig(level=logging.INFO if debug else logging.WARNING, handlers=[handler])
    for noisy in ("kafka", "py4j"):
        logging.getLogger(noisy).setLevel(logging.INFO if debug else logging.CRITICAL)


class Command(TyperCommand):
    """A command whose help shows arguments by their metavars: `FEED`, or `[FEED]` if it is optional."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        arguments = (p for p in self.get_params(ctx) if p.param_type_name == "argument")
        return ["[OPTIONS]", *map(_format_argument, arguments)]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        for title, kind in (("Arguments", "argument"), ("Options", "option")):
            parameters = [p for p in self.get_params(ctx) if p.param_type_name == kind]
            rows = [row for p in parameters if (row := p.get_help_record(ctx))]
            if kind == "argument":  # without the type
                rows = [(_get_name(p), text) for p, (_, text) in zip(parameters, rows, strict=True)]
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)


def _format_argument(argument: Any) -> str:
    name = _get_name(argument) + ("..." if argument.nargs != 1 else "")
    return name if argument.required else f"[{name}]"


def _get_name(argument: Any) -> str:
    return str(argument.metavar or argument.name.upper()).strip("[]…")


class CommandGroup(TyperGroup):
    """A group of commands. Its help shows the first sentence of each in full, on any terminal."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        commands = ((name, self.get_command(ctx, name)) for name in self.list_commands(ctx))
        texts = {name: c.get_short_help_str(200) for name, c in commands if c and not c.hidden}
        self._section(formatter, "Commands", texts)

    @staticmethod
    def _section(formatter: Any, title: str, texts: Mapping[str, str], widest: int = 0) -> None:
        with formatter.section(title):
            formatter.write_dl([(name.ljust(widest), text) for name, text in texts.items()])


def make_group(text: str, *examples: str) -> typer.Typer:
    """Returns a group of commands with a help text and example commands."""
    text = "\n".join((f"{text}\n\n\b", *(f"$ {example}" for example in examples)))
    return typer.Typer(cls=CommandGroup, help=text, no_args_is_help=True)
