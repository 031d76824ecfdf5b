"""`sluice contract`: propose a contract from the records of a topic, or try one on them. Nothing is landed.

Both turn records into rows with the code of a run's tasks, in a scratch folder that is removed afterwards. They write
no ledger, ask no group and move no offset.
"""

from __future__ import annotations

import json
import os
import secrets
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import RenderableType

from sluice.cli.app.invocation import FeedName, Session, command, make_group
from sluice.cli.app.parameters import flag, option
from sluice.cli.options import parsing, window_options
from sluice.cli.options.request_options import Offsets
from sluice.cli.options.window_options import WindowOptions
from sluice.cli.terminal.output import bad, copyable, good, heading, safe, table, warn
from sluice.cli.terminal.text_layout import count, format_percent
from sluice.pipelines.errors import Failed, FeedError, QuarantineExceeded, SchemaDrifted, UsageError
from sluice.pipelines.model.kafka import Range, TopicPartition
from sluice.pipelines.util import extras, scratch
from sluice.pipelines.util.documents import AsText
from sluice.pipelines.util.units import many

if TYPE_CHECKING:
    import pyarrow as pa

    from sluice.pipelines.contract.catalogue import ExpectationOutcome, Result
    from sluice.pipelines.contract.contract_proposal import Proposal
    from sluice.pipelines.contract.expectation import Contract
    from sluice.pipelines.feed.feed import Feed
    from sluice.pipelines.landing.sample import Sample
    from sluice.pipelines.model.plans import OffsetRange
    from sluice.pipelines.quarantine.limit import Fault

RECORDS = 20_000
MOST_RECORDS = 1_000_000
PROPOSED = ".contract.proposed.json"
_MOST_SHOWN = 60
"""Characters of a value, and lines of a table."""

group = make_group(
    "Propose or try a contract: the rules for a feed's rows.",
    "sluice contract init orders",
    "sluice contract check orders --window 2026-11-20T14",
)

Records = Annotated[
    int | None,
    option(
        "--records",
        "N",
        "Number of records: the newest, evenly over the partitions.",
        min=1,
        max=MOST_RECORDS,
        show_default=f"{RECORDS:,}; of windows or offsets, up to {MOST_RECORDS:,}",
    ),
]
Output = Annotated[
    Path | None,
    option(
        "--output", "FILE", "Write the proposal to this file.", show_default=f"feeds/FEED{PROPOSED}", dir_okay=False
    ),
]
Force = Annotated[bool, flag("--force", "Overwrite an existing file.")]
File = Annotated[Path | None, option("--file", "FILE", "Use this contract instead of the feed's own.")]


def register(app: typer.Typer) -> None:
    app.add_typer(group, name="contract")


# -- the sample of both


@dataclass(frozen=True, slots=True)
class SampleOptions:
    """The records of a sample, as typed."""

    records: Records = None
    offsets: Offsets = None
    windows: WindowOptions = field(default_factory=WindowOptions)

    @property
    def has_range(self) -> bool:
        return bool(self.offsets) or self.windows.any

    @property
    def has_window(self) -> bool:
        return self.has_range and not self.offsets


def _find_dataset(session: Session, name: str) -> Feed:
    """Returns the feed or output. Raises UsageError for a feed whose outputs have the contracts."""
    feed = session.find_dataset(name)
    if feed.split:
        raise UsageError(
            f"feed {name} has `split`, and its outputs have the contracts",
            remedy=f"name one of them: {', '.join(d.dataset for d in feed.outputs)}",
        )
    return feed


def _name_file(session: Session, feed: Feed, suffix: str) -> Path:
    """Returns the path of a file next to the feed's, named after the feed or output."""
    return session.project.find_feed_file(feed.name).with_suffix(f".{feed.output}{suffix}" if feed.output else suffix)


