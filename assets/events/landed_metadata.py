"""Events and metadata of landed batches, windows and their quarantine, all from the ledger.

A window's event exists only once the window is complete. A batch's event has no partition; it is stored if no window's
event covers all of the batch. Both carry the data version `<ledger>/<batch>/<plan hash>` of the newest batch.

A run that ends between the publish entry and its events leaves a gap: `roll_forward` fills it from the ledger, with the
same metadata, and `require_reported` raises while there is one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

import dagster as dg
import pyarrow as pa

from sluice.assets.events.ledger_view import Judged, LedgerView, quarantines
from sluice.assets.instance import internals
from sluice.assets.specs.asset_specs import Keys, Metadata, describe_columns, plain, table
from sluice.pipelines.errors import Failed
from sluice.pipelines.feed.feed import Feed
from sluice.pipelines.lake import paths
from sluice.pipelines.ledger import Batch
from sluice.pipelines.model.kafka import Key, Range
from sluice.pipelines.model.receipts import (
    SHARES,
    BrokerTraffic,
    DriftKind,
    Part,
    PartKind,
    Progress,
    Receipt,
    Reporter,
)
from sluice.pipelines.planning import windows
from sluice.pipelines.ports import Lake
from sluice.pipelines.status.batch_facts import BatchFacts, TopicTraffic
from sluice.pipelines.util.units import many

if TYPE_CHECKING:
    from sluice.pipelines.operating.check_window import WindowCheck


def build_batch_metadata(view: LedgerView, batch: Batch) -> Metadata:
    """Returns the metadata of a published batch, the same for every run that records it."""
    facts = view.read_facts([batch])
    # Receipts without a gap between them are one range.
    ranges = [
        (k, r, BatchFacts([x for x in f.receipts if r.meets(x.offset_range.range)]))
        for k, f in facts.by_partition.items()
        for r in f.ranges
    ]
    return {
        "dagster/uri": view.lake.locate(paths.visible_roots(view.feed.stored)[0]),
        "ranges": _build_range_table(ranges),
        **_build_amounts(facts),
        **_build_rates(facts),
        **_build_task_time(facts),
        **_build_brokers(facts),
        **_describe_engines(facts),
        "offset_ranges_adopted": len(facts.adopted_receipts),
        "offset_ranges_failed": len(view.read_entry(batch).failures),
        **_describe_batch(view, batch),
    }


def build_window_metadata(view: LedgerView, window: int) -> Metadata:
    """Returns the metadata of a complete window, over all batches that landed it."""
    batches = view.list_batches(window)
    of_batches = view.read_facts(batches)
    facts = BatchFacts(view.list_receipts(window), of_batches.traffic)
    ranges = {k: windows.find_range(view.state, k, window, view.feed.window) for k in sorted(view.state.origins)}
    by_key = facts.by_partition
    return {
        **_describe_check(view, window),
        "dagster/partition_row_count": facts.counts.landed,
        "dagster/uri": _locate(view, window, 0),
        "boundaries": _build_range_table(
            [(k, r, by_key.get(k, BatchFacts(()))) for k, r in ranges.items() if r is not None]
        ),
        **({"clocks": note} if (note := windows.describe_against(view.state, window, view.feed.window)) else {}),
        **_build_amounts(facts),
        **_build_quality(view, window, facts),
        **build_column_schema(view, facts.receipts),
        **_build_rates(of_batches),
        **_build_task_time(facts),
        **_build_brokers(facts),
        **_describe_engines(facts),
        **_describe_batches(view, batches),
    }


def _describe_check(view: LedgerView, window: int) -> Metadata:
    """Returns the check of a window as text, if the run has checked it."""
    if (check := view.checks.get(window)) is None:
        return {}
    address = view.lake.locate(paths.get_hour_page_path(view.feed.stored, window, view.feed.output))
    verdict, text = describe_hour(check, address)
    return {"verdict": verdict, "check": dg.MetadataValue.md(text)}


def describe_hour(c: WindowCheck, address: str) -> tuple[str, str]:
    """Returns the verdict of a check, and all of it as Markdown."""
    # Late: definitions load without it.
    from sluice.pipelines.operating import check_text

    kind, sentence = check_text.describe_verdict(c)
    verdict = f"{ {'good': '✓', 'warn': '!', 'bad': '✗'}[kind] } {sentence}"
    reasons = [f"- {_show(r.text)} → {_show(r.remedy)}" for r in check_text.list_reasons(c)]
    unchecked = [f"- not checked in Kafka: {_show(text)}" for text in c.unchecked]
    causes = (
        [("", f"{cause}: {examples}") for cause, examples in check_text.describe_copies(c.rows.repeats)]
        if c.rows
        else []
    )
    # Values stay out of Dagster's database, which an erasure does not reach.
    samples = (("", f"{why}: {', '.join(r.position for r in first)}") for why, first in check_text.describe_refusals(c))
    figures = [f"| {name} | {_show(text)} |" for name, text in [*check_text.list_figures(c), *samples, *causes]]
    lines = [f"**{_show(verdict)}**", *reasons, *unchecked, "", "| | |", "|---|---|", *figures]
    return verdict, "\n".join([*lines, "", f"Page: {_show(address)}"])


def _show(text: str) -> str:
    """Text as Markdown, also in a cell of a table."""
    return "<br>".join(plain(line).replace("|", r"\|") for line in text.splitlines())


def build_quarantine_metadata(view: LedgerView, window: int) -> Metadata:
    """Returns the metadata of a complete window's quarantine."""
    facts = BatchFacts(view.list_receipts(window))
    parts = [p for _, p in facts.parts(PartKind.QUARANTINED)]
    return {
        "dagster/partition_row_count": facts.counts.quarantined,
        "dagster/uri": _locate(view, window, 1),
        "rows": facts.counts.quarantined,
        "share": round(facts.counts.quarantined_share, 6),
        "bytes": sum(p.bytes for p in parts),
        "files": len({p.path for p in parts}),
        "reasons": _count_reasons(view.lake, parts),
    }


