"""`sluice produce`: sample order events into a feed's topics."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import RenderableType

from sluice.cli.app.invocation import FeedName, Session, command
from sluice.cli.terminal.number_format import count, rate, seconds, size
from sluice.cli.terminal.output import facts, good
from sluice.pipelines.errors import NotLocal, UsageError
from sluice.pipelines.util.units import many, parse_duration

if TYPE_CHECKING:
    from sluice.pipelines.feed.feed import Feed
    from sluice.resources.local.events import SampleEvent, SentEvents


def register(app: typer.Typer) -> None:
    command(app)(produce)


def _share(given: str | float) -> float:
    """`0.01` or `1%`."""
    text = str(given)
    try:
        value = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        value = -1
    if not 0 <= value <= 1:
        raise typer.BadParameter(f"{text!r} is not a share such as 0.01 or 1%")
    return value


def _duration(text: str) -> int:
    """Milliseconds of `10m`."""
    try:
        return parse_duration(text)
    except ValueError as error:
        raise typer.BadParameter(f"{text!r} {error}") from None


def _share_option(text: str) -> Any:
    return typer.Option(parser=_share, metavar="SHARE", help=text, show_default=False)


def produce(
    session: Session,
    feed: FeedName,
    records: Annotated[int, typer.Option("--records", "-n", metavar="N", min=1, help="How many events.")] = 10_000,
    per_second: Annotated[
        float | None,
        typer.Option(
            "--rate",
            metavar="N",
            min=0.001,
            help="Records a second; without it, as fast as possible.",
            show_default=False,
        ),
    ] = None,
    bad_share: Annotated[float, _share_option("Malformed: no JSON, cut off, wrong types.")] = 0.0,
    tombstones: Annotated[float, _share_option("Null values.")] = 0.0,
    headers: Annotated[float, _share_option("Records with headers.")] = 0.0,
    transactional: Annotated[bool, typer.Option("--transactional", help="Send in transactions.")] = False,
    aborted: Annotated[float, _share_option("Transactions to abort.")] = 0.0,
    compression: Annotated[
        str | None,
        typer.Option(metavar="CODEC", help="none, gzip, snappy, lz4, zstd.", show_default="none"),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(
            metavar="N", help="The same seed gives the same events; without it they are random.", show_default=False
        ),
    ] = None,
    first: Annotated[int, typer.Option(metavar="N", min=0, help="Number of the first order.")] = 0,
    spread: Annotated[
        int,
        typer.Option(parser=_duration, metavar="DURATION", help="Stamp them evenly over this time until now."),
    ] = "1m",  # type: ignore[assignment]  # read by the parser
    partitions: Annotated[
        int, typer.Option(metavar="N", min=1, help="Partitions of a topic that has to be created.")
    ] = 6,
    bootstrap: Annotated[
        str | None,
        typer.Option(
            "--bootstrap",
            metavar="HOST:PORT",
            help="Write to the feed's Kafka at this address, although it is not the local one.",
            show_default=False,
        ),
    ] = None,
    create: Annotated[bool, typer.Option("--create", help="With --bootstrap: create missing topics.")] = False,
) -> None:
    """Send sample order events into a feed's topics.

    Each is JSON of about 180 bytes, keyed by customer; for a feed with a schema_file it is in the feed's format, and
    its schema is registered first (`sluice schema pull FEED` writes it for the feed). By default it writes only to the
    project's local Kafka, the one of `sluice kafka start`, and creates topics there. For another Kafka, repeat the
    feed's address with --bootstrap; there it creates topics only with --create. Exit 3 when the feed reads from another
    Kafka and --bootstrap is missing.

    $ sluice produce orders --records 200000
    $ sluice produce orders --rate 500 --tombstones 1% --headers 5%
    $ sluice produce orders --transactional --aborted 10% --spread 6h --seed 7
    $ sluice produce orders --bootstrap test-kafka.example:9092
    """
    from sluice.pipelines.model.receipts import Progress
    from sluice.resources.local import events

    definition = session.feed(feed)
    if aborted and not transactional:
        raise UsageError("--aborted without --transactional", remedy="add --transactional")
    _check_meant(session, definition, records, bootstrap)
    mix = events.Mix(secrets.randbits(32) if seed is None else seed, first, bad_share, tombstones, headers, aborted)
    topics = _topics(session, definition, partitions, create)
    now = time.time_ns() // 1_000_000
    stream = events.orders(mix, records, now - spread, now)
    stream = in_format(session, definition, stream)
    how = events.SendOptions(
        topics,
        transactional_id=f"sluice-produce-{feed}" if transactional else None,
        rate=per_second,
        compression=compression,
    )
    with session.terminal.progress() as meter:
        sent = events.send(
            session.project.writer(definition), stream, mix, how, lambda done: meter(Progress("send", done, records))
        )
    session.terminal.show(*view(sent, topics), f"  seed {mix.seed}")
    session.terminal.print_document({"feed": feed, "topics": topics, "seed": mix.seed, **asdict(sent)})


def in_format(session: Session, feed: Feed, stream: Iterator[SampleEvent]) -> Iterator[SampleEvent]:
    """The events in the feed's format. Where that has schemas of its own, theirs is registered under the subject that
    the feed names. Raises UsageError for a wire format that they cannot have."""
    reader = feed.reader
    if reader is None:
        return stream
    from sluice.pipelines.feed.load import schema_asked
    from sluice.pipelines.records.formats import READERS
    from sluice.resources.local.registered_events import SAMPLES, WIRES, as_registered
    from sluice.resources.registry.confluent import RegistryClient

    sample, number = SAMPLES[reader.format], 0
    if reader.wire not in WIRES:
        raise UsageError(
            f"feed {feed.name} has `wire_format: {reader.wire}`, which sample events cannot have",
            remedy=f"they can have {', '.join(sorted(WIRES))}",
        )
    if feed.registry is not None:
        request = schema_asked(session.project.feeds_folder / f"{feed.name}.yaml", session.project.environ())
        type_ = READERS[reader.format].registered
        number = RegistryClient(feed.registry).register(request.subject, sample.schema, type_)
    return as_registered(stream, sample, reader.wire, number)


def _check_meant(session: Session, feed: Feed, records: int, bootstrap: str | None) -> None:
    """Raises NotLocal, UsageError: sample events do not belong among what somebody else's topic holds."""
    there = feed.kafka.bootstrap
    if bootstrap is not None and bootstrap != there:
        raise UsageError(
            f"--bootstrap {bootstrap}, but feed {feed.name} reads from {there}",
            remedy=f"write there: --bootstrap {there}",
        )
    if bootstrap is None and not _is_local(session, there):
        raise NotLocal(
            f"{there} is not this project's local Kafka, and sample events would stay in its topics; nothing was sent",
            remedy=f"start the local one, which feeds that name no other read from: sluice kafka start; or send "
            f"{many(records, 'sample event')} there all the same: sluice produce {feed.name} --bootstrap {there}",
        )


