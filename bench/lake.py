"""Lakes in object stores compared with a local one: speed, memory of a task, and requests by kind of work.

Emulators on this machine stand for the stores: moto for S3, Azurite, fake-gcs-server. They do not show a real store's
speed, but requests and the memory of a task are the same. Promises: requests are counted before the server, whichever
makes them; before each count the ledger is brought to its age by entries that mean nothing.
"""

from __future__ import annotations

import json
import secrets
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from os import getpid
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.load import ensure
from bench.measure import Cost, metering
from bench.workloads import ORDERS
from sluice.pipelines.batch.land import land
from sluice.pipelines.feed.feed import Feed
from sluice.pipelines.lake import paths
from sluice.pipelines.ledger import Ledger
from sluice.pipelines.ledger.entries import SkipEntry, dump
from sluice.pipelines.model.plans import AskedRange, Request, RequestKind
from sluice.resources.lake import open_lake
from sluice.resources.liveness import new_owner, now
from sluice.resources.local.local_kafka import LocalKafka
from sluice.resources.local.local_s3 import LocalS3
from sluice.resources.open_ports import open_ports

if TYPE_CHECKING:
    from tests.clouds import CloudStore

Note = Callable[[str], None]

RECORDS = 1_000_000
AGES = (10, 200, 2000)
"""Entries in the ledger."""
MANY_PARTS = 4
STEP = 1000
"""Offsets that one counted part is made of."""


@dataclass(frozen=True, slots=True)
class Speed:
    """One landing of the whole topic."""

    lake: str
    records: int
    seconds: float
    worker_bytes: int

    @property
    def rate(self) -> float:
        return self.records / self.seconds


@dataclass(frozen=True, slots=True)
class RequestCounts:
    """Requests by kind, at one age of the ledger."""

    entries: int
    first_read: Mapping[str, int]
    next_read: Mapping[str, int]
    one_part: Mapping[str, int]
    more_parts: Mapping[str, int]

    def of(self, what: str) -> Mapping[str, int]:
        """By the name of a field."""
        counts: Mapping[str, int] = getattr(self, what)
        return counts


@dataclass(frozen=True, slots=True)
class LakeReport:
    """`requests`: those of one landing of the whole topic, by store."""

    speeds: tuple[Speed, ...]
    counts: tuple[RequestCounts, ...]
    requests: Mapping[str, int]

    def document(self) -> dict[str, Any]:
        return asdict(self)


def run(records: int, folder: Path, note: Note) -> LakeReport:
    """Measure both lakes in `folder`, where the topic stays loaded. Raises SetupError, Failed."""
    workload = ORDERS.of(records)
    with LocalKafka(folder / "kafka-1") as kafka, LocalS3() as store:
        topic = ensure(workload, kafka.bootstrap, folder / "topics", note).topic
        with _start_emulators(note) as emulators:
            bench_lake = _BenchLake(kafka.bootstrap, topic, store, folder, emulators)
            speeds = tuple(_measure_speed(bench_lake, kind, records, note) for kind in ("local", "s3", *emulators))
            requests = {kind: _count_landing(bench_lake, kind, note) for kind in ("s3", *emulators)}
        return LakeReport(speeds, tuple(_count_requests(bench_lake, age, note) for age in AGES), requests)


@contextmanager
def _start_emulators(note: Note) -> Iterator[Mapping[str, CloudStore]]:
    """Yields Azurite and fake-gcs-server in a checkout where `make lakes` has installed them."""
    from tests import clouds  # late: the checkout has it, not the package

    if not (clouds.AZURITE.exists() and clouds.FAKE_GCS.exists()):
        note("without Azurite and fake-gcs-server: make lakes installs them")
        yield {}
        return
    with clouds.run_azurite() as azure, clouds.run_google() as google:
        yield {"azure": azure, "google": google}


