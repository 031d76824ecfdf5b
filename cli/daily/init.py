"""`sluice init`: writes a feed file for a topic from a sample of its records."""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import RenderableType

from sluice.cli.app import completers
from sluice.cli.app.invocation import Session, command
from sluice.cli.app.parameters import flag, option
from sluice.cli.terminal.output import facts, good, heading, indent, limit_rows, table, warn
from sluice.cli.terminal.text_layout import count, size
from sluice.pipelines.errors import FeedError, UnknownTopic, UsageError
from sluice.pipelines.model.kafka import Isolation
from sluice.pipelines.util.units import HOUR, many, show_instant

if TYPE_CHECKING:
    from sluice.pipelines.feed.feed import Feed
    from sluice.pipelines.feed.kafka_section import KafkaSettings
    from sluice.pipelines.feed.load import SchemaAsked
    from sluice.pipelines.operating.propose_feed import FeedProposal, Fit, OutputProposal, TopicSample
    from sluice.pipelines.ports import Cluster

SAMPLE_EVENTS = 20_000
LOCAL_TOPIC = "orders"
_WORKSPACE = """# Code location of `dagster dev` and `dagster-webserver`: every feed of this project.
load_from:
  - python_module:
      module_name: sluice.assets.definitions
      working_directory: .
      location_name: sluice
"""
_STATE = ".sluice/"


def register(app: typer.Typer) -> None:
    command(app)(init)


@dataclass(frozen=True)
class InitOptions:
    """Options of `sluice init`."""

    bootstrap: Annotated[
        str | None,
        option("--bootstrap", "HOST:PORT", "Kafka's addresses.", show_default="$KAFKA_BOOTSTRAP, or asked for"),
    ] = None
    topic: Annotated[
        str | None,
        option(
            "--topic", "TOPIC", "What to read.", show_default="asked for", autocompletion=completers.complete_topics
        ),
    ] = None
    local: Annotated[bool, flag("--local", "Start a local Kafka here, with sample events in the topic `orders`.")] = (
        False
    )
    settings: Annotated[
        list[str] | None,
        option(
            "--kafka",
            "KEY=VALUE",
            "Another key of the feed's `kafka:` section, such as sasl_plain_password='${PASSWORD}'; repeatable.",
        ),
    ] = None
    registry: Annotated[
        list[str] | None,
        option(
            "--registry",
            "URL",
            "The registry of the schemas that values name; or another KEY=VALUE of the section; repeatable.",
            show_default="$SCHEMA_REGISTRY_URL",
        ),
    ] = None
    group: Annotated[str, option("--group", "GROUP", "The consumer group.", show_default="sluice-FEED")] = ""
    raw: Annotated[bool, flag("--raw", "Land bytes as they are, without a schema.")] = False


