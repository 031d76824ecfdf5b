"""The result of a check in words, for the terminal, the page of the hour and Dagster: one source of all figures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from sluice.pipelines.batch_report.markup import cut, number, share, size
from sluice.pipelines.operating.check_window import Reason, WindowCheck
from sluice.pipelines.quarantine.listing import RejectedRecord
from sluice.pipelines.status.repeats import Coordinate, Repeats
from sluice.pipelines.status.window_rows import Outside, WindowRows
from sluice.pipelines.status.window_state import Standing, describe_complete
from sluice.pipelines.util.units import many, show_about, show_instant


def describe_verdict(c: WindowCheck) -> tuple[str, str]:
    """Returns `good`, `warn` or `bad`, and the sentence: complete, complete but with losses, or not complete."""
    if not c.complete:
        state = "still open" if c.standing.state is Standing.OPEN else "not complete"
        return "warn", f"window {c.standing.window} is {state}"
    offsets, partitions = (c.standing.offsets or 0) + c.standing.losses.former, {a.key.tp for a in c.partitions}
    accounted = f": {many(offsets, 'offset')} of {many(len(partitions), 'partition')} accounted for"
    text = describe_complete(c.standing, accounted)
    if c.is_doubled:
        return "bad", f"{text}, but rows of it landed twice"
    return "warn" if str(c.standing.losses) else "good", text


def list_reasons(c: WindowCheck) -> Iterator[Reason]:
    """Yields the faults of the window, each with its remedy."""
    yield from c.reasons
    if c.is_doubled and c.rows:
        twice = c.rows.landed_twice
        text = f"{many(len(twice), 'record')} landed twice, such as {twice[0]}"
        yield Reason(text, f"see all: sluice audit {c.feed_name} --all")


def list_figures(c: WindowCheck) -> Iterator[tuple[str, str]]:
    """Yields the figures of the window, each with its name."""
    counts, landed = c.counts, [f for f in c.files if f.kind == "landed"]
    files = {f.path: f for f in landed}
    volume = f", {size(sum(f.bytes for f in landed))} in {many(len(files), 'file')}" if files else ""
    yield "landed", f"{many(counts.landed, 'record')}{volume}"
    yield "quarantined", _describe_quarantine(c)
    others = (
        ("control", counts.control),
        ("aborted", counts.aborted),
        ("compacted away", counts.compacted),
        ("dropped", counts.dropped),
        ("erased", counts.erased),
        ("lost", c.account.lost),
        ("skipped", c.account.skipped),
        ("retired", c.account.retired),
    )
    yield "not landed", ", ".join(f"{number(n)} {name}" for name, n in others if n) or "nothing else"
    for batch in c.batches[-_NAMED:]:
        engine = f", on {batch.engine}" if batch.engine else ""
        at = show_instant(batch.published // 1000 * 1000)
        yield "landed by", f"batch {batch.batch}, {batch.run}{engine}, at {at}"
    yield from (("on hold", str(hold)) for hold in c.holds)
    yield from _list_row_figures(c, c.rows) if c.rows else [("late, copies", "unknown: a file is missing or damaged")]


def _list_row_figures(c: WindowCheck, rows: WindowRows) -> Iterator[tuple[str, str]]:
    if rows.earliest and rows.latest:
        yield "timestamps", f"{_show_coordinate(rows.earliest)} to {_show_coordinate(rows.latest)}"
    if rows.untimed:
        yield "no timestamp", many(rows.untimed, "record")
    yield "late", _describe_outside(c, rows.late, "stamped in an earlier window", "before this one")
    if rows.early.records:
        yield "early", _describe_outside(c, rows.early, "stamped in a later window", "after this one")
    if c.clocks:
        yield "clocks", c.clocks
    if c.protection:
        yield "protection", c.protection
    r = rows.repeats
    if not r.records:
        return
    about = "" if r.exact else "about "
    keyless = f"; {many(r.records - r.keyed, 'record')} without one" if r.keyed < r.records else ""
    sampled, by = "" if r.exact else " (a sample of the keys)", ", ".join(r.by) or "the Kafka key"
    yield "keys", f"{about}{number(r.keys)} different by {by} in {many(r.keyed, 'record')}{keyless}{sampled}"
    yield "updates", _describe_updates(r, about)
    copies = f"{about}{many(r.copied, 'record')} with key and value of an earlier one"
    yield "copies", copies if r.copied else "none: no record has key and value of another"
    if not rows.landed_twice:
        yield "landed twice", "never: no offset is in two rows"


def describe_copies(r: Repeats) -> Iterator[tuple[str, str]]:
    """Yields the likely causes of copies, each with examples."""
    for copies in r.copies:
        about = "" if r.exact else "about "
        examples = ", ".join(f"{a} = {b}" for a, b in copies.examples)
        yield f"{about}{number(copies.records)} likely: {copies.cause.text}", examples


def describe_refusals(c: WindowCheck) -> Iterator[tuple[str, tuple[RejectedRecord, ...]]]:
    """Yields the frequent reasons of quarantine, each with the first records."""
    for sampled in c.reasons_of_quarantine[:_NAMED]:
        kind = sampled.group.kind
        why = f"{cut(str(kind), 80)} ({cut(kind.detail, 160)})"
        yield f"{number(sampled.group.records)} quarantined: {why}", sampled.samples


def _describe_quarantine(c: WindowCheck) -> str:
    if not c.counts.quarantined:
        return "none"
    records: Counter[str] = Counter()
    for group in c.reasons_of_quarantine:
        records[cut(str(group.group.kind), 80)] += group.group.records
    kinds = "; ".join(f"{number(n)} {kind}" for kind, n in records.most_common(_NAMED))
    percent = share(c.counts.quarantined, c.counts.records)
    more = f"; {many(len(records) - _NAMED, 'more reason')}" if len(records) > _NAMED else ""
    command = f"sluice quarantine list {c.feed_name} --window {c.standing.window}"
    return f"{many(c.counts.quarantined, 'record')} ({percent}): {kinds}{more}\n{command}"


_NAMED = 3


def _show_coordinate(coordinate: Coordinate) -> str:
    return f"{'–' if coordinate.timestamp is None else show_instant(coordinate.timestamp)} ({coordinate})"


def _describe_outside(c: WindowCheck, o: Outside, stamped: str, side: str) -> str:
    if not o.records:
        return "none"
    hours = ", ".join(f"{w}: {number(n)}" for w, n in [*o.windows.items()][:_NAMED])
    more = ", …" if len(o.windows) > _NAMED else ""
    furthest, median = (show_about(round(1000 * s)) for s in (o.furthest_seconds, o.median_seconds))
    distance = f"up to {furthest} {side} ({o.furthest}), the median is {median}"
    return f"{many(o.records, 'record')} {stamped} ({hours}{more})\n{distance}"


def _describe_updates(r: Repeats, about: str) -> str:
    if not r.updates:
        return "none: no key has two values"
    example = f", such as {r.update[0]} and {r.update[1]}" if r.update else ""
    return f"{about}{number(r.updates)}: further values of a key, no duplicates{example}"
