"""How results are shown: tables on the terminal; a page, a plot and JSON in `docs/developers/`."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import reduce
from operator import or_
from pathlib import Path

from rich.console import RenderableType

from bench import lake, waits
from bench.formats import FORMATS
from bench.peers import SPARK
from bench.plot import ENGINES, is_own, plot
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


# -- the pages


def to_headline(report: BenchReport) -> str:
    """Returns the main rates and their ratios to Spark's connector as a sentence."""
    races = [race for name in ("raw", "typed") if (race := report.find(name))]
    pairs = [(race, spark) for race in races if (spark := race.of(SPARK.name))]
    if not pairs:
        return ""
    rates = " and ".join(f"{race.results[0].rate / 1e6:.1f} million {race.name}" for race, _ in pairs)
    times = " and ".join(f"{race.ratio(spark):.0f}" for race, spark in pairs)
    cores = pairs[0][0].cores
    title = pairs[0][0].results[0].title
    return _sentence(f"on {cores} quiet cores, {title} lands {rates} records a second: {times} times {SPARK.title}")


def to_markdown(report: BenchReport) -> str:
    """Returns results as Markdown: Sluice and Spark, the plot, sizes and calls."""
    races, flat = _split(report)
    parts = [_list_races(races), f"![Speed next to Spark's Kafka connector]({PLOT})"] if races else []
    if flat:
        parts += [f"### {FLAT}", _sentence(_about_flat(flat)), _table(_FLAT, flat)]
    calls = [(", ".join(names), dict(call)) for names, call in _provenances(report)]
    rows = [[names, call["when"][:10], call["machine"], f"`{call['command']}`"] for names, call in calls]
    parts += ["### Measured", _lines(("benchmarks", "on", "machine", "command"), ["---"] * 4, rows)]
    return "\n\n".join(parts)


def _list_races(races: Sequence[RaceResult]) -> str:
    """Returns a line for each race: the rates of both engines and of Spark's connector, and their ratios.

    A second table has the races in which Sluice lands in several ways.
    """
    own = {r.peer: r.title for race in races for r in race.results if r.peer in ENGINES}
    rows = []
    for race in races:
        spark = race.of(SPARK.name)
        rates = [_format_rate(race.of(peer)) for peer in (*own, SPARK.name)]
        ratios = [_ratio(race, spark), _number(race.results[0].cpu_ns), _cpu_ratio(race, spark)] if spark else []
        rows.append([race.name, f"{race.records:,}", *rates, *(ratios or ["", _number(race.results[0].cpu_ns), ""])])
    names = ("benchmark", "records", *(f"{title}, records/s" for title in own.values()), "Spark, records/s", *_RATIOS)
    ways = [
        [race.name, r.title, _format_rate(r), _number(r.cpu_ns)]
        for race in races
        if any(is_own(r) and r.peer not in own for r in race.results)
        for r in race.results
        if is_own(r)
    ]
    tables = [_lines(names, ["---"] + ["--:"] * (len(names) - 1), rows)]
    if ways:
        tables.append(_lines(("benchmark", "Sluice", "records/s", "CPU ns/record"), ["---"] * 2 + ["--:"] * 2, ways))
    return "\n\n".join(tables)


def _format_rate(result: PeerResult | None) -> str:
    return f"{result.rate:,.0f}" if result else ""


_TOOLS = ("typed", "raw", "avro")
"""Benchmarks of the table of all tools."""


def to_tools(report: BenchReport) -> str:
    """Returns each peer's rate and CPU as Markdown, the fastest first, and below them the times of starts."""
    races = [race for name in _TOOLS if (race := report.find(name))]
    titles = {r.title: None for race in races for r in sorted(race.results, key=lambda r: -r.rate)}
    results = {title: [next((r for r in race.results if r.title == title), None) for race in races] for title in titles}
    rows = [[title, *(cell for r in of for cell in (_format_rate(r), _number(r.cpu_ns if r else None, unknown="")))]
            for title, of in results.items()]  # fmt: skip
    names = ["", *(name for race in races for name in (f"`{race.name}`: records/s", "CPU ns/record"))]
    parts = [_lines(names, ["---"] + ["--:"] * (len(names) - 1), rows)]
    if report.start:
        intro = f"{report.start.records:,} typed records landed by a new process, medians, {report.start.run.when[:10]}"
        starts = [[title, f"{wall:.2f}", f"{cpu:.2f}"] for title, (wall, cpu) in report.start.seconds.items()]
        parts += [_sentence(intro), _lines(("", "seconds", "CPU seconds"), ["---", "--:", "--:"], starts)]
    return "\n\n".join(parts)


