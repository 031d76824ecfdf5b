"""`sluice demo`: one whole batch on a real local Kafka, narrated, and then one more.

Promises: it lives in a project folder of its own (`.sluice/demo` below the current folder), starts afresh each time,
listens on loopback only, and touches nobody's feeds, cluster or Dagster home, whatever the environment says. What it
landed stays, to be looked at; Kafka is stopped at the end unless it is to be kept.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import RenderableType
from rich.text import Text

from sluice.cli import audit, plan, produce, run
from sluice.cli.session import Session, command
from sluice.cli.terminal import count, facts, good, seconds, table
from sluice.pipelines.errors import ProofFailed
from sluice.pipelines.ports import Progress
from sluice.pipelines.values import Request, RequestKind

if TYPE_CHECKING:
    from sluice.pipelines.feed import Feed
    from sluice.resources.events import Mix, Sent

FEED = "orders"
PARTITIONS = 6
SEED = 20_261_120
CATCH_UP = Request(RequestKind.CATCH_UP)

_FEED_FILE = """\
# Written by `sluice demo`, anew each time.
feed: {feed}
kafka:
  bootstrap: {bootstrap}
topics: {feed}
group: sluice-demo
start: earliest
"""


def register(app: typer.Typer) -> None:
    command(app)(demo)


def demo(
    session: Session,
    records: Annotated[
        int, typer.Option("--records", "-n", metavar="N", min=1000, help="Events of the first batch.")
    ] = 300_000,
    keep: Annotated[bool, typer.Option("--keep", help="Leave Kafka running at the end.")] = False,
) -> int:
    """Show one whole batch on a real local Kafka.

    Real events in, proven Parquet out, offsets committed; then some more events, of which only the new ones land.
    Everything is in .sluice/demo and starts afresh each time.

    $ sluice demo
    $ sluice demo --keep && sluice ui --project .sluice/demo
    """
    began = time.monotonic()
    folder = (session.folder or Path.cwd()).resolve() / ".sluice" / "demo"
    with _own_environment(), _kafka(session, folder, keep):
        own = Session(session.terminal, folder, session.debug)
        report = _Show(own, own.feed(FEED)).all(records)
    session.terminal.show(*_closing(folder, keep, time.monotonic() - began))
    session.terminal.document({"project": str(folder), "seconds": time.monotonic() - began, **report})
    return 0


@contextmanager
def _own_environment() -> Iterator[None]:
    """Without the variables that would lead a feed or Dagster elsewhere."""
    names = ("DAGSTER_HOME", "KAFKA_BOOTSTRAP", "SLUICE_PROJECT")
    kept = {name: os.environ.pop(name) for name in names if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(kept)


@contextmanager
def _kafka(session: Session, folder: Path, keep: bool) -> Iterator[None]:
    """A fresh cluster in a fresh project; stopped however the block ends, unless it is kept and all went well."""
    from sluice.resources.local_kafka import VERSION, LocalKafka

    _clear(folder)
    (folder / "feeds").mkdir(parents=True)
    kafka = LocalKafka(folder / ".sluice" / "kafka")
    began = time.monotonic()
    with session.terminal.working(f"starting Apache Kafka {VERSION} (the first time its jars are fetched)"):
        kafka.start()
    (folder / "feeds" / f"{FEED}.yaml").write_text(_FEED_FILE.format(feed=FEED, bootstrap=kafka.bootstrap))
    session.terminal.show(
        _step(1, "A real Kafka"),
        good(f"Apache Kafka {VERSION} answers at {kafka.bootstrap} ({seconds(time.monotonic() - began)})"),
    )
    stop = True
    try:
        yield
        stop = not keep
    finally:
        if stop:
            with session.terminal.working("stopping Kafka"):
                kafka.stop()


def _clear(folder: Path) -> None:
    """Remove what an earlier demo left; its cluster is stopped first."""
    from sluice.resources.local_kafka import LocalKafka

    if not folder.exists():
        return
    cluster = folder / ".sluice" / "kafka"
    if (cluster / "cluster.json").exists():
        LocalKafka.attach(cluster).stop()
    shutil.rmtree(folder)


def _step(number: int, title: str) -> RenderableType:
    return Text.assemble("\n", (f" {number} ", "bold reverse"), (f" {title}", "bold"))


@dataclass(frozen=True)
class _Show:
    """The steps after Kafka stands, in the demo's own project. Each shows itself and returns its part of `--json`."""

    session: Session
    feed: Feed

    def all(self, records: int) -> dict[str, Any]:
        produced = self.produce(2, f"{count(records)} order events", records, 0)
        planned = self.plan(3)
        first = self.run(4, "The batch, through Dagster and Spark")
        landed = self.preview(5)
        committed = self.committed(6)
        proven = self.audit(7, rescan=True)
        more = self.produce(8, "Some more events", max(records // 10, 100), records)
        second = self.run(9, "Again: only what is new")
        again = self.audit(10, rescan=False)
        return {
            "produced": [produced, more],
            "plan": planned,
            "runs": [first, second],
            "preview": landed,
            "committed": committed,
            "audits": [proven, again],
        }

    def produce(self, number: int, title: str, records: int, first: int) -> dict[str, Any]:
        """Two thirds as they come, one third in transactions, of which some are aborted."""
        from sluice.resources import events

        self._say(_step(number, title))
        events.create(self.feed.kafka, [FEED], PARTITIONS)
        plain = self._send(events.Mix(SEED + first, first, tombstones=0.01, headers=0.1), records * 2 // 3, None)
        rest = events.Mix(SEED + first + 1, first + plain.records, tombstones=0.01, headers=0.1, aborted=0.15)
        transactions = self._send(rest, records - plain.records, "sluice-demo-produce")
        sent = plain + transactions
        self._say(*produce.view(sent, (FEED,)))
        return asdict(sent)

    def _send(self, mix: Mix, records: int, transactional_id: str | None) -> Sent:
        from sluice.resources import events

        now = time.time_ns() // 1_000_000
        stream = events.orders(mix, records, now - 600_000, now)
        how = events.Sending((FEED,), transactional_id)
        with self.session.terminal.progress() as meter:
            return events.send(self.feed.kafka, stream, mix, how, lambda done: meter(Progress("send", done, records)))

    def plan(self, number: int) -> dict[str, Any]:
        from sluice.pipelines.batch import preview

        with self.session.terminal.working("asking Kafka"), self.session.open_edges(self.feed) as edges:
            seen = preview(self.feed, edges, CATCH_UP)
        self._say(_step(number, "The plan: nothing is read yet"), *plan.view(seen, FEED, CATCH_UP)[1:])
        return plan.document(seen, FEED, CATCH_UP)

    def run(self, number: int, title: str) -> dict[str, Any]:
        """A run that did not do all ends the demo with its error."""
        self._say(_step(number, title))
        ran = run.execute(self.session, FEED, CATCH_UP)
        self._say(*run.view(ran)[1:])
        if ran.outcome.error:
            raise ran.outcome.error
        return run.document(ran)

    def preview(self, number: int) -> dict[str, Any]:
        """The files, read by somebody who knows nothing of Sluice."""
        import duckdb

        files = f"{self.feed.lake}/data/{FEED}/**/*.parquet"
        with duckdb.connect() as db:
            db.read_parquet(files).project(_COLUMNS).create_view("landed")
            rows, sums = db.sql(_SOME).fetchall(), db.sql(_SUMS).fetchall()
        self._say(
            _step(number, "What landed, read by DuckDB"),
            f"  {files}",
            table(
                ("partition", "offset", "key", "order", "amount", "currency", "status"), _texts(rows), "offset amount"
            ),
            "",
            table(("currency", "orders", "revenue"), _texts(sums), "orders revenue"),
        )
        return {
            "files": files,
            "by_currency": [{"currency": c, "orders": n, "revenue": str(r or 0)} for c, n, r in sums],
        }

    def committed(self, number: int) -> list[dict[str, Any]]:
        """The group's offsets as a plain consumer sees them."""
        from kafka import KafkaConsumer
        from kafka import TopicPartition as Place

        places = [Place(FEED, p) for p in range(PARTITIONS)]
        consumer = KafkaConsumer(
            bootstrap_servers=self.feed.kafka.bootstrap, group_id=self.feed.group, isolation_level="read_committed"
        )
        with closing(consumer):
            ends = consumer.end_offsets(places)
            found = [(f"{FEED}:{p.partition}", consumer.committed(p), ends[p]) for p in places]
        rows = [(name, count(at), count(end)) for name, at, end in found]
        self._say(
            _step(number, f"The offsets of group {self.feed.group}, asked of Kafka"),
            table(("partition", "committed", "end of the log"), rows, "committed end"),
        )
        return [{"partition": name, "committed": at, "end": end} for name, at, end in found]

    def audit(self, number: int, *, rescan: bool) -> dict[str, Any]:
        report = audit.prove(self.session, self.feed, rescan=rescan)
        how = "The proof, against Kafka itself" if rescan else "The proof, for both batches"
        shown = audit.view(report, rescanned=rescan)[1:]
        self._say(_step(number, how), *(shown if rescan else shown[-1:]))
        if not report.closes:
            raise ProofFailed("the account of the demo does not close", remedy="this is a bug: please report it")
        return audit.document(report)

    def _say(self, *what: RenderableType) -> None:
        self.session.terminal.show(*what)


_COLUMNS = """partition, "offset" as row, decode(key) as key, decode(value)::json as doc"""
_SOME = """select partition, row, key, doc->>'order_id', doc->>'amount', doc->>'currency', doc->>'status'
from landed where doc is not null and row % 9001 = 150 order by partition, row limit 5"""
_SUMS = """select doc->>'currency' as currency, count(*), sum((doc->>'amount')::decimal(18, 2))
from landed group by 1 order by 2 desc"""


def _texts(rows: Sequence[Sequence[Any]]) -> list[list[str]]:
    """Cells as text, numbers with separators. What has no currency is a tombstone."""
    return [["tombstones" if row[0] is None else _text(row[0]), *map(_text, row[1:])] for row in rows]


def _text(cell: Any) -> str:
    if cell is None:
        return "–"
    return f"{cell:,}" if isinstance(cell, int | Decimal) else str(cell)


def _closing(folder: Path, keep: bool, took: float) -> list[RenderableType]:
    try:
        shown = folder.relative_to(Path.cwd())
    except ValueError:
        shown = folder
    sluice, project = _command(), f"--project {shlex.quote(str(shown))}"
    kafka = ("stop Kafka", "stop") if keep else ("Kafka again", "start")
    return [
        Text.assemble(
            "\n", (" ✓ ", "bold reverse green"), (f" done in {seconds(took)}", "bold"), ". It is all still there:"
        ),
        facts(
            ("Dagster's UI", f"{sluice} ui {project}"),
            ("the account", f"{sluice} audit {FEED} {project}"),
            ("one record", f"{sluice} explain {FEED} {FEED}:0:150 {project}"),
            (kafka[0], f"{sluice} kafka {kafka[1]} {project}"),
        ),
    ]


def _command() -> str:
    """How to call us from here: `make demo` does not put us on the path."""
    return "sluice" if shutil.which("sluice") else os.path.relpath(sys.argv[0])
