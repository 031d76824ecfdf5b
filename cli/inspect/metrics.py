"""`sluice metrics`: how the feeds stand, for Prometheus."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sluice.cli.app import completers
from sluice.cli.app.invocation import Session, command
from sluice.cli.inspect import metric_samples
from sluice.cli.options import parsing
from sluice.cli.terminal.output import good
from sluice.pipelines.errors import SluiceError, UsageError
from sluice.pipelines.model.figures import FAMILIES, Figure
from sluice.pipelines.util import extras
from sluice.pipelines.util.units import many, show_duration

if TYPE_CHECKING:
    from sluice.pipelines.feed.feed import Feed
    from sluice.resources.observe.prometheus import Gateway

HOST, PORT = "127.0.0.1", 9477
EVERY = "1m"

Serve = Annotated[bool, typer.Option("--serve", metavar=" ", help="Answer at http://HOST:PORT/metrics, until Ctrl-C.")]


def register(app: typer.Typer) -> None:
    command(app)(metrics)


def metrics(
    session: Session,
    feeds: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="FEED", help="Only these feeds.", show_default="all feeds", autocompletion=completers.complete_feeds
        ),
    ] = None,
    serve: Serve = False,
    host: Annotated[str, typer.Option("--host", metavar="ADDRESS", help="Where --serve listens.")] = HOST,
    port: Annotated[int, typer.Option("--port", min=1, max=65535, help="Where --serve listens.")] = PORT,
    output: Annotated[
        Path | None,
        typer.Option("--output", metavar="FILE", help="Write them into this file, at once.", show_default=False),
    ] = None,
    push: Annotated[
        str | None,
        typer.Option("--push", metavar="URL", help="Send them to this push gateway.", show_default=False),
    ] = None,
    job: Annotated[str, typer.Option("--job", metavar="NAME", help="The name of the job at the gateway.")] = "sluice",
    every: Annotated[
        str | None,
        typer.Option(
            "--every",
            metavar="TIME",
            help="Look again after this time, until Ctrl-C.",
            show_default=f"{EVERY} to serve",
        ),
    ] = None,
    last: Annotated[int, typer.Option("--last", metavar="N", min=1, max=10_000, help="Windows to count.")] = 24,
) -> int:
    """How the feeds stand, for Prometheus.

    Prints them, writes them into a file (the node exporter's textfile collector reads it), sends them to a push
    gateway (SLUICE_PUSH_USER and SLUICE_PUSH_PASSWORD log in there), or serves them on loopback. It reads ledgers and
    asks Kafka, as status does, and changes nothing. A feed that cannot be inspected has sluice_up 0, and the exit code
    is still 0. sluice docs metrics describes each.

    $ sluice metrics
    $ sluice metrics --serve --every 30s
    $ sluice metrics --output /var/lib/node_exporter/textfile/sluice.prom
    $ sluice metrics --push http://gateway.example:9091
    """
    if serve and (output or push):
        raise UsageError("--serve beside --output or --push", remedy="run two of them")
    extras.require("prometheus_client")
    from sluice.resources.observe import prometheus

    gateway = prometheus.Gateway.at(push, job, os.environ) if push else None
    pause = parsing.duration(every or EVERY) / 1000 if every or serve else None

    def take() -> list[Figure]:
        chosen, broken = _choose_feeds(session, feeds or [])
        return metric_samples.take_figures(session, chosen, broken, last)

    if serve:
        return _serve(session, take, host, port, pause or 0)
    while True:
        _publish(session, take(), output, gateway, quiet=pause is not None)
        if pause is None:
            return 0
        time.sleep(pause)


def _choose_feeds(session: Session, names: Sequence[str]) -> tuple[list[Feed], int]:
    """The feeds as their files say now, and how many files are wrong. Raises FeedError for a name that is none."""
    from sluice.assets.specs.feed_files import read_feeds

    files = read_feeds(session.project, session.project.environ())
    return [files.feed(n) for n in names] if names else [*files.feeds.values()], len(files.broken)


def _publish(
    session: Session, figures: Sequence[Figure], output: Path | None, gateway: Gateway | None, *, quiet: bool
) -> None:
    from sluice.resources.observe import prometheus

    if output:
        prometheus.write(figures, output)
    if gateway:
        try:
            prometheus.push(figures, gateway)
        except SluiceError as error:
            if not quiet:
                raise
            session.terminal.fail(error)  # the next look sends them
    if not output and not gateway:
        session.terminal.lines(prometheus.text(figures).splitlines())
    elif not quiet:
        where = " and ".join([*([str(output)] if output else []), *([gateway.address] if gateway else [])])
        session.terminal.show(good(f"{many(len(figures), 'figure')}: {where}"))
    session.terminal.print_document({"figures": [_build_document(f) for f in figures]})


def _serve(session: Session, take: Callable[[], list[Figure]], host: str, port: int, pause: float) -> int:
    from sluice.resources.observe import prometheus

    cache = prometheus.Kept()
    with prometheus.serving(cache, host, port):
        cache.keep(take())
        address = f"http://{host}:{port}/metrics"
        session.terminal.show(
            good(f"metrics are at {address}"), f"  taken again every {show_duration(int(pause * 1000))}; Ctrl-C ends it"
        )
        session.terminal.print_document({"address": address})
        while True:
            time.sleep(pause)
            try:
                cache.keep(take())
            except SluiceError as error:
                session.terminal.fail(error)


def _build_document(one: Figure) -> dict[str, Any]:
    labels = dict(zip(FAMILIES[one.name].labels, one.labels, strict=True))
    return {"name": one.name, "labels": labels, "value": one.value}
