"""Proposes a feed for a topic from a sample of its records: format, columns, and the outputs of a split.

Pure functions with frozen results. A person reads the proposal; records that do not fit it go to the quarantine, as
with any schema.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice

import pyarrow as pa
from pydantic import ValidationError

from sluice.pipelines.feed.changes_section import (
    KEY_KINDS,
    ORDER,
    ChangeFormat,
    ChangesSettings,
    UnusableChanges,
    check_changes,
)
from sluice.pipelines.feed.feed import Feed
from sluice.pipelines.feed.split_section import SplitSettings
from sluice.pipelines.model.kafka import PartitionState
from sluice.pipelines.model.plans import OffsetRange
from sluice.pipelines.model.receipts import Counts
from sluice.pipelines.operating.discriminators import find_discriminator
from sluice.pipelines.operating.envelopes import Envelope, SampledRecord, find_envelope, identify_rows
from sluice.pipelines.quarantine.limit import Fault, kinds_of, rank_faults
from sluice.pipelines.records.kafka_batches.decode import SCHEMA
from sluice.pipelines.records.rows.value_reader import WriterSchemas
from sluice.pipelines.records.split_format import UNROUTED
from sluice.pipelines.schema.inference import MOST_STRAYS, Sampled, parse_value
from sluice.pipelines.schema.schema import Schema, parse_schema, spell_path
from sluice.pipelines.util.units import HOUR

SAMPLE = 1000
"""Records in the sample, in all partitions together."""
SAMPLE_BYTES = 16 << 20
LEAST_FRAMED = 0.95
"""The share of values that begin with the number of a schema, from which all are taken for such."""
_MOST_MIXES = 3
"""Fields within a column whose mixed types are noted."""


@dataclass(frozen=True)
class TopicSample:
    """A topic, and batches of its newest records, with the columns of a raw feed. Times are in ms.

    `oldest` is the time of the topic's oldest record.
    """

    topic: str
    partitions: Sequence[PartitionState]
    oldest: int | None
    batches: Sequence[pa.RecordBatch] = ()

    @property
    def ranges(self) -> dict[str, tuple[int, int]]:
        """The newest offsets of partitions that have any: those to sample."""
        filled = [p for p in self.partitions if p.last_stable_offset > p.log_start]
        share = max(1, SAMPLE // max(1, len(filled)))
        ends = {str(p.tp): (p.log_start, p.last_stable_offset) for p in filled}
        return {tp: (max(start, end - share), end) for tp, (start, end) in ends.items()}

    @property
    def offsets(self) -> int:
        return sum(p.last_stable_offset - p.log_start for p in self.partitions)

    @property
    def bytes(self) -> int | None:
        sizes = [p.log_bytes for p in self.partitions if p.log_bytes is not None]
        return sum(sizes) if sizes else None

    @property
    def key_count(self) -> int:
        """Records of the sample that have a key."""
        return sum(batch.num_rows - batch.column("key").null_count for batch in self.batches)

    @property
    def schema_number(self) -> int | None:
        """The number of a registry's schema before most values, as Confluent's serializers write it. None unless nearly
        all values begin with one."""
        values = [value for b in self.batches for value in b.column("value").to_pylist() if value is not None]
        numbers = Counter(int.from_bytes(v[1:5]) for v in values if len(v) > 5 and v[0] == 0 and any(v[1:5]))
        return max(numbers, key=numbers.__getitem__) if numbers.total() >= max(1, LEAST_FRAMED * len(values)) else None

    @property
    def offsets_an_hour(self) -> float | None:
        """Offsets an hour between the oldest and the newest record; None for less than half an hour."""
        stamps = [t for b in self.batches for t in b.column("timestamp").cast(pa.int64()).to_pylist() if t is not None]
        if self.oldest is None or max(stamps, default=0) - self.oldest < HOUR // 2:
            return None
        return float(self.offsets * HOUR / (max(stamps) - self.oldest))

    @cached_property
    def records(self) -> tuple[SampledRecord, ...]:
        return tuple(_read_records(self.batches))


def _read_records(batches: Sequence[pa.RecordBatch]) -> Iterator[SampledRecord]:
    names = ("partition", "offset", "headers", "value", "key")
    for batch in batches:
        for partition, offset, headers, value, key in zip(*(batch.column(n).to_pylist() for n in names), strict=True):
            last = {h["key"]: h["value"] for h in headers or ()}
            texts = {name: text.decode(errors="replace") for name, text in last.items() if text is not None}
            own = parse_value(key)
            own = own if isinstance(own, dict) else (key or b"").decode(errors="replace")
            yield SampledRecord(partition, offset, texts, parse_value(value), own)


@dataclass(frozen=True, slots=True)
class Proposed:
    """A value for a key of the feed file, with the reason."""

    value: str
    why: str


@dataclass(frozen=True, slots=True)
class ColumnProposal:
    """A column with its type, the number of records that have its field, and a note."""

    name: str
    type: str
    records: int
    note: str


@dataclass(frozen=True, slots=True)
class OutputProposal:
    """The rows of a feed, or of the records with one of `values`.

    `extra` are fields without a column. `strays` are records of another shape, as `partition:offset`. Columns may be
    those of a `schema_file`, whose `message` Protobuf names.
    """

    name: str
    values: tuple[str, ...]
    records: int
    format: Proposed
    columns: tuple[ColumnProposal, ...]
    extra: tuple[str, ...]
    strays: tuple[str, ...]
    schema_file: str = ""
    message: str = ""


@dataclass(frozen=True, slots=True)
class FeedProposal:
    """The outputs of a feed for `sampled` records. `key` has the fields that name a row, if records are changes.

    They are split `by` a header or field; otherwise this is empty, and the one output has no name. `rest` are the
    records without an output by its values.
    """

    sampled: int
    envelope: str
    outputs: tuple[OutputProposal, ...]
    by: Mapping[str, str] = field(default_factory=dict)
    rest: Mapping[str, int] = field(default_factory=dict)
    key: tuple[str, ...] = ()

    @property
    def format(self) -> Proposed:
        if not self.by:
            return self.outputs[0].format
        format_ = self.outputs[0].format.value if "message" in self.by else "json"
        return Proposed(format_, f"of {sum(o.format.value == format_ for o in self.outputs)} outputs")


def propose(records: Sequence[SampledRecord], *, raw: bool = False) -> FeedProposal:
    """The feed that fits the records; `raw` without a schema."""
    if raw:
        output = OutputProposal("", (), len(records), Proposed("raw", "asked for"), (), (), ())
        return FeedProposal(len(records), "", (output,))
    envelope = find_envelope(records)
    by = find_discriminator(records, envelope)
    if by is None:
        changes = identify_rows(envelope, records)
        output = _propose_output(records, changes)
        kinds = {c.name: parse_schema({c.name: c.type}).fields[0].type.kind for c in output.columns}
        own = any(name.casefold().startswith(ORDER) for name in kinds)
        if all(kinds.get(name) in KEY_KINDS for name in changes.key) and not own:
            return FeedProposal(len(records), changes.title, (output,), key=changes.key)
        return FeedProposal(len(records), envelope.title, (_propose_output(records, envelope),))
    groups, rest, outputs = defaultdict[str, list[SampledRecord]](list), Counter[str](), list[OutputProposal]()
    for record in records:
        if (value := by.get_value(record)) in by.counts:
            groups[value or ""].append(record)
        else:
            rest["tombstone" if value is None and record.value == "tombstone" else value or ""] += 1
    for value in by.counts:
        name = name_output(value, {o.name for o in outputs})
        outputs.append(_propose_output(groups[value], envelope, name, value))
    field_ = {"at": spell_path(by.path)} if by.path[1:] else {"field": "".join(by.path)}
    source = {"header": by.header} if by.header else field_
    return FeedProposal(len(records), envelope.title, tuple(outputs), source, dict(rest.most_common()))


def refer_to_registry(proposal: FeedProposal, number: int) -> FeedProposal:
    """The raw feed of values that begin with a schema's number, with what gives it columns."""
    why = f"values begin with the number of a registry's schema, such as {number}: --registry URL gives columns"
    return replace(proposal, outputs=(replace(proposal.outputs[0], format=Proposed("raw", why)),))


