"""The text of a feed file that fits a topic: what `sluice init` proposes, each key with the reason in a comment.

Pure: `feed_text` renders the file from a `TopicLook`. The file is for a person to read and change.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from sluice.pipelines.errors import docs_command
from sluice.pipelines.model.receipts import EngineKind
from sluice.pipelines.schema.inference import GuessedField, Sampled
from sluice.pipelines.util.units import DAY, HOUR, show_instant

MANY_RECORDS = 100_000_000
"""From here on a first run would read for a long time: a look-back is proposed instead of everything."""
FEW_AN_HOUR = 100
_MOST_NAMES, _MOST_NAME = 20, 60
_PLAIN = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_WORDS = {"null", "true", "false", "yes", "no", "on", "off", "y", "n", "~"}


@dataclass(frozen=True, slots=True)
class TopicLook:
    """A topic as it was seen. `oldest` and `newest` are stamps (ms) of records, None where there was none."""

    topic: str
    partitions: int
    records: int
    bytes: int | None
    oldest: int | None
    newest: int | None
    sample: Sampled
    keyed: int
    """Records of the sample that have a key."""

    @property
    def an_hour(self) -> float | None:
        """Offsets an hour between the oldest and the newest record; None where that is too short a time to tell."""
        if self.oldest is None or self.newest is None or self.newest - self.oldest < HOUR // 2:
            return None
        return self.records * HOUR / (self.newest - self.oldest)


@dataclass(frozen=True, slots=True)
class Proposed:
    """A value for a key of the feed file, and why."""

    value: str
    why: str


def feed_name(topic: str) -> str:
    """A name for a feed of the topic: `Shop.Orders-v2` gives `shop_orders_v2`."""
    name = re.sub(r"[^a-z0-9]+", "_", topic.lower()).strip("_")
    return (name if name[:1].isalpha() else f"topic_{name}")[:64]


def start_of(look: TopicLook) -> Proposed:
    if not look.records:
        return Proposed("earliest", "the topic is empty; all new records land")
    since = f", since {show_instant(look.oldest)[:10]}" if look.oldest is not None else ""
    if look.records > MANY_RECORDS:
        return Proposed("7d", f"the last week; earliest: all {look.records:,} offsets{since}")
    return Proposed("earliest", f"all {look.records:,} offsets{since}; latest: only new records")


def window_of(look: TopicLook) -> Proposed:
    rate = look.an_hour
    if rate is None:
        return Proposed("1h", "also 15m or 1d: how long the pieces are that land, in UTC")
    if rate < FEW_AN_HOUR:
        return Proposed("1d", f"about {rate * DAY / HOUR:,.0f} records a day: shorter windows would be tiny files")
    return Proposed("1h", f"about {rate:,.0f} records an hour")


def format_of(look: TopicLook) -> Proposed:
    sample = look.sample
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


_ENGINE_NOTES = {
    EngineKind.SPARK: "or processes: of this machine, without Java, for small hours",
    EngineKind.PROCESSES: "of this machine, without Java; or spark",
}


def feed_text(
    look: TopicLook, kafka: Mapping[str, str], group: str, format_: Proposed, engine: EngineKind, today: str
) -> str:
    """The file. `kafka` is its `kafka:` section, as it was given; `group` is empty for the default."""
    start, window = start_of(look), window_of(look)
    lines = [
        f"# Written by `sluice init` on {today}, from a sample of {look.sample.values:,} of the newest records.",
        f"# Change what you like: `{docs_command('feeds')}` has every key, and `sluice feeds check` reads the file.",
    ]
    lines += kafka_text(kafka).splitlines()
    lines += [f"topics: {_scalar(look.topic)}"]
    lines += [f"group: {_scalar(group)}"] if group else []
    lines += [_format_key("start", start), _format_key("window", window)]
    lines += [_format_key("engine", Proposed(engine, _ENGINE_NOTES[engine])), _format_key("format", format_)]
    if format_.value == "json":
        lines += ["schema:", *_columns(look.sample)]
    return "\n".join(lines) + "\n"


def kafka_text(kafka: Mapping[str, str]) -> str:
    """The feed's `kafka:` section; empty where it says nothing."""
    lines = ["kafka:", *(f"  {key}: {_scalar(value)}" for key, value in kafka.items())] if kafka else []
    return "".join(f"{line}\n" for line in lines)


def _format_key(key: str, proposed: Proposed) -> str:
    return f"{f'{key}: {proposed.value}':<27} # {proposed.why}"


def _columns(sample: Sampled) -> Iterator[str]:
    columns = sample.columns
    for name, column in sample.names.items():
        text = f"  {_scalar(column)}: {_scalar(columns[column])}"
        yield f"{text:<27} # {_note(sample, sample.fields[name], columns[column])}"
    if sample.left_out:
        yield f"  # in the column _extra: {list_fields(sample.left_out)}"


def list_fields(names: Sequence[str]) -> str:
    """The first names of fields, quoted and on one line, and the number of the others."""
    more = f" and {len(names) - _MOST_NAMES:,} more" if len(names) > _MOST_NAMES else ""
    return ", ".join(json.dumps(name[:_MOST_NAME]) for name in names[:_MOST_NAMES]) + more


def _note(sample: Sampled, guess: GuessedField, type_: str) -> str:
    share = guess.seen / sample.objects
    there = "in all" if guess.seen == sample.objects else f"in {share:.0%}" if share >= 0.01 else "in under 1%"
    nulls = f", null in {guess.nulls:,}" if guess.nulls else ""
    other = "; decimal(p,s) keeps digits exactly" if type_.startswith("float64") else ""
    keys = f"; its {len(guess.members):,} names look like data" if type_.startswith("map<") else ""
    keys += "; integers of this size and name are times" if type_.startswith("epoch(") else ""
    return f"{there}{nulls}{other}{keys}"


def _scalar(text: str) -> str:
    """The text as YAML reads it back: quoted where it is not a plain word."""
    if _PLAIN.fullmatch(text) and text.lower() not in _WORDS:
        return text
    return json.dumps(text, ensure_ascii=False)