@contextmanager
def _open_sample(session: Session, feed: Feed, contract: Contract | None, options: SampleOptions) -> Iterator[Sample]:
    """The records, made into rows; their files are removed when the block ends. Raises as `take_sample`."""
    from sluice.pipelines.landing.sample import SampleRequest, build_sample_shape, take_sample
    from sluice.resources.lake.local_lake import LocalLake
    from sluice.resources.registry import writers_of

    if options.offsets and options.windows.any:
        raise UsageError("--offsets together with windows", remedy="use either --offsets or windows")
    chosen = options.windows.choose(session, feed)
    session.terminal.show(*window_options.open_window_lines(feed.name, chosen.open_windows))
    records = options.records or (MOST_RECORDS if options.has_range else RECORDS)
    shape = build_sample_shape(session.feed(feed.name), feed, contract)
    offsets: dict[TopicPartition, list[Range]] = {}
    for r in map(parsing.parse_offset_range, options.offsets or ()):
        offsets.setdefault(TopicPartition(r.topic, r.partition), []).append(Range(r.start, r.end))
    request = SampleRequest(shape, records, chosen.settled, offsets)
    with (
        TemporaryDirectory(dir=scratch.get_root()) as folder,
        session.terminal.progress() as meter,
        session.open_ports(feed) as ports,
    ):
        writers = writers_of(feed, ports.lake, keep=False)
        yield take_sample(feed, ports, request, LocalLake(Path(folder)), writers, meter)


# -- contract init


@command(group)
def init(
    session: Session,
    feed: FeedName,
    options: SampleOptions,
    output: Output = None,
    force: Force = False,
) -> None:
    """Propose a contract from a sample of the feed's topics.

    It reads records as a run does, and proposes expectations that all of them meet: no nulls, ranges, small sets,
    patterns, keys. All are warnings, in a file that no feed reads. Review it, mark the critical ones, and rename it to
    FEED.contract.json. No record lands and no offset moves.

    $ sluice contract init orders
    $ sluice contract init github.push
    $ sluice contract init orders --records 200000 --output proposed.json
    $ sluice contract init orders --window 2026-11-20T14 --force
    """
    from sluice.pipelines.contract.contract_proposal import ENOUGH, candidates, propose
    from sluice.pipelines.landing.sample import read_landed
    from sluice.pipelines.quarantine.limit import faults_of

    definition = _find_dataset(session, feed)
    extras.require("great_expectations")  # said before a minute of compiling, and before Kafka is asked
    path = _choose_output(session, definition, output, force)
    with _open_sample(session, definition, None, options) as sample:
        about = sample.shape.landed_columns, sample.shape.column_rules
        rows = read_landed(sample.receipts, sample.lake, [c.name for c in candidates(*about)])
        proposals = propose(rows, *about)
        faults = faults_of(sample.quarantine_files, sample.lake)
    if not proposals:
        few = f"a proposal needs {ENOUGH}"
        unfit = f"; {many(sample.counts.quarantined, 'record')} did not fit the schema" if faults else ""
        what = few if rows.num_rows < ENOUGH else "but no expectation holds for all of them"
        raise Failed(
            f"the sample has {many(rows.num_rows, 'row')}, {what}{unfit}",
            remedy="sample more or other records: --records, --window or --offsets",
        )
    with session.terminal.working("writing the suite with Great Expectations (loads in a few seconds)"):
        text = _build_suite(definition, proposals, sample, rows.num_rows)
    _write(path, text, force)
    adopted = _name_file(session, definition, ".contract.json")
    session.terminal.show(*_format_proposal(definition, proposals, sample, faults, path, adopted))
    session.terminal.print_document(
        feed=feed,
        file=path,
        sample=SampleResult.of(sample),
        proposals=[p.item | {"why": p.why} for p in proposals],
        unfit=faults,
        suite=json.loads(text),
    )


def _choose_output(session: Session, feed: Feed, requested: Path | None, force: bool) -> Path:
    """Where the proposal goes: never where a feed would read it. Raises UsageError."""
    from sluice.pipelines.contract.suite import CONTRACT

    path = requested or _name_file(session, feed, PROPOSED)
    if path.name.endswith(CONTRACT):
        raise UsageError(
            f"--output {path}: feeds read contracts from files named like that",
            remedy=f"write the proposal to another file, such as {feed.dataset}{PROPOSED}, review it, then rename it",
        )
    if path.exists() and not force:
        raise UsageError(f"{path} exists", remedy="add --force to overwrite it, or choose another file with --output")
    return path