def identify_changes(
    records: Sequence[SampledRecord], columns: Schema, key: tuple[str, ...]
) -> tuple[str, tuple[str, ...]]:
    """Returns the envelope and the fields of the key, if columns are those of Debezium's changes. The key is the given
    one, or that of Kafka's keys in JSON."""
    keys = {tuple(r.key) for r in records if isinstance(r.key, dict)}
    key = key or (keys.pop() if len(keys) == 1 else ())
    try:
        check_changes(ChangesSettings(format=ChangeFormat.DEBEZIUM, key=key), columns)
    except UnusableChanges:
        return "", ()
    return "change events of Debezium: columns are those of the envelope", key


def name_feed(text: str, prefix: str = "topic") -> str:
    """A name for a feed of the topic, or for an output: `Shop.Orders-v2` gives `shop_orders_v2`."""
    name = re.sub(r"[^a-z0-9]+", "_", text.lower()).strip("_")
    return (name if name[:1].isalpha() else f"{prefix}_{name}")[:60].strip("_")


def name_output(value: str, taken: Collection[str]) -> str:
    """A name that no other output has, and that `split` does not reserve."""
    stem = name_feed(value, "kind")
    try:
        SplitSettings.model_validate({"by": {"field": "x"}, "into": {stem: {}}})
    except ValidationError:
        stem = f"{stem[:52]}_records"
    return next(n for n in (stem, *(f"{stem}_{i}" for i in range(2, len(taken) + 3))) if n not in taken)


