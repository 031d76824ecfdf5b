"""`sluice metrics`: how the feeds stand, for Prometheus."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sluice.cli.app import completers
from sluice.cli.app.invocation import Session, command
from sluice.cli.app.parameters import flag, option
from sluice.cli.options import parsing
from sluice.cli.terminal.output import good
from sluice.pipelines.errors import DagsterUnavailable, SluiceError, UsageError
from sluice.pipelines.model.figures import FAMILIES, Figure, build_figure
from sluice.pipelines.util import extras
from sluice.pipelines.util.parallel import map_parallel
from sluice.pipelines.util.units import many, show_duration

if TYPE_CHECKING:
    from sluice.pipelines.feed.feed import Feed
    from sluice.resources.observe.prometheus import Gateway

HOST, PORT = "127.0.0.1", 9477
EVERY = "1m"


def register(app: typer.Typer) -> None:
    command(app)(metrics)


@dataclass(frozen=True, slots=True)
class SinkOptions:
    """Where metrics go, as typed."""

    serve: Annotated[bool, flag("--serve", "Serve http://HOST:PORT/metrics until Ctrl-C.")] = False
    host: Annotated[str, option("--host", "ADDRESS", "With --serve: the address.", show_default=True)] = HOST
    port: Annotated[int, option("--port", "PORT", "With --serve: the port.", min=1, max=65535, show_default=True)] = (
        PORT
    )
    output: Annotated[Path | None, option("--output", "FILE", "Replace this file in one step.")] = None
    push: Annotated[str | None, option("--push", "URL", "Send to this push gateway.")] = None
    job: Annotated[str, option("--job", "NAME", "With --push: the name of the job.", show_default=True)] = "sluice"


def metrics(
    session: Session,
    feeds: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="FEED",
            help="Only these feeds.",
            show_default="all feeds",
            autocompletion=completers.complete_feeds,
        ),
    ] = None,
    *,
    sink: SinkOptions,
    every: Annotated[
        str | None,
        option(
            "--every",
            "TIME",
            "Repeat after this time, such as 30s, until Ctrl-C.",
            show_default=f"{EVERY} with --serve",
        ),
    ] = None,
    last: Annotated[
        int, option("--last", "N", "Number of windows to count.", min=1, max=10_000, show_default=True)
    ] = 24,
) -> int:
    """Export metrics of the feeds for Prometheus.

    Print them, write them to a file (for the node exporter's textfile collector), send them to a push gateway (login:
    SLUICE_PUSH_USER and SLUICE_PUSH_PASSWORD), or serve them. Like status, it reads ledgers and Kafka and changes
    nothing. A feed that cannot be inspected has sluice_up 0; the exit code stays 0. sluice docs metrics describes all
    metrics.

    $ sluice metrics
    $ sluice metrics --serve --every 30s
    $ sluice metrics --output /var/lib/node_exporter/textfile/sluice.prom
    $ sluice metrics --push http://gateway.example:9091
    """
    if sink.serve and (sink.output or sink.push):
        raise UsageError("--serve together with --output or --push", remedy="run the command twice")
    extras.require("prometheus_client")
    from sluice.resources.observe import prometheus

    gateway = prometheus.Gateway.at(sink.push, sink.job, os.environ) if sink.push else None
    pause = parsing.duration(every or EVERY) / 1000 if every or sink.serve else None
    if pause == 0:
        raise UsageError(f"--every {every} is no pause", remedy="use a time such as 30s")

    # Feeds are read anew each time: an exporter outlives changes of their files.
    def take() -> list[Figure]:
        from sluice.assets.specs.feed_files import read_feeds

        files = read_feeds(session.project, session.project.environ())
        chosen = [files.feed(name) for name in feeds] if feeds else [*files.feeds.values()]
        return take_figures(session, chosen, len(files.broken), last)

    if sink.serve:
        return _serve(session, take, sink.host, sink.port, pause or 0)
    while True:
        _publish(session, take(), sink.output, gateway, quiet=pause is not None)
        if pause is None:
            return 0
        time.sleep(pause)


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
    documents = [
        {"name": f.name, "labels": dict(zip(FAMILIES[f.name].labels, f.labels, strict=True)), "value": f.value}
        for f in figures
    ]
    session.terminal.print_document(figures=documents)


def _serve(session: Session, take: Callable[[], list[Figure]], host: str, port: int, pause: float) -> int:
    from sluice.resources.observe import prometheus

    cache = prometheus.Kept()
    with prometheus.serving(cache, host, port):
        cache.keep(take())
        address = f"http://{host}:{port}/metrics"
        session.terminal.show(
            good(f"metrics are at {address}"), f"  updated every {show_duration(int(pause * 1000))}; Ctrl-C stops it"
        )
        session.terminal.print_document(address=address)
        while True:
            time.sleep(pause)
            try:
                cache.keep(take())
            except SluiceError as error:
                session.terminal.fail(error)


# -- samples


def take_figures(session: Session, feeds: Sequence[Feed], broken: int, last: int) -> list[Figure]:
    """Returns the figures of feeds and their `last` windows. A feed that cannot be inspected has `sluice_up` 0."""
    from sluice.pipelines.operating.feed_figures import list_figures

    began = time.time()
    with session.share_ports(feeds) as open_ports:
        figures = [f for of in map_parallel(lambda feed: list_figures(open_ports, feed, last), list(feeds)) for f in of]
    figures += _of_runs(session, feeds)
    figures.append(build_figure("broken_feed_files", broken))
    figures += [
        build_figure("look_timestamp_seconds", began),
        build_figure("look_duration_seconds", time.time() - began),
    ]
    return figures


# -- runs


def _of_runs(session: Session, feeds: Sequence[Feed]) -> list[Figure]:
    """Runs in Dagster. Returns nothing if it is not installed, not in use, or does not answer. An instance that cannot
    be opened is reported on stderr."""
    if find_spec("dagster") is None:
        return []
    from sluice.assets.operations.dagster_health import recent_runs

    try:
        recent = recent_runs(session.project, feeds)
    except DagsterUnavailable:
        return []
    except SluiceError as error:
        session.terminal.fail(error)
        return []
    return [build_figure("runs", runs, *labels) for labels, runs in sorted(recent.items())]