def _locate(view: LedgerView, window: int, root: int) -> str:
    """Returns the address of a window's folder below one of the feed's visible roots."""
    settings = view.feed.window
    folder = paths.window_folder(settings.local(window), settings.length, view.state.folder_prefix)
    return view.lake.locate(paths.join(paths.visible_roots(view.feed.stored)[root], view.feed.output, folder))


def _build_quality(view: LedgerView, window: int, facts: BatchFacts) -> Metadata:
    """Returns numbers to plot: breaches of the contract, the share of quarantined rows, fields beyond the schema."""
    quality = Metadata()
    if view.feed.contract is not None:
        quality |= count_breaches(view.read_judged(window))
    if quarantines(view.feed):
        quality["quarantined_share"] = round(facts.counts.quarantined_share, 6)
    if view.feed.columns is not None:
        quality["new_fields"] = sum(d.kind is DriftKind.NEW for d in facts.drift)
    return quality


def count_breaches(judged: Sequence[Judged]) -> Metadata:
    """Returns the share of values that broke an expectation; empty without expectations."""
    if not judged:
        return {}
    count, checked = sum(j.outcome.unexpected for j in judged), sum(j.outcome.checked for j in judged)
    return {"unexpected": count, "unexpected_share": round(count / checked, 6) if checked else 0.0}


def build_column_schema(view: LedgerView, receipts: Sequence[Receipt]) -> Metadata:
    """Returns the columns of the landed rows, by the newest of their shapes: it may have more than the feed's file."""
    names = {r.format for r in receipts}
    newest = next((n for n in reversed(view.state.shapes) if n in names), None)
    if view.feed.output and receipts:
        newest = max(receipts, key=lambda r: r.offset_range.window or 0).format
    if newest is None or (shape := view.find_shape(newest)) is None or shape.split:
        return {}
    return {"dagster/column_schema": describe_columns(shape.landed_columns, view.feed.descriptions)}