def _propose_output(
    records: Sequence[SampledRecord], envelope: Envelope, name: str = "", value: str = ""
) -> OutputProposal:
    sample, strays = Sampled(), _find_strays(records, envelope)
    stray_ids = set(map(id, strays))
    usual = [r for r in records if id(r) not in stray_ids]
    for record in records:
        sample.count(record.value)
    for record in usual:
        sample.learn((envelope.get_row(record.value) or {}).items())
    sample.paths |= {name: (*(() if envelope.key else envelope.at), name) for name in sample.fields}
    for record in usual:
        sample.learn(envelope.list_attributes(record))
    sample.paths |= envelope.attributes
    sample.types |= envelope.find_types(usual, sample.fields)
    format_ = propose_format(sample)
    names, extra = (sample.names, sample.left_out) if format_.value == "json" else ({}, [])
    columns = tuple(
        ColumnProposal(column, sample.columns[column], sample.fields[own].seen, _note(sample, own, column))
        for own, column in names.items()
    )
    values, coordinates = (value,) if name != value else (), tuple(f"{r.partition}:{r.offset}" for r in strays)
    return OutputProposal(name, values, len(records), format_, columns, tuple(extra), coordinates)


def _find_strays(records: Sequence[SampledRecord], envelope: Envelope) -> list[SampledRecord]:
    """The objects that lack most of the fields that most others have; empty if these are more than a handful."""
    rows = [(r, row) for r in records if (row := envelope.get_row(r.value)) is not None]
    counts = Counter(name for _, row in rows for name in row)
    regular = {name for name, n in counts.items() if n >= 0.5 * len(rows)}
    strays = [r for r, row in rows if 2 * len(regular & row.keys()) < len(regular)]
    return strays if len(strays) <= MOST_STRAYS * len(rows) else []


