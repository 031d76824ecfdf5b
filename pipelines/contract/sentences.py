"""Puts rules of contracts into words: the rule itself, and its demand on a row that breaks it.

Sentences hold values of the contract only, never a value of a record.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from sluice.pipelines.util.units import join_first, sanitize, show_float

Args = Mapping[str, Any]

_DEMANDS = {
    "is": "should be",
    "is not": "should not be",
    "are": "should be",
    "has": "should have",
    "have": "should have",
    "matches": "should match",
    "does not match": "should not match",
    "exists": "should exist",
}
_MOST_SHOWN = 5
_MOST_TEXT = 60


class Sentence(NamedTuple):
    """A sentence in three parts: subject, verb, rest."""

    subject: str
    verb: str
    rest: str

    @property
    def text(self) -> str:
        return f"{self.subject} {self.verb} {self.rest}".rstrip()

    @property
    def demand(self) -> str:
        return f"{self.subject} {_DEMANDS[self.verb]} {self.rest}".rstrip()


def format_value(value: object) -> str:
    """A value of the contract, as people write it: short and on one line."""
    match value:
        case bool():
            return str(value).lower()
        case int():
            return f"{value:,}"
        case float():
            return f"{int(value):,}" if value.is_integer() and abs(value) < 1e15 else show_float(value)
        case str():
            return f'"{abbreviate(value)}"'
        case list() | tuple():
            return f"({', '.join(map(format_value, value))})"
    return abbreviate(str(value))


def abbreviate(text: str) -> str:
    clean = sanitize(text, _MOST_TEXT + 1)
    return clean if len(clean) <= _MOST_TEXT else clean[:_MOST_TEXT] + "…"


def format_values(values: Any) -> str:
    return join_first(map(format_value, values), _MOST_SHOWN)


def one_of(values: Any) -> str:
    return f"one of {format_values(values)}" if len(values) != 1 else format_value(values[0])


def _limit(args: Args, name: str) -> str:
    """Returns a bound's text. Times have no quotes; a bound by a window is described by its computation."""
    value = args[name]
    if isinstance(value, dict):
        window = next((w for w in args["windows"] or [] if w["parameter_name"] == value["$PARAMETER"]), None)
        if window is None:
            return "a window"
        sign, part = ("less", "negative") if name == "min_value" else ("plus", "positive")
        room = window["offset"][part]
        beyond = f" {sign} {room * 100:g}%" if room else ""
        return f"the {window['constraint_fn']} of the last {window['range']} batches{beyond}"
    return abbreviate(value) if isinstance(value, str) else format_value(value)


def describe_between(args: Args) -> str:
    low, high = args["min_value"], args["max_value"]
    strict_min, strict_max = args.get("strict_min"), args.get("strict_max")
    if low is not None and high is not None and not strict_min and not strict_max:
        return f"between {_limit(args, 'min_value')} and {_limit(args, 'max_value')}"
    limits = [f"{'more than' if strict_min else 'at least'} {_limit(args, 'min_value')}"] if low is not None else []
    limits += [f"{'less than' if strict_max else 'at most'} {_limit(args, 'max_value')}"] if high is not None else []
    return " and ".join(limits)


def describe_quantiles(args: Args) -> str:
    ranges = args["quantile_ranges"]
    parts = []
    for quantile, (low, high) in zip(ranges["quantiles"], ranges["value_ranges"], strict=True):
        limits = {"min_value": low, "max_value": high}
        parts.append(f"{quantile:g}: {describe_between(limits)}")
    return "; ".join(parts)


Words = str | Callable[[Args], str]
"""A part of a sentence: text in which `{column}` stands for that argument, or a function of all arguments."""


def fill(part: Words, args: Args) -> str:
    return part(args) if callable(part) else part.format_map(_Shortened(args))


class _Shortened(dict[str, Any]):
    """Arguments as they stand in a sentence: texts are short, and of a long list only some are named."""

    def __getitem__(self, name: str) -> str:
        value = super().__getitem__(name)
        return join_first(map(abbreviate, value), _MOST_SHOWN) if isinstance(value, list | tuple) else abbreviate(value)