def to_waits(report: BenchReport) -> str:
    """Returns the table of waits as Markdown."""
    if not report.waits:
        return ""
    run = report.waits.run
    intro = f"{run.when[:10]}, {run.machine['cores']} cores of {run.machine['cpu']}: medians of CPU time"
    table = _lines(waits.COLUMNS, ["---", "--:", "--:", "--:", "--:"], [list(row) for row in report.waits.rows])
    return f"{_sentence(intro)}\n\n{table}"


def to_summary(report: BenchReport) -> str:
    """Returns the benchmark `typed` next to the times of starts as Markdown, for the README."""
    race = report.find("typed")
    if race is None:
        return ""
    starts = dict(report.start.seconds) if report.start else {}
    rows = []
    for result in sorted(race.results, key=lambda r: -r.rate):
        cells, seconds = [result.title, _format_rate(result), _number(result.cpu_ns)], starts.pop(result.title, ())
        rows.append([*(f"**{cell}**" if is_own(result) else cell for cell in cells), *_format_seconds(seconds)])
    own = tuple(r.title for r in race.results if is_own(r))
    rows[len(own) : len(own)] = [
        [t, "", "", *_format_seconds(times)] for t, times in starts.items() if t.startswith(own)
    ]
    cold = f"; and {report.start.records:,} in a new process" if report.start else ""
    day = f"{race.run.when[:10]}, " if race.run else ""
    about = _sentence(f"{day}{race.cores} cores: {race.records:,} records, {race.about}, warm{cold}")
    names = ("", "records/s", "CPU ns/record", "cold: seconds", "CPU s")
    return f"{about}\n\n{_lines(names, ['---'] + ['--:'] * 4, rows)}"


def _format_seconds(times: Sequence[float]) -> list[str]:
    return [f"{x:.1f}" for x in times] or ["", ""]


def _table(columns: Mapping[str, _Cell], races: Sequence[RaceResult]) -> str:
    aligned = ["---" if name in ("benchmark", "peer") else "--:" for name in columns]
    return _lines(list(columns), aligned, _cells(columns, races))


def _lines(names: Sequence[str], aligned: Sequence[str], rows: Rows) -> str:
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [names, aligned, *rows])


def _sentence(text: str) -> str:
    return textwrap.fill(f"{text[0].upper()}{text[1:]}.", 120)


README = "../../README.md"
_SECTIONS: Mapping[str, tuple[str, Callable[[BenchReport], str]]] = {
    "headline": (PAGE, to_headline),
    "results": (PAGE, to_markdown),
    "tools": (PAGE, to_tools),
    "waits": (PAGE, to_waits),
    "speed": (README, to_summary),
}
"""Generated sections by the name in their marks, each with its page."""


def write(report: BenchReport, docs: Path) -> None:
    """Merge the results into those of other benchmarks: as JSON, and from there into sections of the pages, between
    their marks, and the plot. Raises UsageError without the marks."""
    data, picture = docs / DATA, docs / PLOT
    pages = {page: (docs / page).read_text() for page in (PAGE, README)}
    for name, (page, _) in _SECTIONS.items():
        if f"<!-- {name} -->" not in pages[page] or f"<!-- /{name} -->" not in pages[page]:
            remedy = f"put the lines <!-- {name} --> and <!-- /{name} --> into it"
            raise UsageError(f"{docs / page} has no place for results", remedy=remedy)
    older = BenchReport.from_document(json.loads(data.read_text())) if data.exists() else BenchReport(())
    every = report.over(older, list(SUITE))
    data.write_text(json.dumps(every.document(), indent=1) + "\n")
    for page, text in pages.items():
        (docs / page).write_text(fill(text, page, every))
    picture.parent.mkdir(exist_ok=True)
    picture.write_text(plot(every.races))


def fill(text: str, page: str, report: BenchReport) -> str:
    """Returns the text of a page with its generated sections."""
    for name, (of, render) in _SECTIONS.items():
        if of == page:
            begin, end = f"<!-- {name} -->", f"<!-- /{name} -->"
            before, _, rest = text.partition(begin)
            text = f"{before}{begin}\n{render(report)}\n{end}{rest.partition(end)[2]}"
    return text
