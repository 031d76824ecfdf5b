"""`sluice compact`: merge the many small files of windows into few."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import typer
from rich.console import RenderableType
from rich.text import Text

from sluice.cli.app.invocation import EachFeed, Session, command
from sluice.cli.options import window_options
from sluice.cli.options.request_options import DryRun
from sluice.cli.options.window_options import WindowOptions
from sluice.cli.shared import other_batches
from sluice.cli.shared.rewrite_summary import (
    FileSums,
    WindowSums,
    by_window,
    format_window,
    list_busy,
    name,
    table_after,
)
from sluice.cli.terminal.output import good, heading, limit_rows, table, warn
from sluice.cli.terminal.text_layout import count, rate, seconds, size
from sluice.pipelines.util.units import join_first, many

if TYPE_CHECKING:
    from sluice.pipelines.feed.feed import Feed
    from sluice.pipelines.maintenance.compaction import Compacted
    from sluice.pipelines.model.receipts import Met


def register(app: typer.Typer) -> None:
    command(app)(compact)


def compact(
    session: Session,
    feed: EachFeed,
    windows: WindowOptions,
    dry_run: DryRun = False,
) -> None:
    """Merge the small files of complete windows.

    Files of a partition are merged; those that stay small share a file with the window's other partitions, unless
    landing.shared_files is false. Rows, their order, their offsets and the ledger's account stay the same. Kafka is
    not read. Each merged file is compared with its sources before it replaces them. Without options, all windows are
    merged. Merged files have about the size of the feed's tuning.compaction_file_bytes.

    $ sluice compact orders --dry-run
    $ sluice compact orders
    $ sluice compact orders --from 2026-11-20 --to 2026-11-21
    $ sluice compact --all
    """
    definition = session.feed(feed)
    chosen = windows.choose(session, definition)
    began = time.monotonic()
    done, given_up = (_preview if dry_run else _merge)(session, definition, chosen.settled or None)
    spent = 0.0 if dry_run else time.monotonic() - began
    ran = CompactionRun(definition, definition.compaction.target_file_bytes, done, spent, dry_run, given_up)
    session.terminal.show(*view(ran), *(() if dry_run else table_after(session, definition)))
    session.terminal.show(*window_options.open_window_lines(feed, chosen.open_windows))
    session.terminal.print_document(
        FileSums.of(done.merged),
        feed=feed,
        dry_run=dry_run,
        seconds=round(spent, 3),
        batches=done.batches,
        windows=[WindowSums(format_window(definition, w), t) for w, t in by_window(done).items()],
        busy=list_busy(definition, done.busy),
        other_batches=(*given_up, *done.met),
        incomplete=[*map(definition.window.name, done.incomplete)],
        open_windows=chosen.open_windows,
    )


@dataclass(frozen=True)
class CompactionRun:
    """Describes merges into files of `target` bytes, and abandoned batches of dead runs."""

    feed: Feed
    target: int
    done: Compacted
    seconds: float
    dry_run: bool
    given_up: tuple[Met, ...] = ()


def _preview(session: Session, feed: Feed, windows: Sequence[int] | None) -> tuple[Compacted, tuple[Met, ...]]:
    from sluice.pipelines.maintenance.compaction import foresee_compaction

    with session.open_ports(feed) as ports, session.terminal.working("looking for small files"):
        return foresee_compaction(feed, ports, windows), ()


def _merge(session: Session, feed: Feed, windows: Sequence[int] | None) -> tuple[Compacted, tuple[Met, ...]]:
    from sluice.pipelines.maintenance.compaction import compact
    from sluice.resources.liveness import new_owner

    with session.open_ports(feed) as ports, session.terminal.progress() as meter:
        heard = other_batches.MetRecorder(meter)
        done = compact(feed, ports, windows, new_owner("compact"), heard)
    return done, heard.met


def view(ran: CompactionRun) -> list[RenderableType]:
    done = ran.done
    out: list[RenderableType] = [heading(f"Compaction of {ran.feed.name}", f"files of at most {size(ran.target)}")]
    if done.merged:
        names = ("window", "files", "after", "bytes", "after ")[: 4 if ran.dry_run else 5]
        rows = [[name(ran.feed, w), *_build_row(t)][: len(names)] for w, t in by_window(done).items()]
        out.append(table(names, limit_rows(rows), right="files after bytes"))
    out += [*_format_verdict(ran), *other_batches.view(ran.given_up)]
    out += other_batches.standing(done.busy, done.met, partial(name, ran.feed))
    if done.incomplete:
        out.append(warn(f"skipped, not complete: {join_first(map(ran.feed.window.name, done.incomplete), 5)}"))
    return out


def _build_row(t: FileSums) -> list[str]:
    return [count(t.files), count(t.files_after), size(t.bytes), "" if t.bytes_after is None else size(t.bytes_after)]


def _format_verdict(ran: CompactionRun) -> Iterator[Text]:
    t = FileSums.of(ran.done.merged)
    if not ran.done.merged:
        yield good("nothing to merge: no small files")
    elif ran.dry_run:
        yield Text(f"  A dry run: nothing was changed. {many(t.files, 'file')} would become {count(t.files_after)}.")
    else:
        records = sum(r.counts.records for _, r in ran.done.merged if r is not None)
        after = size(t.bytes_after or 0)
        batches = f"{'batch' if len(ran.done.batches) == 1 else 'batches'} {', '.join(map(str, ran.done.batches))}"
        yield good(f"{many(t.files, 'file')} became {count(t.files_after)}, {size(t.bytes)} became {after}: {batches}")
        yield Text(f"  {seconds(ran.seconds)}, {rate(records, ran.seconds)}", style="dim")
