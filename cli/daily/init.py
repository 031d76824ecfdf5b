"""`sluice init`: writes a feed file for a topic from a sample of its records."""

from __future__ import annotations

import os
import re
import shlex
import sys
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import RenderableType

from sluice.cli.app import completers
from sluice.cli.app.invocation import Session, command
from sluice.cli.terminal.output import facts, good, heading, indent, limit_rows, table, warn
from sluice.cli.terminal.text_layout import count, size
from sluice.pipelines.errors import FeedError, UnknownTopic, UsageError
from sluice.pipelines.model.kafka import Isolation, PartitionState
from sluice.pipelines.util.units import HOUR, many, show_instant

if TYPE_CHECKING:
    import pyarrow as pa

    from sluice.pipelines.feed.feed import Feed
    from sluice.pipelines.feed.feed_proposal import Proposed, TopicLook
    from sluice.pipelines.feed.kafka_section import KafkaSettings
    from sluice.pipelines.ports import Cluster

SAMPLE = 1000
"""Records in the sample, in all partitions together."""
SAMPLE_BYTES = 64 << 20
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
        typer.Option(metavar="HOST:PORT", help="Kafka's addresses.", show_default="$KAFKA_BOOTSTRAP, or asked for"),
    ] = None
    topic: Annotated[
        str | None,
        typer.Option(
            metavar="TOPIC", help="What to read.", show_default="asked for", autocompletion=completers.complete_topics
        ),
    ] = None
    local: Annotated[
        bool, typer.Option("--local", help="Start a local Kafka here, with sample events in the topic `orders`.")
    ] = False
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--kafka",
            metavar="KEY=VALUE",
            help="Another key of the feed's `kafka:` section, such as sasl_plain_password='${PASSWORD}'; repeatable.",
            show_default=False,
        ),
    ] = None
    group: Annotated[str, typer.Option(metavar="GROUP", help="The consumer group.", show_default="sluice-FEED")] = ""
    raw: Annotated[bool, typer.Option("--raw", help="Land bytes as they are, without a schema.")] = False


def init(
    session: Session,
    feed: Annotated[
        str | None,
        typer.Argument(metavar="FEED", help="The new feed's name.", show_default="after the topic"),
    ] = None,
    options: InitOptions = InitOptions(),
) -> None:
    """Write a feed file for a topic, from a sample of its records.

    It samples the topic's newest records, proposes format, types, start and window, and says why in the file. It
    writes feeds/FEED.yaml, and .gitignore and workspace.yaml where there are none (in a Dagster project of your own no
    workspace.yaml). Kafka is only read: no group is joined, and no offset moves. On a terminal it asks for what you
    leave out.

    $ sluice init --local
    $ sluice init --bootstrap kafka.example:9092 --topic orders
    $ sluice init shop_orders --bootstrap kafka.example:9093 --topic orders --kafka security_protocol=SSL
    """
    from sluice.pipelines.feed.feed_proposal import Proposed, feed_name, feed_text, format_of
    from sluice.pipelines.feed.problems import NAMES
    from sluice.pipelines.feed.project_files import load_fleet
    from sluice.pipelines.feed.sections import NAME_PATTERN
    from sluice.pipelines.feed.topic_selection import TopicFilter
    from sluice.reading import list_overridden
    from sluice.resources.open_ports import open_cluster

    if feed is not None and not re.fullmatch(NAME_PATTERN, feed):
        raise UsageError(f"{feed!r} is not a feed's name", remedy=f"use {NAMES}: sluice init {feed_name(feed)}")
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
            name = feed or feed_name(chosen)
            path = root / "feeds" / f"{name}.yaml"
            if path.exists():
                raise UsageError(f"{path} is there already", remedy="give the new feed another name: sluice init NAME")
            with session.terminal.working(f"looking at {chosen}"):
                sample_places = _places(cluster, chosen)
                reading = probe.model_copy(update={"topics": TopicFilter(names=(chosen,))})
                look = _look(reading, chosen, sample_places)
        format_ = Proposed("raw", "asked for") if options.raw else format_of(look)
        engine, today = load_fleet(root, _environ(root)).engine, time.strftime("%Y-%m-%d", time.gmtime())
        text = feed_text(look, section, options.group, format_, engine, today)
        created = _create_feed(root, path, text)
        with session.terminal.working("landing the sample in memory"):
            (fits, beyond), warning = _fits(created, sample_places), list_overridden(created)
        written = [path, *_beside(root)]
    warnings = [*beyond, *([warn(warning)] if warning else [])]
    session.terminal.show(*_view(look, name, root, written, format_, fits), *warnings)
    session.terminal.print_document(
        feed=name,
        written=written,
        text=text,
        topic=chosen,
        partitions=look.partitions,
        offsets=look.records,
        format=format_.value,
        columns=look.sample.columns if format_.value == "json" else None,
        extra=look.sample.left_out if format_.value == "json" else None,
        sampled=look.sample.values,
        fit=fits,
    )
    if fits == 0 and look.sample.values:
        raise typer.Exit(1)