def init(
    session: Session,
    feed: Annotated[
        str | None,
        typer.Argument(metavar="FEED", help="The new feed's name.", show_default="after the topic"),
    ] = None,
    options: InitOptions = InitOptions(),
) -> None:
    """Write a feed file for a topic, from a sample of its records.

    It samples the topic's newest records, proposes format, types, start and window, and a split if a header or field
    tells records of several shapes apart, with the reasons in the file. Values that name a schema of a registry get
    that schema, as schemas/FEED.avsc, .proto or .json, and a split by message if they are of several. It writes
    feeds/FEED.yaml, and .gitignore and workspace.yaml where there are none (in a Dagster project of your own no
    workspace.yaml). Kafka is only read: no group is joined, and no offset moves. On a terminal it asks for what you
    leave out.

    $ sluice init --local
    $ sluice init --bootstrap kafka.example:9092 --topic orders
    $ sluice init --topic orders --registry https://registry.example:8081
    $ sluice init shop_orders --bootstrap kafka.example:9093 --topic orders --kafka security_protocol=SSL
    """
    from sluice.pipelines.feed.problems import NAMES
    from sluice.pipelines.feed.project_files import load_fleet
    from sluice.pipelines.feed.sections import LOCAL_REGISTRY, NAME_PATTERN, REGISTRY
    from sluice.pipelines.feed.topic_selection import TopicFilter
    from sluice.pipelines.operating.feed_text import FileSettings, feed_text
    from sluice.pipelines.operating.propose_feed import fit_sample, name_feed, propose, refer_to_registry
    from sluice.reading import list_overridden
    from sluice.resources.lake import open_lake
    from sluice.resources.open_ports import open_cluster
    from sluice.resources.registry.proposal import propose_by_registry

    if feed is not None and not re.fullmatch(NAME_PATTERN, feed):
        raise UsageError(f"{feed!r} is not a feed's name", remedy=f"use {NAMES}: sluice init {name_feed(feed)}")
    here = (session.folder or Path(os.environ.get("SLUICE_PROJECT") or Path.cwd())).resolve()
    is_feeds_folder = here.name == "feeds" and not (here / "feeds").is_dir() and any(here.glob("*.yaml"))
    root = here.parent if is_feeds_folder else here
    section = _kafka_section(session, root, options)
    with _feeds_folder(root):
        if options.local:
            _start_local(session, root)
        probe = _probe(root, section)
        with open_cluster(probe.kafka) as cluster:
            topic = LOCAL_TOPIC if options.local and options.topic is None else options.topic
            chosen = _choose_topic(session, cluster, probe.kafka, topic)
            name = feed or name_feed(chosen)
            path = root / "feeds" / f"{name}.yaml"
            if path.exists():
                raise UsageError(f"{path} is there already", remedy="give the new feed another name: sluice init NAME")
            with session.terminal.working(f"sampling {chosen}"):
                reading = probe.model_copy(update={"topics": TopicFilter(names=(chosen,))})
                sample = _read_sample(reading, cluster, chosen)
        with session.terminal.working("comparing the records"):
            proposal, schemas, writers = propose(sample.records, raw=options.raw), dict[Path, str](), None
        registry = dict(_pair(s, "--registry") for s in options.registry or ())
        number = None if options.raw else sample.schema_number
        if number is not None and not (registry or _environ(root).keys() & {REGISTRY, LOCAL_REGISTRY}):
            proposal = refer_to_registry(proposal, number)
        elif number is not None:
            with session.terminal.working("querying the schema registry"):
                request = replace(_request_schema(root, chosen, registry), schema_file=root / "schemas" / name)
                proposal, schemas, writers = propose_by_registry(request, sample, number, open_lake(probe))
        engine, today = load_fleet(root, _environ(root)).engine, time.strftime("%Y-%m-%d", time.gmtime())
        settings = FileSettings(section, registry, options.group, engine, today)
        created = _create_feed(root, path, {**schemas, path: feed_text(sample, proposal, settings)})
        with session.terminal.working("landing the sample in memory"):
            fit = fit_sample(created, sample.batches, writers) if created.columns or created.split else None
            warning = list_overridden(created)
        text = feed_text(sample, proposal, settings, fit)
        path.write_text(text)
        written = [path, *schemas, *_beside(root)]
    lines = [*_view(sample, proposal, fit), *_view_limit(created, fit), *([warn(warning)] if warning else [])]
    session.terminal.show(heading(f"Feed {name}"), *lines, *_view_next(name, root, written))
    typed = proposal.outputs[0] if not proposal.by and proposal.format.value != "raw" else None
    session.terminal.print_document(
        feed=name,
        written=written,
        text=text,
        topic=chosen,
        partitions=len(sample.partitions),
        offsets=sample.offsets,
        format=proposal.format.value,
        columns=typed and {column.name: column.type for column in typed.columns},
        extra=typed and typed.extra,
        envelope=proposal.envelope,
        key=proposal.key,
        split=proposal.by,
        rest=proposal.rest,
        outputs=proposal.outputs,
        sampled=proposal.sampled,
        fit=fit and fit.landed,
        misfits=fit.misfits if fit else (),
    )
    if fit and not fit.landed and proposal.sampled:
        raise typer.Exit(1)