def _count_reasons(lake: Lake, parts: Sequence[Part]) -> dg.TableMetadataValue:
    """Returns refused rows by stage and reason, the most frequent first."""
    from sluice.pipelines.quarantine.limit import faults_of  # late: definitions load without it

    reasons: Counter[tuple[str, ...]] = Counter()
    names = ("stage", "reason", "field", "expectation")
    for path in dict.fromkeys(p.path for p in parts):
        with suppress(OSError, pa.ArrowException):
            for f in faults_of([path], lake):
                reasons[tuple(getattr(f.kind, name) or "" for name in names)] += f.records
    rows: list[dict[str, str | int]] = [
        {"rows": n} | dict(zip(names, why, strict=True)) for why, n in reasons.most_common()
    ]
    return table(rows, {"rows": "int"} | dict.fromkeys(names, "string"))


def _build_amounts(facts: BatchFacts) -> Metadata:
    return {
        "rows": facts.counts.landed,
        "bytes": facts.bytes,
        "input_bytes": facts.input_bytes,
        "files": facts.files,
        "quarantined": facts.counts.quarantined,
        "dropped": facts.counts.dropped,
        "no_record": facts.counts.no_record,
        "offset_ranges": len(facts.receipts),
    }


def _build_rates(facts: BatchFacts) -> Metadata:
    """Returns the time from plan to publish, and the speed of the batches."""
    return {
        "seconds": facts.took / 1000,
        "rows_per_second": round(facts.per_second(facts.counts.landed)),
        "bytes_per_second": round(facts.per_second(facts.bytes)),
    }


def _build_task_time(facts: BatchFacts) -> Metadata:
    """Returns the time of tasks by activity, as in `sluice run --profile`; empty if no task read anything."""
    work = facts.task_time
    rows: list[dict[str, str | int | float]] = [
        {
            "activity": activity,
            "seconds": round(ns / 1e9, 6),
            "share": round(ns / work.total, 6),
            "ns_per_record": round(work.per_record(ns), 1),
        }
        for activity, ns in work.ns.items()
        if ns
    ]
    columns = {"activity": "string"} | dict.fromkeys(("seconds", "share", "ns_per_record"), "float")
    if not rows:
        return {}
    return {
        "task_seconds": round(work.total / 1e9, 3),
        "task_ns_per_record": round(work.per_record(work.total), 1),
        "task_time": table(rows, columns),
    }


def _build_brokers(facts: BatchFacts) -> Metadata:
    """Returns the requests to brokers, as in `sluice run --profile`; empty if there were none."""
    if not facts.traffic.brokers:
        return {}
    totals = facts.all_brokers
    notes = {"brokers_noted": dg.MetadataValue.text("; ".join(facts.broker_notes))} if facts.broker_notes else {}
    return {
        "fetches": float(totals.requests),
        "fetched_bytes": float(totals.bytes),
        **{f"fetch_{name}_ms": totals.latency.percentile_ms(share) for name, share in SHARES.items()},
        "fetch_wait_seconds": totals.latency.total_us / 1e6,
        "fetch_held_seconds": totals.held_us / 1e6,
        "throttled_seconds": totals.throttle_ms / 1e3,
        "leaders_moved": float(totals.moved),
        "brokers": table([_build_broker_row(b) for b in facts.traffic.brokers], _BROKER),
        "topics": table([_build_topic_row(t) for t in facts.topics], _TOPIC),
        **notes,
    }


def _build_broker_row(b: BrokerTraffic) -> dict[str, str | int | float]:
    return {
        "broker": f"{b.node} {b.address}".strip(),
        "fetches": b.requests,
        "mb": round(b.bytes / 1e6, 3),
        **{f"{name}_ms": b.latency.percentile_ms(share) for name, share in SHARES.items()},
        "wait_seconds": round(b.latency.total_us / 1e6, 3),
        "held_seconds": round(b.held_us / 1e6, 3),
        "throttled_seconds": b.throttle_ms / 1e3,
        "moved": b.moved,
        "errors": ", ".join(f"{name} {n}" for name, n in sorted(b.errors.items())),
    }


