"""`sluice bench`: how fast, side by side with the usual ways."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

from sluice.cli.app.invocation import Session, command
from sluice.cli.terminal.output import good
from sluice.pipelines.errors import UsageError

Names = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[NAME]...", help="What to measure, as named above; none: the main ones.", show_default=False
    ),
]
Records = Annotated[
    int | None, typer.Option(min=1, help="Records in the topic; otherwise what the benchmark says (raw: 3,000,000).")
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
        help="Only this peer (again for more): sluice, spark, dlt, daft, sluice-apart, spark-avro, confluent-kafka,"
        " confluent-avro, confluent-protobuf, kafka-python.",
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
Write = Annotated[bool, typer.Option("--write", help="Write the results into docs/performance.md, its plot and .json.")]


def register(app: typer.Typer) -> None:
    command(app)(bench)


def bench(
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

    It starts a Kafka of its own, loads a topic (kept for the next time), sets up the peers, warms up, lets them land
    the topic in turn, checks every row that they landed, and prints medians and ratios. It takes some minutes for each
    benchmark, and means most on a machine that is otherwise quiet.

    The main ones are raw, typed and contract. What differs from typed in one thing: the codec in uncompressed, gzip,
    snappy and zstd (else lz4); the records in small (50 B), large (10 KB), nested (structs and lists) and escapes
    (escapes in every record, keys in another order); how they lie in partitions (200), skewed (90 % in one of four)
    and brokers (three). avro, protobuf and json_schema have the same fields in these formats, behind the number of a
    schema. dlt has its own, with fewer records. `flat` is Sluice alone, over topics that grow to 10,000,000 records (or
    as many as --records says) and over 1 to 200 partitions. `all` is all of these.

    With the peers' figures come Sluice's parts alone: the CPU time that checksums, codec, decoding, JSON, contract and
    Parquet take by themselves on the same bytes, so that whatever a landing took beyond their sum can be seen.

    `lake` lands on S3 (a server on this machine) and on a local lake, and counts the requests to S3. `cluster` lands by
    a local Spark and by a standalone one of two workers, which the pack is sent to. `start` tells what a run in a new
    process waits for, a small catch-up on a warm session, and a plan over 1,000 partitions. `fleet` lands one window of
    many small feeds, each by itself and all in one run, and counts the requests to Kafka. `scale` runs the planner over
    up to 100,000 partitions on 1,000 brokers, in memory. `age` tells what an hour costs a feed that has run for months.
    `table` tells what a batch costs a table that is old. `republish` sends records into Kafka, beside Kafka's own
    producer, confluent-kafka's and kafka-python's.

    $ sluice bench
    $ sluice bench gzip nested --repeat 3
    $ sluice bench all --write
    $ sluice bench raw --records 500000 --peer sluice --peer spark
    $ sluice bench fleet --feeds 200
    $ sluice bench age --months 12
    """
    if find_spec("sluice.bench") is None:
        raise UsageError(
            "the benchmarks are not part of an installed Sluice",
            remedy="clone the repository, and run `make bench` there",
        )
    from sluice.bench import age, cluster, fleet, scale, send, start
    from sluice.bench import command as calls
    from sluice.bench import table as old_table
    from sluice.bench.render import PAGE, lake_view, race_view
    from sluice.bench.render import write as written
    from sluice.bench.results import BenchReport

    chosen, ages = tuple(peer or ()), tuple(months or ())
    asked = calls.BenchRequest(tuple(names or ()), records, repeat, warm_ups, cores, chosen, data, feeds, ages)
    alone: dict[tuple[str, ...], tuple[Callable[..., Any], Callable[..., Any]]] = {
        ("lake",): (calls.run_lake, lake_view),
        ("cluster",): (calls.run_cluster, cluster.cluster_view),
        ("start",): (calls.run_start, start.start_view),
        ("fleet",): (calls.run_fleet, fleet.fleet_view),
        ("scale",): (calls.run_scale, scale.scale_view),
        ("age",): (calls.run_age, age.age_view),
        ("republish",): (calls.run_send, send.send_view),
        ("table",): (calls.run_table, old_table.table_view),
    }
    if asked.names in alone:
        if write:
            raise UsageError(
                f"what {asked.names[0]} finds has no table to be written into",
                remedy="leave out --write, and quote what it prints",
            )
        measure, show = alone[asked.names]
        measured = measure(asked, session.terminal.note)
        session.terminal.show(*show(measured))
        return session.terminal.document(measured.document())
    docs = session.project.root / "docs"

    def keep(done: BenchReport) -> None:
        if write:
            written(done, docs)

    report = calls.run(asked, sys.argv[1:], session.terminal.note, keep)
    session.terminal.show(*race_view(report))
    if write:
        session.terminal.show(good(f"written to {docs / PAGE}, its plot and its .json"))
    session.terminal.document(report.document())
