"""The checker over one feed after another, after all faults are healed and writers have stopped.

It judges by Kafka's own tools, the ledger's files and the Parquet files. Values of Avro, Protobuf and JSON Schema are
read by the formats' own libraries before. Then tables must have the rows of the files, and quarantined records one dead
letter each.
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pyarrow.parquet as pq

from sluice.resources.local.local_kafka import LocalKafka
from tests.checker import facts
from tests.checker.facts import Evidence, find_value_id
from tests.checker.gather import gather_local, list_writes
from tests.checker.invariants import NAMES, Settings, Verdict, check
from tests.checker.lake import Folder, fetch_s3
from tests.checker.ledger import fold_entries
from tests.faults.kinds import list_letters, list_quarantined
from tests.integration.canaries import read_everything
from tests.resources.kafka.tools import is_stable, wait_until
from tests.soak.commands import Commands
from tests.soak.faults import SKEW
from tests.soak.feeds import BY_NAME, CANARY, FEEDS, SoakFeed
from tests.soak.readers import Readers, list_rows
from tests.soak.upkeep import Upkeep
from tests.soak.writers import Writers

_SETTINGS = Settings(healed=True, skew_ms=2 * SKEW * 1000 + 60_000)
_TRIES = 8
_STABLE_SECONDS = 120
_UNDECIDED = {7, 8}
"""Invariants about committed offsets, of a feed that commits none."""


class SoakFolder(Folder):
    """A feed with a table keeps superseded files for its older snapshots, and Delta's log among its files."""

    def list_visible(self) -> set[str]:
        paths = super().list_visible()
        book = fold_entries(self.read_entries())
        live = {p.path for r in book.list_live_receipts() for p in r.parts}
        superseded = ({p.path for r in book.receipts for p in r.parts} | book.replaced) - live
        return {p for p in paths if "/_delta_log/" not in p and p not in superseded}