def _kafka_section(session: Session, root: Path, options: InitOptions) -> dict[str, str]:
    """The feed's `kafka:` section as it will be written; empty where the project's local Kafka serves."""
    section, bootstrap = dict(_pair(setting) for setting in options.settings or ()), options.bootstrap
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


def _pair(text: str) -> tuple[str, str]:
    from sluice.pipelines.feed.kafka_section import SECRETS

    key, equals, value = text.partition("=")
    if not equals or not key:
        raise UsageError(f"--kafka {key} has no value", remedy="write KEY=VALUE, such as security_protocol=SSL")
    key = key.strip()
    if key in SECRETS and not value.startswith("${") and (key != "proxy_url" or "@" in value):
        raise UsageError(
            f"--kafka {key} would be written to the feed file as it is",
            remedy=f"set a variable, and write --kafka {key}='${{VARIABLE}}', or '${{file:/run/secrets/NAME}}'",
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
    from sluice.pipelines.feed.feed_proposal import kafka_text
    from sluice.pipelines.feed.load import load_feed

    with NamedTemporaryFile("w", suffix=".yaml", prefix="sluice_init_", dir=root / "feeds") as file:
        file.write(f"{kafka_text(section)}feed: sluice_init\ntopics: any\nstart: earliest\n")
        file.flush()
        try:
            return load_feed(Path(file.name), _environ(root))
        except FeedError as error:  # without the file's name: it is gone
            message = re.sub(rf"{re.escape(file.name)}(:\d+)*: ", "", error.message)
            raise FeedError(message, remedy=error.remedy) from None


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


@dataclass(frozen=True, slots=True)
class _SamplePlaces:
    """Returns the topic's partitions, the time of its oldest record, and the newest offsets to sample."""

    partitions: tuple[PartitionState, ...]
    oldest: int | None

    @property
    def starts(self) -> dict[str, int]:
        share = max(1, SAMPLE // max(1, len(self._filled_partitions)))
        return {str(p.tp): max(p.log_start, p.last_stable_offset - share) for p in self._filled_partitions}

    @property
    def ends(self) -> dict[str, int]:
        return {str(p.tp): p.last_stable_offset for p in self._filled_partitions}

    @property
    def _filled_partitions(self) -> list[PartitionState]:
        return [p for p in self.partitions if p.last_stable_offset > p.log_start]


def _places(cluster: Cluster, topic: str) -> _SamplePlaces:
    partitions = cluster.partitions([topic], Isolation.READ_COMMITTED)
    hits = cluster.offsets_at({p.tp: 0 for p in partitions if p.last_stable_offset > p.log_start})
    return _SamplePlaces(partitions, min((hit.timestamp for hit in hits.values() if hit), default=None))


def _look(feed: Feed, topic: str, sample_places: _SamplePlaces) -> TopicLook:
    """The newest records of each partition, as far as SAMPLE_BYTES."""
    import pyarrow as pa

    from sluice.pipelines.feed.feed_proposal import TopicLook
    from sluice.pipelines.schema.inference import sample_values

    keyed, newest, read, values = 0, None, 0, list[bytes | None]()
    for batch in _batches(feed, sample_places, typed=False):
        values += batch.column("value").to_pylist()
        keyed += batch.num_rows - batch.column("key").null_count
        stamps = batch.column("timestamp").cast(pa.int64()).to_pylist()
        newest = max(filter(None, (newest, *stamps)), default=None)
        read += batch.nbytes
        if read > SAMPLE_BYTES:
            break
    sizes = [p.log_bytes for p in sample_places.partitions if p.log_bytes is not None]
    offsets = sum(p.last_stable_offset - p.log_start for p in sample_places.partitions)
    spread = (len(sample_places.partitions), offsets, sum(sizes) if sizes else None, sample_places.oldest, newest)
    return TopicLook(topic, *spread, sample_values(values), keyed)


def _batches(feed: Feed, sample_places: _SamplePlaces, *, typed: bool) -> Iterator[pa.RecordBatch]:
    from sluice.streaming import StreamOptions, of_feed

    if not sample_places.starts:
        return
    (stream,) = of_feed(feed, 1, sample_places.starts, sample_places.ends, StreamOptions(typed=typed))
    with stream:
        yield from stream


# -- writing


def _create_feed(root: Path, path: Path, text: str) -> Feed:
    """Write the feed file and read it back. Raises FeedError; then nothing was written."""
    from sluice.pipelines.feed.load import load_feed

    path.write_text(text)
    try:
        return load_feed(path, _environ(root))
    except FeedError:
        path.unlink()
        raise


def _fits(feed: Feed, sample_places: _SamplePlaces) -> tuple[int | None, list[RenderableType]]:
    """Returns the number of sampled records that land, None for a raw feed, and why a run could refuse them."""
    if feed.columns is None or not sample_places.starts:
        return None if feed.columns is None else 0, []
    from sluice.pipelines.model.receipts import Counts
    from sluice.pipelines.quarantine.limit import list_faults_beyond, show_share
    from sluice.streaming import StreamOptions, of_feed

    (stream,) = of_feed(feed, 1, sample_places.starts, sample_places.ends, StreamOptions(typed=True))
    with stream:
        fitting = sum(batch.num_rows for batch in stream)
    counts, limit = Counts(landed=fitting, quarantined=stream.refused), feed.policies.quarantine_limit
    faults = list_faults_beyond(counts, feed.policies, stream.faults)
    if not faults:
        return fitting, []
    beyond = f"{many(stream.refused, 'record')} would go to quarantine, more than {100 * limit.share:g} %"
    lines: list[RenderableType] = [warn(f"{beyond}: a batch with {count(limit.at_least)} of them is refused")]
    way = ("to land the others nevertheless, add to the feed file:", f"  {show_share(counts)}")
    return fitting, [*lines, indent(*faults, *way)]


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


def _view(
    look: TopicLook, name: str, root: Path, written: Sequence[Path], format_: Proposed, fits: int | None
) -> list[RenderableType]:
    from sluice.pipelines.feed.feed_proposal import list_fields

    sample = look.sample
    stood = f"{count(look.records)} offsets" + (f", {size(look.bytes)}" if look.bytes is not None else "")
    since = f", from {show_instant(look.oldest)[:16]}Z on" if look.oldest is not None else ""
    summary = facts(
        ("topic", f"{look.topic}, {many(look.partitions, 'partition')}, {stood}{since}"),
        ("sampled", f"{many(sample.values, 'record')}, {count(look.keyed)} with a key"),
        ("format", f"{format_.value}: {format_.why}"),
    )
    out: list[RenderableType] = [heading(f"Feed {name}"), summary]
    if format_.value == "json":
        types = sample.columns
        rows = [(column, types[column], count(sample.fields[name].seen)) for name, column in sample.names.items()]
        out += ["", table(("column", "type", "seen"), limit_rows(rows), right="seen")]
        if sample.left_out:
            out.append(warn(f"in the column _extra: {list_fields(sample.left_out)}"))
    if fits is not None and sample.values:
        ok = fits == sample.values
        out.append((good if ok else warn)(f"{count(fits)} of {count(sample.values)} sampled records fit this schema"))
    here = Path.cwd()
    names = [str(p.relative_to(here) if p.is_relative_to(here) else p) for p in written]
    project = "" if root == here.resolve() else f" --project {shlex.quote(str(root))}"
    out += ["", good(f"written: {', '.join(names)}")]
    preview, land = (("preview it", f"sluice plan {name}{project}"), ("land it", f"sluice run {name}{project}"))
    return [*out, facts(preview, land, _in_dagster(root, project))]


def _in_dagster(root: Path, project: str) -> tuple[str, str]:
    match _dagster_of_ones_own(root):
        case "dg":
            return "every hour, in your Dagster", "dg scaffold defs sluice.dagster.FeedsComponent ingest"
        case "dagster":
            return "every hour, in your Dagster", "sluice docs dagster"
    return "every hour, in Dagster", f"sluice ui{project}"