def _build_suite(feed: Feed, proposals: Sequence[Proposal], sample: Sample, rows: int) -> str:
    """The file's text, checked against what Sluice supports. Raises Failed."""
    from sluice.pipelines.contract.suite import ContractError, parse_contract
    from sluice.resources.great_expectations import suite_text

    offsets = [str(r.offset_range) for r in sample.receipts]
    meta = {"proposed_by": "sluice contract init", "feed": feed.dataset, "rows": rows, "offsets": offsets}
    text = suite_text(feed.dataset, [p.item for p in proposals], {"sluice": meta})
    try:
        parse_contract(text.encode(), feed.columns, feed.shape.column_rules)
    except ContractError as error:
        raise Failed(f"the proposed contract is invalid: {error}", remedy="this is a bug: report it") from None
    return text


def _write(path: Path, text: str, force: bool) -> None:
    """Write the file feed_shape or not at all; without `force`, never over a file that appeared in between."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        partial.write_text(text)
        if force:
            partial.replace(path)
        else:
            os.link(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def _format_proposal(
    feed: Feed, proposals: Sequence[Proposal], sample: Sample, faults: Sequence[Fault], path: Path, adopted: Path
) -> Iterator[RenderableType]:
    yield heading(f"Proposed for {feed.dataset}", _sample_line(sample))
    rows = [(p.column, p.type.removeprefix("expect_column_"), _format_kwargs(p.kwargs), p.why) for p in proposals]
    yield table(("column", "expectation", "arguments", "reason"), rows)
    if sample.counts.quarantined:
        yield warn(f"{many(sample.counts.quarantined, 'record')} did not fit the schema and are not in the sample:")
        yield from (f"    {safe(str(f))}" for f in faults[:5])
    yield good(f"{many(len(proposals), 'expectation')}, all of them warnings, written to {path}")
    yield "  No feed reads this file. Review it, mark critical expectations, then adopt and try it:"
    yield copyable(shlex.join(("mv", str(path), str(adopted))))
    yield copyable(f"sluice contract check {feed.dataset}")


def _sample_line(sample: Sample) -> str:
    partitions = len({r.offset_range.tp for r in sample.receipts})
    return f"{many(sample.records, 'record')} of {many(partitions, 'partition')}; no record landed"


def _format_kwargs(kwargs: Mapping[str, Any]) -> str:
    if "value_set" in kwargs:
        return _cut(", ".join(map(str, kwargs["value_set"])))
    if "min_value" in kwargs:
        return f"{_format_bound(kwargs['min_value'])} to {_format_bound(kwargs['max_value'])}"
    return _cut(", ".join(map(str, kwargs.values())))


def _format_bound(value: Any) -> str:
    return value if isinstance(value, str) else f"{value:,}"


def _cut(text: str) -> str:
    return text if len(text) <= _MOST_SHOWN else f"{text[: _MOST_SHOWN - 1]}…"


@dataclass(frozen=True, slots=True)
class SampleResult:
    """The records of a sample. `complete`: these are all that were requested, not only the newest."""

    records: int
    landed: int
    quarantined: int
    complete: bool
    offsets: AsText[list[OffsetRange]]

    @classmethod
    def of(cls, sample: Sample) -> SampleResult:
        counts, offsets = sample.counts, [r.offset_range for r in sample.receipts]
        return cls(sample.records, counts.landed, counts.quarantined, sample.complete, offsets)


# -- contract check


@command(group)
def check(
    session: Session,
    feed: FeedName,
    options: SampleOptions,
    file: File = None,
) -> int:
    """Try a contract on records of the feed's topics. No record lands.

    It reads the contract as a run does, checks that Great Expectations loads it, and tries it on the newest records, or
    on those of windows or offsets. It shows the records that break each expectation, and whether a run would publish
    such a batch. Exit 1 if not.

    $ sluice contract check orders
    $ sluice contract check orders --window 2026-11-20T14
    $ sluice contract check orders --file feeds/orders.contract.proposed.json --records 200000
    """
    from sluice.pipelines.validation.batch_expectations import hold_whole

    definition = _find_dataset(session, feed)
    contract = _read_contract(session, definition, file)
    with _open_sample(session, definition, contract, options) as sample:
        with session.terminal.working("checking batch expectations"):
            results = hold_whole(sample.shape, sample.receipts, sample.lake, sample.earlier)
        tried = _try_contract(definition, contract, options, sample, results)
    session.terminal.show(*_format_trial(tried))
    session.terminal.print_document(
        feed=feed,
        contract=contract.hash,
        sample=SampleResult.of(tried.sample),
        expectations=tried.outcomes,
        examples=tried.examples,
        not_tried=[o.place for o in tried.left_out],
        quarantine=tried.faults,
        published=not tried.refused,
        refused=tried.refused,
    )
    return 1 if tried.refused else 0


@dataclass(frozen=True)
class _ContractTrial:
    """The result of the trial. `examples`: values of some records that broke an expectation, by its place in the
    contract; `left_out`: expectations about how many rows a batch has, which a sample cannot tell."""

    feed: Feed
    contract: Contract
    sample: Sample
    outcomes: Sequence[ExpectationOutcome]
    left_out: Sequence[ExpectationOutcome]
    examples: Mapping[int, Sequence[tuple[str, str]]]
    faults: Sequence[Fault]
    refused: Sequence[str]


def _read_contract(session: Session, feed: Feed, file: Path | None) -> Contract:
    """The feed's contract, or that of another file; Great Expectations can load it, too. Raises FeedError."""
    from sluice.pipelines.contract.suite import CONTRACT, ContractError, ContractProblem, read_contract

    path = file or _name_file(session, feed, CONTRACT)
    try:
        contract = read_contract(path, feed.columns, feed.shape.column_rules)
        if contract is None:
            raise FeedError(
                f"no contract at {path}", remedy=f"propose one with sluice contract init {feed.dataset}, and review it"
            )
        with session.terminal.working("loading the contract with Great Expectations (a few seconds)"):
            if refused := _of_gx(path):
                raise ContractError(*(ContractProblem(*r) for r in refused))
    except ContractError as error:
        lines = [": ".join(filter(None, (str(path), p.place, p.what))) for p in error.problems]
        remedies = dict.fromkeys(p.remedy for p in error.problems if p.remedy)
        raise FeedError(
            "\n".join(lines), remedy="; ".join(remedies) or "fix the file, then run sluice contract check again"
        ) from None
    return contract


