"""`python -m bench` (`make bench`): measures Sluice side by side with other ways to land Kafka topics."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from bench import age, cluster, fleet, scale, send, start, timeline, waits
from bench import command as calls
from bench import table as old_table
from bench.render import PAGE, lake_view, race_view
from bench.render import write as write_page
from bench.results import BenchReport, RaceResult, StartTimes, WaitTimes
from bench.suite import ALL
from sluice.cli.app.invocation import Session, command
from sluice.cli.main import run_app
from sluice.cli.terminal.output import good
from sluice.pipelines.errors import UsageError

Names = Annotated[
    list[str] | None,
    typer.Argument(metavar="NAME", help="What to measure, as named above; none: the main ones.", show_default=False),
]
Records = Annotated[
    int | None, typer.Option(min=1, help="Records in the topic; default: as the benchmark defines (raw: 3,000,000).")
]
Repeat = Annotated[int, typer.Option(min=1, help="Landings of each peer that count.")]
WarmUps = Annotated[
    int, typer.Option("--warm-ups", min=0, help="Landings before the first turn, and then one in each; 0: none.")
]
Cores = Annotated[int | None, typer.Option(min=1, help="Cores of Spark's and of Sluice's tasks; without it, all.")]
Peers = Annotated[
    list[str] | None,
    typer.Option(
        "--peer",
        help="Only this peer (again for more): sluice, spark, rust, polars, chdb, flink, connect, confluent-kafka,"
        " kafka-python, dlt, daft, sluice-processes, sluice-apart.",
    ),
]
Data = Annotated[
    Path | None,
    typer.Option("--data", metavar="FOLDER", help="Where Kafka and loaded topics are kept; else the user's cache."),
]
Feeds = Annotated[int | None, typer.Option("--feeds", min=1, help="Of `fleet`: how many; without it, 50.")]
Months = Annotated[
    list[int] | None,
    typer.Option("--months", min=1, help="Of `age`: how many months of hours (again for more); without it, 1 and 12."),
]
Write = Annotated[
    bool, typer.Option("--write", help="Write the results into docs/developers/, with their plot, and README.md.")
]


app = typer.Typer(
    rich_markup_mode=None,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)


@command(app, "bench")
def run_benchmarks(
    session: Session,
    names: Names = None,
    records: Records = None,
    repeat: Repeat = 5,
    warm_ups: WarmUps = 2,
    cores: Cores = None,
    peer: Peers = None,
    data: Data = None,
    feeds: Feeds = None,
    months: Months = None,
    write: Write = False,
) -> None:
    """Measure Sluice side by side with Spark's Kafka connector and plain loops.

    Each benchmark starts its own Kafka, loads a topic (kept for the next run), sets up the peers, warms up, lets them
    land the topic in turn, checks every landed row, and prints medians and ratios. It takes minutes and needs a quiet
    machine.

    raw, typed and contract are the default. Others differ from typed in one thing: the codec (uncompressed, gzip,
    snappy, zstd; typed has lz4), the records (small: 50 B, large: 10 KB, nested: structs and lists, escapes: escapes
    in every record and keys in another order) or the layout (partitions: 200, skewed: 90 % in one of four, brokers:
    three). avro, protobuf and json_schema have the same fields in these formats, with schema ids. rows is typed with a
    header as a column, with its hash, and split in three. kinds is a mixed topic, landed in one dataset or split by
    kind. dlt has its own, with fewer records. `flat` is Sluice alone, over topics of up to 10,000,000 records (or
    --records) and 1 to 200 partitions. `all` runs all of these. Sluice's parts are measured alone as well, on the
    same bytes: checksums, codec, decoding, JSON, contract and Parquet.

    `lake` compares lakes in stores (emulated here) with a local one and counts requests. `cluster` compares a local
    Spark with a standalone one of two workers. `start` measures the phases of a run in a new process, a small
    catch-up on a warm session, and a plan over 1,000 partitions; with --peer, new processes of Sluice and of peers;
    --write stores these, or without peers the picture of a run's timeline.
    `fleet` lands one window of many small feeds, one by one and in one run, and counts requests to Kafka. `scale`
    runs the planner over up to 100,000 partitions on 1,000 brokers, in memory. `age` measures an hour of a feed
    that has run for months. `table` measures a batch for an old table. `republish` compares sending with the
    producers of Kafka, confluent-kafka and kafka-python. `waits` measures commands, reads and the code location
    next to plain scripts; it is part of `all`.

    $ python -m bench
    $ python -m bench gzip nested --repeat 3
    $ python -m bench all --write
    $ python -m bench raw --records 500000 --peer sluice --peer spark
    $ python -m bench start --peer rust --peer polars
    $ python -m bench fleet --feeds 200
    $ python -m bench age --months 12
    """
    chosen, ages = tuple(peer or ()), tuple(months or ())
    request = calls.BenchRequest(tuple(names or ()), records, repeat, warm_ups, cores, chosen, data, feeds, ages)
    alone: dict[tuple[str, ...], tuple[Callable[..., Any], Callable[..., Any]]] = {
        ("lake",): (calls.run_lake, lake_view),
        ("cluster",): (calls.run_cluster, cluster.cluster_view),
        ("start",): (calls.run_start, start.start_view),
        ("fleet",): (calls.run_fleet, fleet.fleet_view),
        ("scale",): (calls.run_scale, scale.scale_view),
        ("age",): (calls.run_age, age.age_view),
        ("republish",): (calls.run_send, send.send_view),
        ("table",): (calls.run_table, old_table.table_view),
        ("waits",): (calls.run_waits, waits.wait_view),
    }
    docs = Path(__file__).parents[1] / "docs" / "developers"
    if request.names == ("start",) and write and not chosen:
        picture = docs / timeline.PICTURE
        picture.write_text(calls.draw_start(request, session.terminal.note))
        return session.terminal.show(good(f"written to {picture}"))
    if request.names in alone:
        if write and request.names not in (("start",), ("waits",)):
            raise UsageError(
                f"{request.names[0]} has no table on the page of results",
                remedy="leave out --write",
            )
        measure, show = alone[request.names]
        measured = measure(request, session.terminal.note)
        session.terminal.show(*show(measured))
        if write and isinstance(measured, waits.WaitReport):
            write_page(BenchReport((), waits=_as_table(measured)), docs)
        elif write:
            write_page(BenchReport((), StartTimes(start.RECORDS, measured.medians, calls.describe(sys.argv[1:]))), docs)
        return session.terminal.print_document(measured.document())

    done: list[RaceResult] = []

    def keep(report: BenchReport) -> None:
        done.extend(report.races)
        if write:
            write_page(report, docs)

    try:
        calls.run(request, sys.argv[1:], session.terminal.note, keep)
        if ALL in request.names and not chosen:
            measured = calls.run_waits(request, session.terminal.note)
            session.terminal.show(*waits.wait_view(measured))
            if write:
                write_page(BenchReport((), waits=_as_table(measured)), docs)
    finally:  # each took minutes: an interrupt, or a later peer that fails, takes none of them away
        if done:
            report = BenchReport(tuple(done))
            session.terminal.show(*race_view(report))
            if write:
                session.terminal.show(good(f"written to {docs / PAGE}, its plot and its .json"))
            session.terminal.print_document(report.document())


def _as_table(report: waits.WaitReport) -> WaitTimes:
    return WaitTimes([w.row for w in report.waits], calls.describe(sys.argv[1:]))


if __name__ == "__main__":
    sys.exit(run_app(app, "bench"))