def propose_format(sample: Sampled) -> Proposed:
    values = sample.values - sample.tombstones
    if not values:
        return Proposed("raw", "no record with a value to sample; json lands typed columns")
    if sample.encoded and not sample.is_typed:
        ((encoding, times),) = sample.encoded.most_common(1)
        return Proposed("raw", f"{times:,} of {values:,} sampled values are JSON in {encoding}; columns need UTF-8")
    if not sample.is_typed and sample.constants:
        why = f"{sample.constants:,} of {values:,} sampled values have NaN or Infinity, which JSON does not have"
        return Proposed("raw", f"{why}: typed, they would go to quarantine")
    if not sample.is_typed and sample.left_out and sample.objects >= 0.95 * values:
        return Proposed("raw", f"the names of the records' fields are data: {len(sample.left_out):,} names")
    if not sample.is_typed:
        share = f"only {sample.objects:,}" if sample.objects else "none"
        return Proposed("raw", f"{share} of {values:,} sampled values are JSON objects")
    return Proposed("json", f"{sample.objects:,} of {values:,} sampled values are JSON objects")


def _note(sample: Sampled, name: str, column: str) -> str:
    guess, type_ = sample.fields[name], sample.columns[column]
    share = guess.seen / sample.objects
    rate = "in all" if guess.seen == sample.objects else f"in {share:.0%}" if share >= 0.01 else "in under 1%"
    notes = [rate + (f", null in {guess.nulls:,}" if guess.nulls else "")]
    notes += ["decimal(p,s) keeps digits exactly"] if type_.startswith("float64") else []
    notes += [f"its {len(guess.members):,} names look like data"] if type_.startswith("map<") else []
    notes += ["all texts are such numbers"] if " from text" in type_ else []
    is_guess = type_.startswith("epoch(") and name not in sample.types
    notes += ["integers of this size and name are times"] if is_guess else []
    notes += ["large: columns `at` paths, in its place, have parts of it"] if name in sample.large else []
    return "; ".join([*notes, *islice(guess.list_mixes(), _MOST_MIXES)])


@dataclass(frozen=True, slots=True)
class Misfit:
    """A sampled record that the feed would quarantine, and why."""

    partition: int
    offset: int
    field: str | None
    reason: str

    def __str__(self) -> str:
        return f"{self.partition}:{self.offset} ({f'{self.field}: ' if self.field else ''}{self.reason})"


@dataclass(frozen=True, slots=True)
class Fit:
    """The sampled records that the feed lands, and those that it quarantines; `faults` are these by kind."""

    landed: int
    misfits: tuple[Misfit, ...] = ()
    faults: tuple[Fault, ...] = ()

    @property
    def counts(self) -> Counts:
        return Counts(landed=self.landed, quarantined=len(self.misfits))

    @property
    def other_misfits(self) -> tuple[Misfit, ...]:
        """Those that are not without an output."""
        return tuple(m for m in self.misfits if m.reason != UNROUTED)


def fit_sample(feed: Feed, batches: Sequence[pa.RecordBatch], writers: WriterSchemas | None = None) -> Fit:
    """The rows that the feed makes of sampled records, counted. `writers` tells the schemas that these name."""
    form, landed = feed.shape.format(writers), 0
    misfits, faults = list[Misfit](), list[Fault]()
    for batch in batches:
        offsets, partition = batch.column("offset"), batch.column("partition")[0].as_py()
        s = OffsetRange(batch.column("topic")[0].as_py(), partition, "", offsets[0].as_py(), offsets[-1].as_py() + 1)
        for piece in form.convert(s, batch.select(SCHEMA.names)):
            landed += piece.landed.num_rows
            if (refused := piece.quarantined) is not None:
                rows = refused.select(["partition", "offset", "field", "reason"]).to_pylist()
                misfits += [Misfit(**row) for row in rows]
                faults += [Fault(kind, n, f"{s.tp}:{first}") for kind, n, first in kinds_of(refused)]
    return Fit(landed, tuple(misfits), tuple(rank_faults(faults)))