def _of_gx(path: Path) -> list[tuple[str, str, str]]:
    from sluice.resources.great_expectations import refusals

    items = json.loads(path.read_bytes())["expectations"]
    remedy = "see its arguments in the gallery of Great Expectations"
    refused = refusals(items)
    return [(f"expectations[{i}] {items[i]['type']}", f"Great Expectations: {what}", remedy) for i, what in refused]


_VOLUME = ("expect_table_row_count_to_be_between", "expect_table_row_count_to_equal")


def _try_contract(
    feed: Feed,
    contract: Contract,
    request: SampleOptions,
    sample: Sample,
    results: Sequence[Result],
) -> _ContractTrial:
    from sluice.pipelines.contract.catalogue import contract_results
    from sluice.pipelines.landing.sample import read_rows_at
    from sluice.pipelines.quarantine.limit import check_quarantine, faults_of
    from sluice.pipelines.validation.drift import check_drift

    all_ = contract_results(contract, sample.receipts, results)
    left_out = [] if request.has_window and sample.complete else [o for o in all_ if o.expectation.type in _VOLUME]
    outcomes = [o for o in all_ if o not in left_out]
    records = {record for o in outcomes for record in o.first}
    rows = read_rows_at(records, sample.shape, sample.receipts, sample.lake, sample.writers)
    examples = {o.expectation.place: [*_list_examples(o, rows)] for o in outcomes if o.first}
    refused = [_format_sentence(o) for o in outcomes if o.refuses]
    try:
        check_drift(sample.receipts, feed.policies)
        check_quarantine(sample.receipts, feed.policies, sample.lake)
    except SchemaDrifted as drifted:
        refused.insert(0, drifted.message)
    except QuarantineExceeded:
        refused.insert(0, f"{_format_share(sample)}, more than the feed allows")
    faults = faults_of(sample.quarantine_files, sample.lake)
    return _ContractTrial(feed, contract, sample, outcomes, left_out, examples, faults, refused)


