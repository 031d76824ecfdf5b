"""How results are shown: tables on the terminal; a page, a plot and JSON in `docs/developers/`."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import reduce
from operator import or_
from pathlib import Path

from rich.console import RenderableType

from bench import lake
from bench.formats import FORMATS
from bench.peers import SPARK
from bench.plot import plot
from bench.results import BenchReport, PeerResult, Provenance, RaceResult
from bench.suite import FLAT, SUITE
from sluice.cli.terminal.output import facts, heading, table
from sluice.cli.terminal.text_layout import size
from sluice.errors import UsageError

PAGE, DATA, PLOT = "performance.md", "performance.json", "images/performance.svg"
_KINDS = {"driver": "Python driver", "jvm": "JVM", "worker": "Python workers"}
_PARTS = {
    "crc": "checksums",
    "decompress": "codec",
    "decode": "decoding",
    "type": "JSON",
    "validate": "contract",
    "encode": "Parquet",
}
_Cell = Callable[[RaceResult, PeerResult], str]


def _ratio(race: RaceResult, result: PeerResult) -> str:
    return "" if result is race.results[0] else _times(race.ratio(result))


def _cpu_ratio(race: RaceResult, result: PeerResult) -> str:
    return "" if result is race.results[0] else _times(race.cpu_ratio(result), "")


def _spread(race: RaceResult, result: PeerResult) -> str:
    slow, fast = result.spread
    return f"{slow:,.0f} – {fast:,.0f}"


def _number(value: float | None, text: str = "{:,.0f}", unknown: str = "–") -> str:
    return unknown if value is None else text.format(value)


def _times(value: float | None, unknown: str = "–") -> str:
    return _number(value, "{:.1f}×", unknown)


def _process(kind: str) -> _Cell:
    """CPU time a record of a kind of process, and the size of its largest."""

    def cell(race: RaceResult, result: PeerResult) -> str:
        peak, cpu = result.peak(kind), result.cpu_ns_of(kind)
        return "" if not peak else f"{_number(cpu)} ns, {size(peak)}"

    return cell


_SPEED: Mapping[str, _Cell] = {
    "peer": lambda race, r: r.title,
    "records/s": lambda race, r: f"{r.rate:,.0f}",
    "slowest – fastest": _spread,
    "speed ratio": _ratio,
    "CPU ns/record": lambda race, r: _number(r.cpu_ns),
    "CPU ratio": _cpu_ratio,
    "Parquet": lambda race, r: size(r.output_bytes),
}
_RATIOS = ("speed ratio", "CPU ns/record", "CPU ratio")
_PROCESSES: Mapping[str, _Cell] = {name: _process(kind) for kind, name in _KINDS.items()}
_ELSEWHERE: Mapping[str, _Cell] = {"CPU elsewhere": lambda race, r: _number(r.elsewhere, "{:.0%}")}
_FLAT: Mapping[str, _Cell] = {
    "records": lambda race, r: f"{race.records:,}",
    "partitions": lambda race, r: str(race.partitions),
    **{name: _SPEED[name] for name in ("records/s", "slowest – fastest", "CPU ns/record")},
    _KINDS["worker"]: _process("worker"),
}
Rows = list[list[str]]


def _cells(columns: Mapping[str, _Cell], races: Sequence[RaceResult]) -> Rows:
    return [[cell(race, result) for cell in columns.values()] for race in races for result in race.results]


def _parts(race: RaceResult) -> list[tuple[str, str]]:
    """Returns the cost of the parts of Sluice's work and of the whole landing; nothing if unknown."""
    if not race.budget or not (over := race.over_budget):
        return []
    called = _PARTS | ({"type": race.name} if race.name in FORMATS else {})
    parts = " + ".join(f"{called[name]} {ns:,.0f}" for name, ns in race.budget.parts.items())
    took = f"{_number(race.results[0].cpu_ns)} ns of CPU ({_times(over[0])} the sum)"
    cores = f"{race.cores * 1e9 / race.results[0].rate:,.0f} ns of {race.cores} cores' time ({_times(over[1])})"
    return [("parts alone", f"{parts} = {race.budget.sum:,.0f} ns a record"), ("took in all", f"{took}, {cores}")]


