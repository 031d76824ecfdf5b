"""How results are shown: a table on the terminal, Markdown and JSON in `docs/`."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from functools import reduce
from operator import or_
from pathlib import Path

from rich.console import RenderableType

from sluice.bench import lake
from sluice.bench.results import PeerResult, RaceResult, Report
from sluice.cli.terminal import facts, heading, size, table
from sluice.pipelines.errors import UsageError

PAGE = "performance.md"
DATA = "performance.json"
_KINDS = {"worker": "Python worker", "jvm": "JVM", "driver": "Python driver"}
_Cell = Callable[[RaceResult, PeerResult], str]


def _ratio(race: RaceResult, result: PeerResult) -> str:
    return "" if result is race.results[0] else f"{race.ratio(result):.1f}×"


def _cpu_ratio(race: RaceResult, result: PeerResult) -> str:
    times = race.cpu_ratio(result)
    return "" if result is race.results[0] or times is None else f"{times:.1f}×"


def _spread(race: RaceResult, result: PeerResult) -> str:
    slow, fast = result.spread
    return f"{slow:,.0f} – {fast:,.0f}"


def _peaks(race: RaceResult, result: PeerResult) -> str:
    found = ((name, result.peak(kind)) for kind, name in _KINDS.items())
    return ", ".join(f"{name} {size(peak)}" for name, peak in found if peak)


def _number(value: float | None, text: str) -> str:
    return "–" if value is None else text.format(value)


_COLUMNS: dict[str, _Cell] = {
    "peer": lambda race, r: r.title,
    "records/s": lambda race, r: f"{r.rate:,.0f}",
    "slowest – fastest": _spread,
    "speed ratio": _ratio,
    "CPU ns/record": lambda race, r: _number(r.cpu_ns, "{:,.0f}"),
    "CPU ratio": _cpu_ratio,
    "Parquet": lambda race, r: size(r.output_bytes),
    "largest processes": _peaks,
    "CPU elsewhere": lambda race, r: _number(r.beside, "{:.0%}"),
}
_TEXT = ("peer", "largest processes")


def shown(report: Report) -> Iterator[RenderableType]:
    """For the terminal."""
    for race in report.races:
        yield heading(race.name, _subtitle(race))
        yield table(list(_COLUMNS), _rows(race), right=" ".join(n.split()[0] for n in _COLUMNS if n not in _TEXT))
    yield heading("measured on")
    yield facts(*_provenance(report))


def shown_lake(report: lake.Report) -> Iterator[RenderableType]:
    """The lake on S3 beside a local one, for the terminal."""
    yield heading("lake", f"{report.speeds[0].records:,} records raw into Parquet; S3 is moto's server on this machine")
    speeds = [(s.lake, f"{s.rate:,.0f}", f"{s.seconds:.1f}", size(s.worker_bytes)) for s in report.speeds]
    yield table(("lake", "records/s", "seconds", "task's process"), speeds, right="records/s seconds task's")
    yield heading("requests to S3", "counted by the server; a part is put, read, copied and removed")
    asked = {
        "a first read of the ledger": "first_read",
        "a read that finds nothing new": "next_read",
        "a batch of one part": "one_part",
        f"a batch of {lake.MANY_PARTS} parts": "more_parts",
    }
    columns = ("", *(f"{c.entries:,} entries" for c in report.counts), "such as, at the last")
    rows = [(text, *(str(sum(c.of(name).values())) for c in report.counts), _kinds(report.counts[-1].of(name)))
            for text, name in asked.items()]  # fmt: skip
    yield table(columns, rows, right=" ".join(f"{c.entries:,}" for c in report.counts))


def _kinds(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{n} {kind}" for kind, n in counts.items())


def _subtitle(race: RaceResult) -> str:
    return (
        f"{race.about}; {race.records:,} records, {race.partitions} partitions, {race.codec}, "
        f"{race.cores} cores each, medians of {len(race.results[0].landings)}"
    )


def _rows(race: RaceResult) -> list[list[str]]:
    return [[cell(race, result) for cell in _COLUMNS.values()] for result in race.results]


def _provenance(report: Report) -> list[tuple[str, str]]:
    machine, memory = report.machine, size(report.machine["memory_bytes"])
    of_peers = (result.versions for race in report.races for result in race.results)
    versions = reduce(or_, map(dict, of_peers), dict(report.versions))
    return [
        ("machine", f"{machine['cores']} cores of {machine['cpu']}, {memory}, {machine['system']}"),
        ("versions", ", ".join(f"{name} {version}" for name, version in versions.items())),
        ("when", report.when),
        ("command", report.command),
    ]


def markdown(report: Report) -> str:
    """The same as Markdown."""
    parts = []
    for race in report.races:
        aligned = ["---" if name in _TEXT else "--:" for name in _COLUMNS]
        lines = (f"| {' | '.join(cells)} |" for cells in [list(_COLUMNS), aligned, *_rows(race)])
        parts += [f"### {race.name}", f"{_subtitle(race).capitalize()}.", "\n".join(lines)]
    parts.append("\n".join(f"- {name}: {text}" for name, text in _provenance(report)))
    return "\n\n".join(parts)


def write(report: Report, docs: Path) -> tuple[Path, Path]:
    """Put the results into the page, between its two marks, and beside it as JSON. Raises UsageError without those."""
    page, data = docs / PAGE, docs / DATA
    text = page.read_text() if page.exists() else ""
    begin, end = "<!-- results -->", "<!-- /results -->"
    if begin not in text or end not in text:
        raise UsageError(f"{page} has no place for results", remedy=f"put the lines {begin} and {end} into it")
    made = f"{begin}\n{markdown(report)}\n{end}"
    page.write_text(re.sub(f"{begin}.*{end}", lambda _: made, text, flags=re.DOTALL))
    data.write_text(json.dumps(report.document(), indent=1) + "\n")
    return page, data