_BROKER = (
    {"broker": "string", "fetches": "int", "mb": "float"}
    | {f"{name}_ms": "float" for name in SHARES}
    | dict.fromkeys(("wait_seconds", "held_seconds", "throttled_seconds"), "float")
    | {"moved": "int", "errors": "string"}
)


def _build_topic_row(t: TopicTraffic) -> dict[str, str | int | float]:
    return {
        "topic": t.topic,
        "records": t.records,
        "mb": round(t.bytes / 1e6, 3),
        "behind": -1 if t.behind is None else t.behind,
    }


_TOPIC = {"topic": "string", "records": "int", "mb": "float", "behind": "int"}


def _describe_engines(facts: BatchFacts) -> Metadata:
    """Returns the engines of the tasks, and the page of Spark's UI or event log, if there is one."""
    engines = facts.traffic.engines
    page = next((e.page for e in reversed(engines) if e.page), "")
    link = dg.MetadataValue.url(page) if "://" in page else page
    return ({"engine": "; ".join(map(str, engines))} if engines else {}) | ({"spark": link} if page else {})


def _describe_batch(view: LedgerView, batch: Batch) -> Metadata:
    batch = view.ledger.recall(batch)
    return {
        "batch": batch.id,
        **({} if batch.published is None else {"publish_entry": batch.published}),
        "plan": batch.hash,
        "ledger": view.state.ledger_id,
        "request": str(batch.request),
        **({"run": dg.MetadataValue.dagster_run(batch.owner.run)} if batch.owner.run else {}),
    }


def _describe_batches(view: LedgerView, batches: Sequence[Batch]) -> Metadata:
    """Returns the newest batch's provenance, and the numbers of several batches."""
    if not batches:
        return {"batch": "none: nothing happened in this window", "ledger": view.state.ledger_id}
    several = {"batches": ", ".join(str(b.id) for b in batches)} if len(batches) > 1 else {}
    return several | _describe_batch(view, batches[-1])


def _build_range_table(ranges: Sequence[tuple[Key, Range, BatchFacts]]) -> dg.TableMetadataValue:
    rows: list[dict[str, str | int]] = [
        {
            "partition": str(key),
            "start": r.start,
            "end": r.end,
            "landed": facts.counts.landed,
            "quarantined": facts.counts.quarantined,
            "no_record": facts.counts.no_record,
            "files": facts.part_count,
        }
        for key, r, facts in ranges
    ]
    numbers = ("start", "end", "landed", "quarantined", "no_record", "files")
    return table(rows, {"partition": "string"} | dict.fromkeys(numbers, "int"))


VERSION = "dagster/data_version"


def list_reported_assets(feed: Feed, keys: Keys) -> tuple[dg.AssetKey, ...]:
    """Returns the assets that landing reports: `landed`, those of outputs, and, for feeds with a schema or contract,
    `quarantined`."""
    outputs = [keys.output(d.output) for d in feed.datasets if d.output]
    return (keys.landed, *outputs, *((keys.quarantined,) if quarantines(feed) else ()))


# -- events of landed rows


Events = Iterator[dg.AssetMaterialization]


def build_landing_events(view: LedgerView, batches: Iterable[Batch], windows: Collection[int], why: str = "") -> Events:
    """Yields the events of complete windows, and of published batches that these windows do not cover.

    An event by which a batch counts as reported comes last: after an earlier stop, the next run reports all of it.
    """
    for window in sorted(windows):
        keys = reversed(list_reported_assets(view.feed, view.keys))
        yield from (build_window_event(view, key, window, why) for key in keys)
    yield from build_batch_events(view, batches, windows, why)