def _kafka_section(session: Session, root: Path, options: InitOptions) -> dict[str, str]:
    """The feed's `kafka:` section as it will be written; empty where the project's local Kafka serves."""
    section, bootstrap = dict(_pair(setting, "--kafka") for setting in options.settings or ()), options.bootstrap
    if options.local:
        if bootstrap or section:
            raise UsageError("--local names the Kafka by itself", remedy="leave out --bootstrap and --kafka")
        return {}
    if bootstrap:
        return {"bootstrap": bootstrap} | section
    if session.folder is None and _environ(root).keys() & {"KAFKA_BOOTSTRAP", "SLUICE_LOCAL_KAFKA"}:
        return section
    address = _ask(session, "Kafka's address, as host:port")
    if address is None:
        raise UsageError(
            "which Kafka?",
            remedy="--bootstrap HOST:PORT, or $KAFKA_BOOTSTRAP; or --local for one on this machine with sample events",
        )
    return {"bootstrap": address} | section


def _pair(text: str, source: str) -> tuple[str, str]:
    from sluice.pipelines.feed.kafka_section import SECRETS

    key, equals, value = text.partition("=")
    if source == "--registry" and "://" in key:
        return "url", text
    if not equals or not key:
        such = "security_protocol=SSL" if source == "--kafka" else "username=reader"
        raise UsageError(f"{source} {key} has no value", remedy=f"write KEY=VALUE, such as {such}")
    key = key.strip()
    if key in {*SECRETS, "password", "token"} and not value.startswith("${") and (key != "proxy_url" or "@" in value):
        raise UsageError(
            f"{source} {key} would be written to the feed file as it is",
            remedy=f"set a variable, and write {source} {key}='${{VARIABLE}}', or '${{file:/run/secrets/NAME}}'",
        )
    return key, value


def _environ(root: Path) -> Mapping[str, str]:
    from sluice.resources.project import Project

    return Project(root).environ()


def _ask(session: Session, what: str) -> str | None:
    """Returns an answer from the terminal; None without a terminal and at the end of input."""
    if session.terminal.json or not (sys.stdin.isatty() and sys.stderr.isatty()):
        return None
    try:
        return typer.prompt(what, err=True).strip() or None
    except typer.Abort:
        session.terminal.note("")
        return None


@contextmanager
def _feeds_folder(root: Path) -> Iterator[None]:
    """The folder of feeds; it goes again where the block fails and nothing is in it."""
    folder = root / "feeds"
    folder.mkdir(parents=True, exist_ok=True)
    try:
        yield
    except BaseException:
        with suppress(OSError):
            folder.rmdir()
        raise


def _probe(root: Path, section: Mapping[str, str]) -> Feed:
    """A feed of no topic yet, with the `kafka:` section as a feed file's reader takes it. Raises FeedError."""
    from sluice.pipelines.feed.load import load_feed
    from sluice.pipelines.operating.feed_text import section_text

    text = f"{section_text('kafka', section)}feed: sluice_init\ntopics: any\nstart: earliest\n"
    with _write_probe(root, text) as file:
        return load_feed(file, _environ(root))


@contextmanager
def _write_probe(root: Path, text: str) -> Iterator[Path]:
    """A feed file for the block. A FeedError does not name it: it is gone."""
    with NamedTemporaryFile("w", suffix=".yaml", prefix="sluice_init_", dir=root / "feeds") as file:
        file.write(text)
        file.flush()
        try:
            yield Path(file.name)
        except FeedError as error:
            message = re.sub(rf"{re.escape(file.name)}(:\d+)*: ", "", error.message)
            raise FeedError(message, remedy=error.remedy) from None


def _request_schema(root: Path, topic: str, registry: Mapping[str, str]) -> SchemaAsked:
    """The request for the topic's schema, of which neither format nor file are known. Raises FeedError."""
    from sluice.pipelines.feed.load import schema_asked
    from sluice.pipelines.operating.feed_text import section_text

    section = section_text("registry", registry) or "registry:\n"
    text = f"topics: [{json.dumps(topic)}]\nformat: avro\nschema_file: unknown\n{section}"
    with _write_probe(root, text) as file:
        return schema_asked(file.parent, file.stem, _environ(root))