def _split(report: BenchReport) -> tuple[list[RaceResult], list[RaceResult]]:
    """Races of peers, and those that show how flat the cost is."""
    flat = [race for race in report.races if race.name.startswith(FLAT)]
    return [race for race in report.races if race not in flat], flat


def race_view(report: BenchReport) -> Iterator[RenderableType]:
    """For the terminal."""
    races, flat = _split(report)
    for race in races:
        yield heading(race.name, _subtitle(race))
        yield _peer_table(_SPEED, [race])
        yield ""
        yield _peer_table({"peer": _SPEED["peer"], **_PROCESSES, **_ELSEWHERE}, [race])
        if parts := _parts(race):
            yield ""
            yield facts(*parts)
    if flat:
        yield heading(FLAT, _about_flat(flat))
        yield _peer_table(_FLAT, flat)
    calls = _provenances(report)
    for names, call in calls:
        yield heading("measured on", ", ".join(names) if len(calls) > 1 else "")
        yield facts(*call)


def _peer_table(columns: Mapping[str, _Cell], races: Sequence[RaceResult]) -> RenderableType:
    return table(list(columns), _cells(columns, races), right=" ".join(n.split()[0] for n in columns if n != "peer"))


def lake_view(report: lake.LakeReport) -> Iterator[RenderableType]:
    """Returns the comparison of stores with a local lake, for the terminal."""
    yield heading("lake", f"{report.speeds[0].records:,} records raw into Parquet; emulators on this machine")
    speeds = [
        (s.lake, f"{s.rate:,.0f}", f"{s.seconds:.1f}", size(s.worker_bytes), str(report.requests.get(s.lake, "")))
        for s in report.speeds
    ]
    columns: tuple[str, ...] = ("lake", "records/s", "seconds", "task's process", "requests")
    yield table(columns, speeds, right="records/s seconds task's requests")
    yield heading("requests to S3", "counted by the server; a part is put, read, copied and removed")
    requests = {
        "a first read of the ledger": "first_read",
        "a read that finds nothing new": "next_read",
        "a batch of one part": "one_part",
        f"a batch of {lake.MANY_PARTS} parts": "more_parts",
    }
    columns = ("", *(f"{c.entries:,} entries" for c in report.counts), "such as, at the last")
    rows = [(text, *(str(sum(c.of(name).values())) for c in report.counts), _kinds(report.counts[-1].of(name)))
            for text, name in requests.items()]  # fmt: skip
    yield table(columns, rows, right=" ".join(f"{c.entries:,}" for c in report.counts))