@dataclass(frozen=True)
class _BenchLake:
    bootstrap: str
    topic: str
    store: LocalS3
    folder: Path
    emulators: Mapping[str, CloudStore]

    @contextmanager
    def feed(self, kind: str, endpoint: str = "") -> Iterator[Feed]:
        """A feed with a lake of its own; `endpoint` is a proxy's before the store."""
        name = secrets.token_hex(4)
        with _removing_lake(self.folder / f"lake-{name}") as folder:
            settings = {
                "feed": "bench",
                "kafka": {"bootstrap": self.bootstrap},
                "topics": self.topic,
                "start": "earliest",
                "commit": "none",
                "lake": str(folder),
                **self._build_store(kind, name, endpoint),
            }
            yield Feed.model_validate(settings, context={"root": self.folder})

    def _build_store(self, kind: str, name: str, endpoint: str) -> dict[str, Any]:
        if kind == "s3":
            s = self.store.settings
            keys = {"access_key_id": "local", "secret_access_key": "local", "region": s.region}
            return {"lake": f"{self.store.lake}/{name}", "s3": {"endpoint": endpoint or s.endpoint, **keys}}
        if kind in self.emulators:
            store = self.emulators[kind]
            lines = (store.pass_through(endpoint) if endpoint else store).build_feed_settings()
            return {"lake": lines["lake"], store.section: json.loads(lines[store.section])}
        return {}


@contextmanager
def _removing_lake(folder: Path) -> Iterator[Path]:
    import shutil

    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


# -- speed


def _measure_speed(bench_lake: _BenchLake, kind: str, records: int, note: Note) -> Speed:
    """The second landing counts; each has a lake of its own."""
    from sluice.resources.spark.engine import session

    for turn in ("warming up", "landing"):
        note(f"{kind}: {turn}")
        with bench_lake.feed(kind) as feed:
            cost = _landing(feed)
    session(feed.spark).stop()
    return Speed(kind, records, cost.seconds, cost.peaks.get("worker", 0))


def _count_landing(bench_lake: _BenchLake, kind: str, note: Note) -> int:
    """Returns the requests of a landing into an empty lake, the test of the store included."""
    from tests.resources.lake.s3_faults import run_proxy

    note(f"{kind}: counting requests")
    store = bench_lake.emulators.get(kind, bench_lake.store)
    with run_proxy(store.settings.endpoint or "") as proxy, bench_lake.feed(kind, proxy.endpoint) as feed:
        _landing(feed)
        return len(proxy.requests)


def _landing(feed: Feed) -> Cost:
    with metering(getpid()) as meter:
        _land(feed, Request(RequestKind.CATCH_UP))
    return meter.cost


def _land(feed: Feed, request: Request) -> None:
    with open_ports(feed) as ports:
        land(feed, ports, request, new_owner("bench"), lambda progress: None).check()


# -- requests


def _count_requests(bench_lake: _BenchLake, entries: int, note: Note) -> RequestCounts:
    note(f"s3: counting requests at {entries:,} ledger entries")
    with bench_lake.feed("s3") as feed:
        _land(feed, _ranges(bench_lake.topic, 1, 0))
        _age(feed, entries)
        ledger = Ledger(open_lake(feed), feed.stored, now)
        ledger.read()  # leaves a checkpoint where one is due
        fresh = Ledger(open_lake(feed), feed.stored, now)
        count = bench_lake.store.requests
        return RequestCounts(
            entries,
            _spent(count, fresh.read),
            _spent(count, fresh.read),
            _spent(count, lambda: _land(feed, _ranges(bench_lake.topic, 1, STEP))),
            _spent(count, lambda: _land(feed, _ranges(bench_lake.topic, MANY_PARTS, 2 * STEP))),
        )


def _spent(count: Callable[[], Counter[str]], work: Callable[[], object]) -> dict[str, int]:
    before = count()
    work()
    return dict(sorted((count() - before).items()))


def _ranges(topic: str, parts: int, start: int) -> Request:
    return Request(RequestKind.OFFSETS, tuple(AskedRange(topic, p, start, start + STEP) for p in range(parts)))


def _age(feed: Feed, entries: int) -> None:
    """Write empty entries concurrently until the ledger has this many."""
    lake = open_lake(feed)
    begun = Ledger(lake, feed.stored, now).read()

    def write(number: int) -> None:
        entry = SkipEntry(ranges=(), reason="age", write=secrets.token_hex(8), at=now(), cluster=begun.cluster)
        lake.put(paths.log_path(feed.stored, number), dump(entry))

    with ThreadPoolExecutor(8, "bench-age") as pool:
        list(pool.map(write, range(begun.number, entries)))
