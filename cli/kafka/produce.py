"""`sluice produce`: sample order events into a feed's topics."""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import RenderableType

from sluice.cli.app.invocation import FeedName, Session, command
from sluice.cli.app.parameters import option
from sluice.cli.terminal.output import facts, good
from sluice.cli.terminal.text_layout import count, rate, seconds, size
from sluice.pipelines.errors import NotLocal, UsageError
from sluice.pipelines.util.units import many, parse_duration

if TYPE_CHECKING:
    from sluice.pipelines.feed.feed import Feed
    from sluice.resources.local.events import Mix, SentEvents


def register(app: typer.Typer) -> None:
    command(app)(produce)


def _parse_share(share: str | float) -> float:
    """`0.01` or `1%`."""
    text = str(share)
    try:
        value = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        value = -1
    if not 0 <= value <= 1:
        raise typer.BadParameter(f"{text!r} is not a share such as 0.01 or 1%")
    return value


def _parse_duration(text: str) -> int:
    """Milliseconds of `10m`."""
    try:
        return parse_duration(text)
    except ValueError as error:
        raise typer.BadParameter(f"{text!r} {error}") from None


def _make_share_option(text: str) -> Any:
    return typer.Option(parser=_parse_share, metavar="SHARE", help=text, show_default=False)


@dataclass(frozen=True, slots=True)
class EventOptions:
    """Sample events, as typed."""

    records: Annotated[int, typer.Option("--records", "-n", metavar="N", min=1, help="Number of events.")] = 10_000
    bad_share: Annotated[float, _make_share_option("Share of malformed records: no JSON, cut off, wrong types.")] = 0.0
    tombstones: Annotated[float, _make_share_option("Share of null values.")] = 0.0
    headers: Annotated[float, _make_share_option("Share of records with headers.")] = 0.0
    seed: Annotated[
        int | None,
        typer.Option(metavar="N", help="The same seed gives the same events.", show_default="random"),
    ] = None
    first: Annotated[int, typer.Option(metavar="N", min=0, help="Number of the first order.")] = 0
    spread: Annotated[
        int,
        typer.Option(
            parser=_parse_duration, metavar="DURATION", help="Spread timestamps evenly over this time until now."
        ),
    ] = "1m"  # type: ignore[assignment]  # read by the parser

    def build_mix(self, aborted: float) -> Mix:
        from sluice.resources.local.events import Mix

        seed = secrets.randbits(32) if self.seed is None else self.seed
        return Mix(seed, self.first, self.bad_share, self.tombstones, self.headers, aborted)


@dataclass(frozen=True, slots=True)
class SendingOptions:
    """How events are sent, as typed."""

    per_second: Annotated[
        float | None, option("--rate", "N", "Records per second.", min=0.001, show_default="as fast as possible")
    ] = None
    transactional: Annotated[bool, typer.Option("--transactional", help="Send in transactions.")] = False
    aborted: Annotated[float, _make_share_option("Share of transactions to abort; needs --transactional.")] = 0.0
    compression: Annotated[
        str | None,
        typer.Option(metavar="CODEC", help="none, gzip, snappy, lz4 or zstd.", show_default="none"),
    ] = None


@dataclass(frozen=True, slots=True)
class TopicOptions:
    """Topics to write to, as typed."""

    partitions: Annotated[int, typer.Option(metavar="N", min=1, help="Partitions of topics that are created.")] = 6
    bootstrap: Annotated[
        str | None,
        option("--bootstrap", "HOST:PORT", "Confirm the address of the feed's Kafka, if that is not the local one."),
    ] = None
    create: Annotated[bool, typer.Option("--create", help="With --bootstrap: create missing topics.")] = False


def produce(
    session: Session, feed: FeedName, events: EventOptions, sending: SendingOptions, target: TopicOptions
) -> None:
    """Send sample order events into a feed's topics.

    Events are JSON of about 180 bytes, keyed by customer. For a feed with a schema_file they have the feed's format,
    and their schema is registered first (sluice schema pull FEED fetches it). By default it writes only to the
    project's local Kafka (sluice kafka start), and creates topics there. For another Kafka, confirm the feed's address
    with --bootstrap; topics are then created only with --create. Exit 3 if the feed reads from another Kafka and
    --bootstrap is missing.

    $ sluice produce orders --records 200000
    $ sluice produce orders --rate 500 --tombstones 1% --headers 5%
    $ sluice produce orders --transactional --aborted 10% --spread 6h --seed 7
    $ sluice produce orders --bootstrap test-kafka.example:9092
    """
    from sluice.pipelines.model.receipts import Progress
    from sluice.resources.local.events import SendOptions, orders, send
    from sluice.resources.local.registered_events import in_format

    definition = session.feed(feed)
    if sending.aborted and not sending.transactional:
        raise UsageError("--aborted without --transactional", remedy="add --transactional")
    _check_meant(session, definition, events.records, target.bootstrap)
    mix = events.build_mix(sending.aborted)
    topics = _list_topics(session, definition, target.partitions, target.create)
    now = time.time_ns() // 1_000_000
    stream = orders(mix, events.records, now - events.spread, now)
    stream = in_format(definition, stream, session.project.feeds_folder, session.project.environ())
    how = SendOptions(
        topics,
        transactional_id=f"sluice-produce-{feed}" if sending.transactional else None,
        rate=sending.per_second,
        compression=sending.compression,
    )
    with session.terminal.progress() as meter:
        writer, records = session.project.writer(definition), events.records
        sent = send(writer, stream, mix, how, lambda done: meter(Progress("send", done, records)))
    session.terminal.show(*view(sent, topics), f"  seed {mix.seed}")
    session.terminal.print_document(sent, feed=feed, topics=topics, seed=mix.seed)


def _check_meant(session: Session, feed: Feed, records: int, bootstrap: str | None) -> None:
    """Raises NotLocal, UsageError: sample events do not belong among what somebody else's topic holds."""
    there = feed.kafka.bootstrap
    if bootstrap is not None and bootstrap != there:
        raise UsageError(
            f"--bootstrap {bootstrap}, but feed {feed.name} reads from {there}",
            remedy=f"confirm that address: --bootstrap {there}",
        )
    if bootstrap is None and not _is_local(session, there):
        raise NotLocal(
            f"{there} is not this project's local Kafka, and sample events would stay in its topics; no event was sent",
            remedy=f"send {many(records, 'sample event')} there anyway: sluice produce {feed.name} --records {records}"
            f" --bootstrap {there}; or leave `kafka` out of the feed, and start the local Kafka: sluice kafka start",
        )


def _is_local(session: Session, bootstrap: str) -> bool:
    return {*bootstrap.split(",")} <= {*(session.project.local_bootstrap() or "").split(",")}


def view(sent: SentEvents, topics: tuple[str, ...]) -> tuple[RenderableType, ...]:
    kinds = {"tombstones": sent.tombstones, "malformed": sent.malformed, "with headers": sent.with_headers}
    kinds_text = ", ".join(f"{count(n)} {name}" for name, n in kinds.items() if n)
    return (
        good(f"{many(sent.committed, 'record')} sent to {', '.join(topics)}"),
        facts(
            *((("among them", kinds_text),) if kinds_text else ()),
            *((("aborted", f"{count(sent.aborted)} more, in aborted transactions"),) if sent.aborted else ()),
            (
                "took",
                f"{seconds(sent.seconds)} ({rate(sent.records, sent.seconds)}, {size(sent.bytes)} of values)",
            ),
        ),
    )


def _list_topics(session: Session, feed: Feed, partitions: int, create: bool) -> tuple[str, ...]:
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