def _start_local(session: Session, root: Path) -> None:
    """The project's local Kafka, with sample events of the last hours where it has none."""
    from sluice.resources.local import events
    from sluice.resources.local.local_kafka import LocalKafka
    from sluice.resources.project import Project

    folder = Project(root).kafka_folder
    with session.terminal.progress() as report:
        kafka = LocalKafka.attach(folder) if (folder / "cluster.json").exists() else LocalKafka(folder)
        kafka.start(report)
    access = Project(root).writer(_probe(root, {}))
    if LOCAL_TOPIC in events.topics_of(access):
        return
    events.create(access, [LOCAL_TOPIC], 4)
    mix, now = events.Mix(seed=1, tombstones=0.01, headers=0.1), time.time_ns() // 1_000_000
    stream = events.orders(mix, SAMPLE_EVENTS, now - 4 * HOUR, now)
    with session.terminal.working(f"sending {count(SAMPLE_EVENTS)} sample events"):
        events.send(access, stream, mix, events.SendOptions((LOCAL_TOPIC,)))


# -- looking


def _choose_topic(session: Session, cluster: Cluster, access: KafkaSettings, topic: str | None) -> str:
    """The topic to read. Raises UnknownTopic, UsageError."""
    with session.terminal.working("querying Kafka"):
        listed = sorted(name for name in cluster.topics() if not name.startswith("__"))
    if topic is None and len(listed) == 1:
        topic = listed[0]
    names = ", ".join(listed[:20]) + (f" … {len(listed) - 20} more" if len(listed) > 20 else "")
    if topic is None and listed:
        session.terminal.note(f"topics there: {names}")
        topic = _ask(session, "Topic")
    if topic is None:
        raise UsageError(
            f"which of {many(len(listed), 'topic')}?", remedy=f"--topic TOPIC; there are {names or 'none'}"
        )
    if topic not in listed:
        raise UnknownTopic(
            f"no topic `{topic}` at {access.bootstrap}, or no right to see it",
            remedy=f"topics there: {names or 'none'}",
            topic=topic,
        )
    return topic


def _read_sample(feed: Feed, cluster: Cluster, topic: str) -> TopicSample:
    """The newest records of each partition, as far as SAMPLE_BYTES."""
    from sluice.pipelines.operating.propose_feed import SAMPLE_BYTES, TopicSample
    from sluice.streaming import of_feed

    partitions = cluster.partitions([topic], Isolation.READ_COMMITTED)
    hits = cluster.offsets_at({p.tp: 0 for p in partitions if p.last_stable_offset > p.log_start})
    sample = TopicSample(topic, partitions, min((hit.timestamp for hit in hits.values() if hit), default=None))
    if not sample.ranges:
        return sample
    batches, (starts, ends) = [], ({tp: r[edge] for tp, r in sample.ranges.items()} for edge in (0, 1))
    (stream,) = of_feed(feed, 1, starts, ends)
    with stream:
        for batch in stream:
            batches.append(batch)
            if sum(b.nbytes for b in batches) > SAMPLE_BYTES:
                break
    return replace(sample, batches=tuple(batches))


# -- writing


def _create_feed(root: Path, path: Path, texts: Mapping[Path, str]) -> Feed:
    """Write the feed file with its schema files, and read it back. Raises FeedError; then nothing was written."""
    from sluice.pipelines.feed.load import load_feed

    for file, text in texts.items():
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
    try:
        return load_feed(path, _environ(root))
    except FeedError:
        for file in texts:
            file.unlink()
        raise


def _beside(root: Path) -> list[Path]:
    """Write the missing files of a project next to its feeds. Returns the written or changed files."""
    ignored, workspace, out = root / ".gitignore", root / "workspace.yaml", []
    lines = ignored.read_text().splitlines() if ignored.exists() else []
    if not {_STATE, _STATE.rstrip("/"), f"/{_STATE}"} & {line.strip() for line in lines}:
        ignored.write_text("\n".join([*lines, _STATE]) + "\n")
        out.append(ignored)
    if not workspace.exists() and not _dagster_of_ones_own(root):
        workspace.write_text(_WORKSPACE)
        out.append(workspace)
    return out