@dataclass
class Checks:
    """The checker's rounds. `observed`: entries of the ledgers as earlier rounds saw them, by feed."""

    commands: Commands
    writers: Writers
    readers: Readers
    upkeep: Upkeep
    observed: dict[str, list[tuple[int, str]]] = field(default_factory=dict)
    verdicts: list[Verdict] = field(default_factory=list)
    broken: set[str] = field(default_factory=set)
    """Feeds with a finding: a broken invariant stays broken."""

    def check_feeds(self, names: Sequence[str]) -> None:
        """Judge the feeds. No run, no upkeep and no fault may be at work. Writers to them pause."""
        self.writers.pause(names)
        try:
            for name in names:
                self._check_feed(BY_NAME[name])
        finally:
            self.writers.resume()

    def _check_feed(self, feed: SoakFeed) -> None:
        journal = self.commands.site.journal
        try:
            problems = list(self._find_problems(feed))
        except Exception as error:  # noqa: BLE001 - other feeds are judged all the same
            problems = [f"{type(error).__name__}: {error}"]
        if problems and feed.name not in self.broken:
            self.broken.add(feed.name)
            for problem in problems[:5]:
                journal.fail(f"checker of {feed.name}: {problem}")
        journal.note("check", f"{feed.name}: {'broken' if problems else 'all hold'}")

    def _find_problems(self, feed: SoakFeed) -> Iterator[str]:
        site = self.commands.site
        wait_until(lambda: is_stable(site.arena.kafka, feed.topic), _STABLE_SECONDS)
        done = None
        for _ in range(_TRIES):
            done = self.commands.run("run", feed.name, "--no-dagster")
            if done.is_clean:
                break
        if done is None or not done.is_clean:
            yield f"no clean run in {_TRIES} after everything was healed: {done}"
            return
        if feed.erases:
            self.upkeep.sequence = 0  # once more: those that a killed erasure left, and those that landed since
            self.upkeep.erase(killable=False)
        if feed.table:
            for word in ("sync", "check"):
                if (done := self.commands.run("table", word, feed.name)).code:
                    yield f"the table differs: {done} {done.document}"
        if (done := self.commands.run("audit", feed.name)).code:
            yield f"the audit fails: {done} {done.document}"
        keep = site.temporary.parent / "evidence" / feed.name
        shutil.rmtree(keep, ignore_errors=True)
        keep.mkdir(parents=True)
        folder = self._fetch(feed, keep)
        verdict, evidence = self._judge(feed, folder, keep)
        yield from (str(verdict) for _ in [0] if not verdict.holds)
        if open_ := set(NAMES) - set(verdict.decided) - (_UNDECIDED if feed.name == "raw_ledger" else set()):
            yield f"invariants {open_} were not decided: {verdict}"
        if feed.table:
            yield from self.readers.query_table(feed)
            yield from self._compare_table(feed, folder)
        yield from self._compare_kind(feed, folder)
        if feed.letters:
            yield from _compare_letters(site.arena.kafka, feed, folder)
        if feed.source:
            yield from self._compare_republished(feed, evidence)
        if verdict.holds:
            shutil.rmtree(keep, ignore_errors=True)
        else:
            copy = site.project.parent / "evidence" / f"{feed.name}-{site.journal.count('check')}"
            shutil.copytree(keep, copy, dirs_exist_ok=True)

    def _fetch(self, feed: SoakFeed, keep: Path) -> Folder:
        """Returns the feed's part of its lake, as files."""
        site = self.commands.site
        if feed.local:
            root = site.project / ".sluice" / "lake"
        else:
            for below in (f"data/{feed.name}/", f"quarantine/{feed.name}/", f"_sluice/{feed.name}/"):
                root = fetch_s3(site.lake, keep, site.backend.settings.endpoint, below)
        return (SoakFolder if feed.table else Folder)(root, feed.name)

    def _judge(self, feed: SoakFeed, folder: Folder, keep: Path) -> tuple[Verdict, Evidence]:
        evidence = gather_local(self.commands.site.arena.kafka, folder, keep)
        for log in evidence.logs.values():
            if log.records is not None:
                log.records = {o: replace(s, value=feed.decode(s.value)) for o, s in log.records.items()}
        notes = self.writers.list_notes(feed.name)
        evidence.produced = facts.read_produced(notes) if notes and not feed.source else None
        entries = self.observed.setdefault(feed.name, [])
        evidence.observed = tuple(entries)
        verdict = check(folder, evidence, _SETTINGS)
        entries += [pair for pair in list_writes(folder) if pair not in set(entries)]
        self.verdicts.append(verdict)
        return verdict, evidence

    def _compare_table(self, feed: SoakFeed, folder: Folder) -> Iterator[str]:
        """The table has the rows of the ledger's live files, by position and amount."""
        names = (feed.partition_column, feed.offset_column, "amount")
        book = fold_entries(folder.read_entries())
        paths = sorted({p.path for r in book.list_live_receipts() for p in r.parts if p.kind == "landed"})
        rows = [r for path in paths for r in list_rows(pq.ParquetFile(folder.root / path).read(list(names)), names)]
        pair = self.readers.scan(feed, names, 0)
        there = pair[0] if pair else []
        if sorted(map(str, rows)) != sorted(map(str, there)):
            yield f"the table has {len(there)} rows, and the ledger's files have {len(rows)}"

    def _compare_kind(self, feed: SoakFeed, folder: Folder) -> Iterator[str]:
        """The promises of changes, protected fields and erased records, which the checker does not know."""
        if feed.erases and (remaining := [s for s in self._list_sequences(folder) if s <= self.upkeep.sequence]):
            yield f"{len(remaining)} erased records are in the files, such as one with sequence {min(remaining)}"
        if feed.customers:
            yield from self._compare_current(feed, folder)
        if feed.protects:
            for path, data in read_everything(self.commands.site.project / ".sluice"):
                if CANARY.encode() in data:
                    yield f"protected values are in {path}"

    def _list_sequences(self, folder: Folder) -> Iterator[int]:
        """The sequences of all landed rows in the lake, also of files that no longer count."""
        for path in (folder.root / "data").rglob("*.parquet"):
            yield from (s for s in pq.read_table(path, columns=["sequence"]).column(0).to_pylist() if s is not None)

    def _compare_current(self, feed: SoakFeed, folder: Folder) -> Iterator[str]:
        """The table of current rows has the newest change of each customer. Of expired windows it has more."""
        order = ("kafka_timestamp", "kafka_partition", "kafka_offset")
        names = ("customer", "producer", "sequence")
        book = fold_entries(folder.read_entries())
        paths = sorted({p.path for r in book.list_live_receipts() for p in r.parts if p.kind == "landed"})
        tables = (pq.ParquetFile(folder.root / path).read([*order, *names]) for path in paths)
        rows = sorted(row for table in tables for row in list_rows(table, (*order, *names)))
        newest = {row[3]: row[3:] for row in rows}
        current = {row[0]: row for row in self.readers.scan_current(feed, names)}
        for customer, row in newest.items():
            if current.get(customer) != row:
                yield f"the current row is {current.get(customer)}, and the newest change {row}"

    def _compare_republished(self, feed: SoakFeed, evidence: Evidence) -> Iterator[str]:
        """Each record that was sent is in the topic once."""
        senders = Counter(
            find_value_id(s.key, s.value) for log in evidence.logs.values() for s in (log.records or {}).values()
        )
        if twice := [name for name, n in senders.items() if n > 1]:
            yield f"{len(twice)} records were republished twice, such as {twice[0]}"
        sent = sum(self.upkeep.republished.values())
        starts = sum(log.log_start for log in evidence.logs.values())
        if not self.upkeep.open_republish and not starts and senders.total() != sent:
            yield f"{senders.total()} records are in the topic, and {sent} were sent"


def _compare_letters(kafka: LocalKafka, feed: SoakFeed, folder: Folder) -> Iterator[str]:
    """Every quarantined record has one dead letter. Letters of expired ones stay."""
    letters = Counter(list_letters(kafka, feed.letters_topic))
    if twice := [position for position, n in letters.items() if n > 1]:
        yield f"{len(twice)} dead letters were sent twice, such as {twice[0]}"
    if missing := set(list_quarantined(folder.root / "quarantine" / feed.name)) - set(letters):
        yield f"{len(missing)} quarantined records have no dead letter, such as {min(missing)}"


def plan_round(number: int, size: int) -> list[str]:
    """Returns the names of the feeds that a round judges, in turn."""
    names = [f.name for f in FEEDS]
    return [names[(number * size + n) % len(names)] for n in range(size)]


def sum_counts(verdicts: Sequence[Verdict]) -> int:
    """Returns how many records were compared with the log, over all verdicts."""
    return sum(v.counts.get("records compared with the log", 0) for v in verdicts)