def _kinds(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{n} {kind}" for kind, n in counts.items())


def _subtitle(race: RaceResult) -> str:
    return (
        f"{race.about}; {race.records:,} records, {race.partitions} partitions, {race.codec}, "
        f"{race.cores} cores each, medians of {len(race.results[0].landings)}"
    )


def _about_flat(flat: Sequence[RaceResult]) -> str:
    return f"{flat[0].about}; {flat[0].codec}, {flat[0].cores} cores, medians of {len(flat[0].results[0].landings)}"


def _provenances(report: BenchReport) -> list[tuple[list[str], list[tuple[str, str]]]]:
    """Calls of the benchmark, each with the names of its measurements."""
    calls: list[tuple[Provenance, list[RaceResult]]] = []
    for race in report.races:
        if race.run:
            of = next((races for run, races in calls if run == race.run), None)
            if of is None:
                calls.append((race.run, of := []))
            of.append(race)
    return [(_names(races), _provenance(run, races)) for run, races in calls]


def _names(races: Sequence[RaceResult]) -> list[str]:
    """Returns the names of the benchmarks; all sizes of `flat` have one."""
    return list(dict.fromkeys(FLAT if race.name.startswith(FLAT) else race.name for race in races))


def _provenance(run: Provenance, races: Sequence[RaceResult]) -> list[tuple[str, str]]:
    machine, memory = run.machine, size(run.machine["memory_bytes"])
    of_peers = (result.versions for race in races for result in race.results)
    versions = reduce(or_, map(dict, of_peers), dict(run.versions))
    return [
        ("machine", f"{machine['cores']} cores of {machine['cpu']}, {memory}, {machine['system']}"),
        ("versions", ", ".join(f"{name} {version}" for name, version in versions.items())),
        ("when", run.when),
        ("command", run.command),
    ]


# -- the page


def to_markdown(report: BenchReport) -> str:
    """Returns results as Markdown: Sluice and Spark, the plot, then tables of other peers, sizes and calls."""
    races, flat = _split(report)
    parts = []
    if races:
        parts += [_overview(races), f"![Speed next to Spark's Kafka connector]({PLOT})"]
        others = [_list_cells(race, r) for race in races for r in race.results[1:] if r.peer != SPARK.name]
        names = ("benchmark", "peer", "records/s", *_RATIOS)
        parts += ["### Other peers", _lines(names, ["---"] * 2 + ["--:"] * 4, others)] if others else []
    if flat:
        parts += [f"### {FLAT}", _sentence(_about_flat(flat)), _table(_FLAT, flat)]
    calls = [(", ".join(names), dict(call)) for names, call in _provenances(report)]
    rows = [[names, call["when"][:10], call["machine"], f"`{call['command']}`"] for names, call in calls]
    parts += ["### Measured", _lines(("benchmarks", "on", "machine", "command"), ["---"] * 4, rows)]
    return "\n\n".join(parts)


def _overview(races: Sequence[RaceResult]) -> str:
    """Returns a line for each race: Sluice compared with Spark's connector."""
    names = ("benchmark", "records", "Sluice, records/s", "Spark, records/s", *_RATIOS)
    rows = []
    for race in races:
        ours, spark = race.results[0], race.of(SPARK.name)
        row = [race.name, f"{race.records:,}", f"{ours.rate:,.0f}"]
        row += [f"{spark.rate:,.0f}", _ratio(race, spark)] if spark else ["", ""]
        rows.append([*row, _number(ours.cpu_ns), _cpu_ratio(race, spark) if spark else ""])
    return _lines(names, ["---"] + ["--:"] * (len(names) - 1), rows)


def _list_cells(race: RaceResult, result: PeerResult) -> list[str]:
    return [race.name, *(_SPEED[name](race, result) for name in ("peer", "records/s", *_RATIOS))]


def _table(columns: Mapping[str, _Cell], races: Sequence[RaceResult]) -> str:
    aligned = ["---" if name in ("benchmark", "peer") else "--:" for name in columns]
    return _lines(list(columns), aligned, _cells(columns, races))


def _lines(names: Sequence[str], aligned: Sequence[str], rows: Rows) -> str:
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [names, aligned, *rows])


def _sentence(text: str) -> str:
    return textwrap.fill(f"{text[0].upper()}{text[1:]}.", 120)


def write(report: BenchReport, docs: Path) -> None:
    """Merge the results into those of other benchmarks: as JSON, and from there into the page, between its two marks,
    and the plot. Raises UsageError without the marks."""
    page, data, picture = docs / PAGE, docs / DATA, docs / PLOT
    text = page.read_text() if page.exists() else ""
    begin, end = "<!-- results -->", "<!-- /results -->"
    if begin not in text or end not in text:
        raise UsageError(f"{page} has no place for results", remedy=f"put the lines {begin} and {end} into it")
    older = BenchReport.from_document(json.loads(data.read_text())) if data.exists() else BenchReport(())
    every = report.over(older, list(SUITE))
    data.write_text(json.dumps(every.document(), indent=1) + "\n")
    section = f"{begin}\n{to_markdown(every)}\n{end}"
    page.write_text(re.sub(f"{begin}.*{end}", lambda _: section, text, flags=re.DOTALL))
    picture.parent.mkdir(exist_ok=True)
    picture.write_text(plot(every.races))