def _list_examples(o: ExpectationOutcome, rows: Mapping[str, Mapping[str, pa.Scalar]]) -> Iterator[tuple[str, str]]:
    """Where, and the values of the columns that the expectation is about."""
    from sluice.pipelines.contract.catalogue import columns

    for record in o.first:
        cells = rows.get(record, {})
        yield (
            record,
            ", ".join(f"{name}={_format_value(cells[name])}" for name in columns(o.expectation) if name in cells),
        )


def _format_value(cell: pa.Scalar) -> str:
    """A value of a record, short and harmless to a terminal."""
    import pyarrow as pa

    from sluice.cli.terminal.record_view import time_text

    if not cell.is_valid:
        return "null"
    if pa.types.is_binary(cell.type):
        return _quote(cell.as_py()[: 4 * _MOST_SHOWN].decode("utf-8", "backslashreplace"))
    if pa.types.is_string(cell.type):
        return _quote(cell.as_py()[: 4 * _MOST_SHOWN])
    if pa.types.is_timestamp(cell.type) or pa.types.is_date(cell.type):
        return time_text(cell)
    if pa.types.is_decimal(cell.type):
        return str(cell.as_py())
    return _cut(safe(str(cell.as_py())))


def _quote(text: str) -> str:
    return json.dumps(_cut(text), ensure_ascii=True)


def _format_sentence(o: ExpectationOutcome) -> str:
    from sluice.pipelines.contract.catalogue import text

    observed = f": {o.observed}" if o.observed else f": {o.unexpected:,} of {o.checked:,} rows break it"
    return f"{text(o.expectation)}{observed}"


def _format_share(sample: Sample) -> str:
    bad_ = sample.counts.quarantined
    share = format_percent(bad_ / max(sample.records, 1))
    return f"{count(bad_)} of {many(sample.records, 'record')} would go to quarantine ({share})"


# -- for people


def _format_trial(t: _ContractTrial) -> Iterator[RenderableType]:
    yield heading(f"Contract of {t.feed.dataset}", f"{_sample_line(t.sample)}; contract {t.contract.hash}")
    names = ("expectation", "severity", "checked", "broken", "share", "first")
    yield table(names, [_build_row(t, o) for o in t.outcomes], right="checked broken share")
    if t.left_out:
        yield f"  {many(len(t.left_out), 'expectation')} about the number of rows of a batch: tried only with --window"
    of_schema = [f for f in t.faults if f.kind.stage != "contract"]
    if of_schema:
        yield warn(f"{many(sum(f.records for f in of_schema), 'record')} did not fit the schema:")
        yield from (f"    {safe(str(f))}" for f in of_schema[:5])
    yield from _format_verdict(t)


def _build_row(t: _ContractTrial, o: ExpectationOutcome) -> Sequence[Any]:
    from sluice.pipelines.contract.catalogue import text

    sentence = _cut(text(o.expectation)) if len(text(o.expectation)) > 2 * _MOST_SHOWN else text(o.expectation)
    sign = good if o.passed and not o.unexpected else bad if o.severity == "critical" else warn
    lines = [" ".join(filter(None, example)) for example in t.examples.get(o.expectation.place, ())]
    first = "\n".join(lines) or o.observed
    broken = (count(o.checked), count(o.unexpected), format_percent(o.share)) if o.checked else ("–", "–", "–")
    return (sign(sentence), str(o.severity), *broken, first)


def _format_verdict(t: _ContractTrial) -> Iterator[RenderableType]:
    """Describes the effect of such a batch on a run."""
    if t.refused:
        yield bad("the batch would be refused, and not published:")
        yield from (f"    {safe(line)}" for line in t.refused)
        return
    limit = t.feed.policies.quarantine_limit
    bad_, allowed = t.sample.counts.quarantined, f"within the limit of {100 * limit.share:g} %"
    beyond = bad_ > limit.share * t.sample.records
    if beyond:
        allowed = f"more than {100 * limit.share:g} %: a batch with {count(limit.at_least)} such records is refused"
    warned = sum(not o.passed and o.severity == "warning" for o in t.outcomes)
    yield (warn if beyond else good)(
        f"{_format_share(t.sample)}, {allowed}" if bad_ else "no record would go to quarantine"
    )
    yield good("the batch would be published" + (f", with {many(warned, 'warning')}" if warned else ""))