def _dagster_of_ones_own(root: Path) -> str | None:
    """The tool by which the folder is a Dagster project already, `dg` or `dagster`: a workspace.yaml would take its
    place there."""
    try:
        tools = tomllib.loads((root / "pyproject.toml").read_text()).get("tool", {})
    except (OSError, ValueError):
        return None
    return next((tool for tool in ("dg", "dagster") if tool in tools), None)


def _view(sample: TopicSample, proposal: FeedProposal, fit: Fit | None) -> list[RenderableType]:
    from sluice.pipelines.operating.feed_text import list_misfits, list_rest

    number = many(sample.offsets, "offset") + (f", {size(sample.bytes)}" if sample.bytes is not None else "")
    since = f", from {show_instant(sample.oldest)[:16]}Z on" if sample.oldest is not None else ""
    pairs = [
        ("topic", f"{sample.topic}, {many(len(sample.partitions), 'partition')}, {number}{since}"),
        ("sampled", f"{many(proposal.sampled, 'record')}, {count(sample.key_count)} with a key"),
        ("format", f"{proposal.format.value}: {proposal.format.why}"),
    ]
    pairs += [("envelope", proposal.envelope)] if proposal.envelope else []
    pairs += [("split by", " ".join(*proposal.by.items()))] if proposal.by else []
    out: list[RenderableType] = [facts(*pairs)]
    if proposal.by:
        rows = [(o.name, count(o.records), count(len(o.columns)), o.format.value) for o in proposal.outputs]
        out += ["", table(("output", "records", "columns", "format"), rows, right="records columns")]
        out += [warn(f"in no output, for the quarantine: {list_rest(proposal)}")] if proposal.rest else []
    else:
        out += _view_columns(proposal.outputs[0])
    if fit is not None and proposal.sampled:
        ends = f"; these do not: {list_misfits(fit)}" if fit.other_misfits else ""
        text = f"{count(fit.landed)} of {count(proposal.sampled)} sampled records fit this schema{ends}"
        out.append((warn if fit.misfits else good)(text))
    return out


def _view_columns(output: OutputProposal) -> list[RenderableType]:
    from sluice.pipelines.operating.feed_text import list_fields, list_strays

    rows = [(column.name, column.type, count(column.records)) for column in output.columns]
    out: list[RenderableType] = (
        ["", table(("column", "type", "records"), limit_rows(rows), right="records")] if rows else []
    )
    out += [warn(f"in the column _extra: {list_fields(output.extra)}")] if output.extra else []
    return [*out, warn(list_strays(output))] if output.strays else out


def _view_limit(feed: Feed, fit: Fit | None) -> list[RenderableType]:
    """The reasons for which a run could refuse records like the sampled ones, with the keys that allow them."""
    from sluice.pipelines.quarantine.limit import list_faults_beyond, show_share

    limit = feed.policies.quarantine_limit
    if fit is None or not (faults := list_faults_beyond(fit.counts, feed.policies, fit.faults)):
        return []
    beyond = f"{many(len(fit.misfits), 'record')} would go to quarantine, more than {100 * limit.share:g} %"
    line = warn(f"{beyond}: a batch with {count(limit.at_least)} of them is refused")
    return [
        line,
        indent(*faults, "to land the others nevertheless, add to the feed file:", f"  {show_share(fit.counts)}"),
    ]


def _view_next(name: str, root: Path, written: Sequence[Path]) -> list[RenderableType]:
    here = Path.cwd()
    names = [str(p.relative_to(here) if p.is_relative_to(here) else p) for p in written]
    project = "" if root == here.resolve() else f" --project {shlex.quote(str(root))}"
    preview, land = (("preview it", f"sluice plan {name}{project}"), ("land it", f"sluice run {name}{project}"))
    return ["", good(f"written: {', '.join(names)}"), facts(preview, land, _in_dagster(root, project))]


def _in_dagster(root: Path, project: str) -> tuple[str, str]:
    match _dagster_of_ones_own(root):
        case "dg":
            return "every hour, in your Dagster", "dg scaffold defs sluice.dagster.FeedsComponent ingest"
        case "dagster":
            return "every hour, in your Dagster", "sluice docs dagster"
    return "every hour, in Dagster", f"sluice ui{project}"