def build_batch_events(view: LedgerView, batches: Iterable[Batch], windows: Collection[int], why: str = "") -> Events:
    """Yields the events of published batches that the events of these windows do not cover."""
    covered = {(view.format_window_version(w), w) for w in windows}
    for batch in batches:
        of = view.list_windows(batch)
        if len(of) > 1 or not {(view.format_batch_version(batch), w) for w in of} <= covered:
            yield dg.AssetMaterialization(
                view.keys.landed,
                description=why or None,
                metadata=build_batch_metadata(view, batch),
                tags={VERSION: _format_own_version(view, batch)},
            )


def build_window_result(view: LedgerView, window: int) -> dg.MaterializeResult[None]:
    """Returns the step's result for the complete window that is the run's own partition."""
    key, version = view.keys.landed, dg.DataVersion(view.format_window_version(window))
    return dg.MaterializeResult(asset_key=key, metadata=_build_metadata(view, key, window), data_version=version)


def build_window_event(view: LedgerView, key: dg.AssetKey, window: int, why: str = "") -> dg.AssetMaterialization:
    """Returns the event of a complete window, from the ledger, the same in every run. `key`: one of `outputs`."""
    return dg.AssetMaterialization(
        key,
        partition=view.feed.window.name(window),
        description=why or None,
        metadata=_build_metadata(view, key, window),
        tags={VERSION: view.format_window_version(window)},
    )


def _build_metadata(view: LedgerView, key: dg.AssetKey, window: int) -> Metadata:
    if key == view.keys.quarantined:
        return build_quarantine_metadata(view, window)
    if output := next((d for d in view.feed.datasets if d.output and view.keys.output(d.output) == key), None):
        return build_output_metadata(view.of_output(output), window)
    return build_window_metadata(view, window)


def build_output_metadata(view: LedgerView, window: int) -> Metadata:
    """Returns the metadata of one output in a complete window."""
    facts = BatchFacts(view.list_receipts(window))
    return {
        "dagster/partition_row_count": facts.counts.landed,
        "dagster/uri": _locate(view, window, 0),
        **_build_amounts(facts),
        **_build_quality(view, window, facts),
        **build_column_schema(view, facts.receipts),
    }


# -- events missing from the log


def find_unreported_batches(instance: dg.DagsterInstance, view: LedgerView) -> list[Batch]:
    """Returns the batches published since the last `<feed>/committed` that the event log lacks."""
    event = instance.get_latest_materialization_event(view.keys.committed)
    materialization = event.asset_materialization if event else None
    ledger, _, number = ((materialization.tags or {}).get(VERSION, "") if materialization else "").partition("/")
    reconciled = int(number) if ledger == view.state.ledger_id and number.isdigit() else None
    published = view.state.batches.published_since(view.state.last_mark if reconciled is None else reconciled)
    return [
        b
        for b in published
        if not b.merges
        and not instance.get_event_tags_for_asset(view.keys.landed, {VERSION: _format_own_version(view, b)})
    ]


def find_unreported_windows(instance: dg.DagsterInstance, view: LedgerView, key: dg.AssetKey) -> set[int]:
    """Returns the complete windows for which the event log has no materialization of this asset."""
    reported = internals.list_materialized(instance, key) if view.complete else None
    return set() if reported is None else {w for w in view.complete if view.feed.window.name(w) not in reported}


@dataclass(frozen=True, slots=True)
class Missing:
    """The difference between the ledger and the event log.

    `batches` have no event since the last commit, and `changed` are the complete windows that they landed in. `windows`
    have no event at all, by asset.
    """

    batches: Sequence[Batch]
    changed: set[int]
    windows: Mapping[dg.AssetKey, set[int]]