def _is_local(session: Session, bootstrap: str) -> bool:
    local = (session.project.local_bootstrap() or "").split(",")
    return set(bootstrap.split(",")) <= set(local)


def view(sent: SentEvents, topics: tuple[str, ...]) -> tuple[RenderableType, ...]:
    kinds = {"tombstones": sent.tombstones, "malformed": sent.malformed, "with headers": sent.with_headers}
    kinds_text = ", ".join(f"{count(n)} {name}" for name, n in kinds.items() if n)
    return (
        good(f"{count(sent.committed)} records sent to {', '.join(topics)}"),
        facts(
            *((("among them", kinds_text),) if kinds_text else ()),
            *((("aborted", f"{count(sent.aborted)} more, in transactions that were aborted"),) if sent.aborted else ()),
            (
                "took",
                f"{seconds(sent.seconds)} ({rate(sent.records, sent.seconds)}, {size(sent.bytes)} of values)",
            ),
        ),
    )


def _topics(session: Session, feed: Feed, partitions: int, create: bool) -> tuple[str, ...]:
    """The feed's topics as Kafka has them; named ones that are missing are created where that is allowed."""
    from sluice.pipelines.feed.topic_selection import match
    from sluice.resources.local import events

    kafka = session.project.writer(feed)
    standing = events.topics_of(kafka)
    missing = [t for t in feed.topics.names if t not in standing]
    if not missing:
        return match(feed.topics, dict.fromkeys(standing, ""))
    if not create and not _is_local(session, feed.kafka.bootstrap):
        raise UsageError(
            f"no topic {', '.join(missing)} at {feed.kafka.bootstrap}",
            remedy="add --create to create it there",
            topic=missing[0],
        )
    events.create(kafka, missing, partitions)
    return tuple(sorted(feed.topics.names))
