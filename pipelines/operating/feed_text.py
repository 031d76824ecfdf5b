"""The text of a proposed feed file, each key with the reason in a comment. A person reads and changes it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from sluice.pipelines.errors import docs_command
from sluice.pipelines.model.receipts import Counts, EngineKind
from sluice.pipelines.operating.propose_feed import (
    FeedProposal,
    Fit,
    OutputProposal,
    Proposed,
    TopicSample,
)
from sluice.pipelines.quarantine.limit import show_share
from sluice.pipelines.schema.inference import MOST_STRAYS
from sluice.pipelines.schema.schema import Field, Kind, parse_schema
from sluice.pipelines.util.units import DAY, HOUR, escape_unprintable, join_first, many, show_instant

MANY_RECORDS = 100_000_000
"""From here on a first run would read for a long time: a look-back is proposed instead of everything."""
FEW_AN_HOUR = 100
_MOST_NAMES, _MOST_NAME = 20, 60
_MOST_MISFITS = 5
_WIDTH, _MOST_WIDTH, _LONG_LINE = 27, 72, 100
_PLAIN = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*")
_PLAIN_TYPE = re.compile(r"[A-Za-z_](?:[A-Za-z0-9_<>(),.\[\]\"-]|:(?! )| (?!#))*")
_WORDS = {"null", "true", "false", "yes", "no", "on", "off", "y", "n", "~"}


def propose_start(sample: TopicSample) -> Proposed:
    if not sample.offsets:
        return Proposed("earliest", "the topic is empty; all new records land")
    since = f", since {show_instant(sample.oldest)[:10]}" if sample.oldest is not None else ""
    if sample.offsets > MANY_RECORDS:
        return Proposed("7d", f"the last week; earliest: all {sample.offsets:,} offsets{since}")
    return Proposed("earliest", f"all {sample.offsets:,} offsets{since}; latest: only new records")


def propose_window(sample: TopicSample) -> Proposed:
    rate = sample.offsets_an_hour
    if rate is None:
        return Proposed("1h", "also 15m or 1d: how long the pieces are that land, in UTC")
    if rate < FEW_AN_HOUR:
        return Proposed("1d", f"about {rate * DAY / HOUR:,.0f} records a day: shorter windows would be tiny files")
    return Proposed("1h", f"about {rate:,.0f} records an hour")


_ENGINE_NOTES = {
    EngineKind.SPARK: "or processes: of this machine, without Java, for small hours",
    EngineKind.PROCESSES: "of this machine, without Java; or spark",
}


@dataclass(frozen=True, slots=True)
class FileSettings:
    """The keys of a feed file that no sample decides: `kafka` and `registry` are those of these sections, `group` is
    empty by default."""

    kafka: Mapping[str, str]
    registry: Mapping[str, str]
    group: str
    engine: EngineKind
    today: str


def feed_text(sample: TopicSample, proposal: FeedProposal, settings: FileSettings, fit: Fit | None = None) -> str:
    """The file. `fit` is None if it is not known."""
    lines = [
        f"# Written by `sluice init` on {settings.today}, from a sample of {proposal.sampled:,} of the newest records.",
        f"# Change what you like: `{docs_command('feeds')}` has every key, and `sluice feeds check` reads the file.",
    ]
    lines += [f"# The records are {proposal.envelope}."] if proposal.envelope else []
    if fit and fit.other_misfits:
        lines += [f"# Of {proposal.sampled:,} records these do not fit: {list_misfits(fit)}."]
    lines += section_text("kafka", settings.kafka).splitlines()
    lines += [f"topics: {_scalar(sample.topic)}"]
    lines += [f"group: {_scalar(settings.group)}"] if settings.group else []
    keys = {"start": propose_start(sample), "window": propose_window(sample)}
    keys |= {"engine": Proposed(settings.engine, _ENGINE_NOTES[settings.engine]), "format": proposal.format}
    lines += [_append_note(f"{key}: {proposed.value}", proposed.why) for key, proposed in keys.items()]
    if any(o.schema_file for o in proposal.outputs):
        section = section_text("registry", settings.registry).splitlines()
        lines += section or [_append_note("registry:", "the one of $SCHEMA_REGISTRY_URL")]
    if proposal.key:
        names = ", ".join(map(_scalar, proposal.key))
        why = "the key by Kafka's keys; for a table of current rows: sluice docs tables"
        lines += [_append_note(f"changes: {{format: debezium, key: [{names}]}}", why)]
    lines += _split(proposal) if proposal.by else _schema(proposal.outputs[0], "")
    return "\n".join(lines) + "\n"


def section_text(name: str, settings: Mapping[str, str]) -> str:
    """A section of the feed file; empty without keys."""
    lines = [f"{name}:", *(f"  {key}: {_scalar(value)}" for key, value in settings.items())] if settings else []
    return "".join(f"{line}\n" for line in lines)


def list_fields(names: Sequence[str]) -> str:
    """The first names of fields, quoted and on one line, and the number of the others."""
    return join_first((json.dumps(name[:_MOST_NAME]) for name in names), _MOST_NAMES)


def list_rest(proposal: FeedProposal) -> str:
    """The records without an output by their values, on one line."""
    values = ((n, json.dumps(v[:_MOST_NAME]) if v else "without a value") for v, n in proposal.rest.items())
    return join_first((f"{number:,} {value}" for number, value in values), _MOST_NAMES)


def list_misfits(fit: Fit) -> str:
    """The first records that do not fit, as partition and offset, with the reasons."""
    return escape_unprintable(join_first(fit.other_misfits, _MOST_MISFITS))


def list_strays(output: OutputProposal) -> str:
    listed = join_first(output.strays, _MOST_MISFITS)
    return f"{many(len(output.strays), 'record')} of another shape, in _extra or quarantine: {listed}"


def _split(proposal: FeedProposal) -> Iterator[str]:
    ((source, name),) = proposal.by.items()
    rest = sum(proposal.rest.values())
    if rest > MOST_STRAYS * proposal.sampled:
        share = show_share(Counts(landed=proposal.sampled - rest, quarantined=rest))
        yield _append_note(share, f"{many(rest, 'record')} of {proposal.sampled:,} have no output")
    yield "split:"
    value = name if source == "message" else _scalar(name)
    yield _append_note(f"  by: {{{source}: {value}}}", "its values tell the shapes of records apart")
    yield "  into:"
    for output in proposal.outputs:
        yield _append_note(f"    {_scalar(output.name)}:", f"{output.records:,} of {proposal.sampled:,} records")
        if output.values:
            yield f"      values: [{', '.join(json.dumps(v, ensure_ascii=False) for v in output.values)}]"
        if output.format.value != proposal.format.value:
            yield _append_note(f"      format: {output.format.value}", output.format.why)
        yield from _schema(output, "      ")
    yield _append_note("  otherwise: quarantine", list_rest(proposal) or "no record of the sample")


def _schema(output: OutputProposal, indent: str) -> Iterator[str]:
    if output.schema_file:
        yield f"{indent}schema_file: {_scalar(output.schema_file)}"
        yield from [f"{indent}message: {_scalar(output.message)}"] if output.message else []
    if output.schema_file or not output.columns:
        return
    yield f"{indent}schema:"
    columns = [[*_column(parse_schema({c.name: c.type}).fields[0], c.type, f"{indent}  ")] for c in output.columns]
    width = min(_MOST_WIDTH, max(_WIDTH, *(len(first) for first, *_ in columns)))
    for column, (first, *members) in zip(output.columns, columns, strict=True):
        yield _append_note(first, column.note, width)
        yield from members
    if output.extra:
        yield f"{indent}  # in the column _extra: {list_fields(output.extra)}"
    if output.strays:
        yield f"{indent}  # {list_strays(output)}"


def _column(f: Field, text: str, indent: str) -> Iterator[str]:
    """The lines of a column; a large struct has one for each member."""
    line = f"{indent}{_scalar(f.name)}: {text if _PLAIN_TYPE.fullmatch(text) else _scalar(text)}"
    if len(line) <= _LONG_LINE or f.type.kind is not Kind.STRUCT or f.place or f.required:
        yield line
        return
    yield f"{indent}{_scalar(f.name)}:"
    for member in f.type.fields:
        yield from _column(member, member.text, f"{indent}  ")


def _append_note(text: str, why: str, width: int = _WIDTH) -> str:
    """The line with a comment, which stays on it: names of records may have line breaks."""
    return f"{text:<{width}} # {escape_unprintable(why)}"


def _scalar(text: str) -> str:
    """The text as YAML reads it back: quoted if it is not a plain word."""
    if _PLAIN.fullmatch(text) and text.lower() not in _WORDS:
        return text
    # YAML folds some unprintable characters, such as U+2028, like line breaks.
    quoted = json.dumps(text, ensure_ascii=False)
    return "".join(c if c.isprintable() else f"\\U{ord(c):08x}" for c in quoted)