def find_missing(instance: dg.DagsterInstance, view: LedgerView, assets: Iterable[dg.AssetKey]) -> Missing:
    """Compare the event log with the ledger. Windows without an event are looked up for these assets only."""
    batches = find_unreported_batches(instance, view)
    windows = {key: find_unreported_windows(instance, view, key) for key in assets}
    return Missing(batches, view.list_complete(batches), windows)


PORTION = 100
"""Limit of past windows that a run reports to a Dagster without them, such as a new one, besides its own work.
A window costs some 40 ms of CPU, twice with its commit."""


@dataclass(frozen=True, slots=True)
class Portion:
    """The windows that are reported now, the newest ones, and those that remain for later runs."""

    windows: frozenset[int] = frozenset()
    remaining: frozenset[int] = frozenset()

    @classmethod
    def of(cls, unreported: Iterable[int], limit: int | None) -> Portion:
        """Splits unreported windows; `limit` None: all now."""
        newest = sorted(unreported, reverse=True)
        return cls(frozenset(newest[:limit]), frozenset(() if limit is None else newest[limit:]))

    def describe(self, feed: str) -> str:
        """Returns a line for the run's log; empty if none remains."""
        if not self.remaining:
            return ""
        total, more = many(len(self.windows) + len(self.remaining), "window"), f"{len(self.remaining):,}"
        return (
            f"Dagster's event log lacks {total} of {feed} that landed before: this run adds the newest"
            f" {len(self.windows):,}, later runs the other {more}. To add all now: sluice repair {feed}"
        )


def roll_forward(
    instance: dg.DagsterInstance,
    view: LedgerView,
    limit: int | None = None,
    report: Reporter = lambda progress: None,
    missing: Missing | None = None,
) -> Portion:
    """Store the events that earlier runs left out. Idempotent: they follow from the ledger and the event log alone.

    They are those of all batches that a commit rests on, of the windows that these changed, and of the newest `limit`
    windows without any event (None: all). `missing`: as looked up, for more assets than the landed rows. A run still
    has to report the checks of the returned windows: for a check and partition, Dagster keeps one evaluation for each
    run, and one without a run.
    """
    missing = missing or find_missing(instance, view, [view.keys.landed])
    runs = " and ".join({b.owner.run: b.owner.describe() for b in missing.batches}.values()) or "a run"
    why = f"rolled forward: {runs} ended before this was recorded here" if missing.batches else REPORTED_LATE
    # The event log takes its time for each event: a run reports a portion, the next one the rest.
    unknown = missing.windows[view.keys.landed]
    portion = Portion.of(unknown, limit)
    # Windows that have an event, but an older one, are always reported: few changed, and a stale event is wrong.
    windows = portion.windows | (missing.changed - unknown)
    events = chain(
        build_landing_events(view, missing.batches, windows, why),
        # A run may have ended after it reported the landed rows, and before it reported their quarantine.
        (
            build_window_event(view, key, w, why)
            for key, lacking in missing.windows.items()
            for w in sorted(lacking - unknown - windows)
        ),
    )
    total = len(windows) * len(list_reported_assets(view.feed, view.keys))
    for number, event in enumerate(events):
        report(Progress("report", number, max(total, number)))
        instance.report_runless_asset_event(event)
    return Portion(windows, portion.remaining)


REPORTED_LATE = "reported from the ledger: this event log lacked the window, which landed before"


def require_reported(instance: dg.DagsterInstance, view: LedgerView) -> None:
    """Raise Failed if any batch that a commit would cover has no stored materialization."""
    if missing := find_unreported_batches(instance, view):
        raise Failed(
            f"Dagster's event log holds no materialization of {view.feed.name}/landed for batch "
            + ", ".join(str(b.id) for b in missing[:10]),
            remedy="check that Dagster's storage accepts events, then run again: nothing was committed",
        )


def _format_own_version(view: LedgerView, batch: Batch) -> str:
    """Returns the version of the batch's own event. Of several windows, each may have the version of the batch."""
    version = view.format_batch_version(batch)
    return f"{version}/all" if len(view.list_windows(batch)) > 1 else version
