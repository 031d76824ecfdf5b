"""Puts each expectation into words: its rule, and its demand on a row that breaks it.

Sentences hold values of the contract only, never a value of a record.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

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


def sentence(type_: str, args: Args) -> Sentence:
    """The sentence for a type of expectation. `args` holds all its arguments, with defaults."""
    return _SENTENCES[type_](args)


def format_value(value: object) -> str:
    """A value of the contract, as people write it: short and on one line."""
    match value:
        case bool():
            return str(value).lower()
        case int():
            return f"{value:,}"
        case float():
            return f"{int(value):,}" if value.is_integer() and abs(value) < 1e15 else f"{value:,}"
        case str():
            return f'"{_short(value)}"'
        case list() | tuple():
            return f"({', '.join(map(format_value, value))})"
    return _short(str(value))


def _short(text: str) -> str:
    clean = "".join(c if c.isprintable() else "�" for c in text[: _MOST_TEXT + 1])
    return clean if len(clean) <= _MOST_TEXT else clean[:_MOST_TEXT] + "…"


def _format_values(values: Any) -> str:
    rest = len(values) - _MOST_SHOWN
    return ", ".join(map(format_value, values[:_MOST_SHOWN])) + (f" and {rest:,} more" if rest > 0 else "")


def _one_of(values: Any) -> str:
    return f"one of {_format_values(values)}" if len(values) != 1 else format_value(values[0])


def _names(values: Any) -> str:
    return ", ".join(values[:_MOST_SHOWN]) + (f" and {len(values) - _MOST_SHOWN:,} more" if values[5:] else "")


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
    return _short(value) if isinstance(value, str) else format_value(value)


def _describe_between(args: Args) -> str:
    low, high = args["min_value"], args["max_value"]
    strict_min, strict_max = args.get("strict_min"), args.get("strict_max")
    if low is not None and high is not None and not strict_min and not strict_max:
        return f"between {_limit(args, 'min_value')} and {_limit(args, 'max_value')}"
    limits = [f"{'more than' if strict_min else 'at least'} {_limit(args, 'min_value')}"] if low is not None else []
    limits += [f"{'less than' if strict_max else 'at most'} {_limit(args, 'max_value')}"] if high is not None else []
    return " and ".join(limits)


def _quantiles(args: Args) -> str:
    ranges = args["quantile_ranges"]
    parts = []
    for quantile, (low, high) in zip(ranges["quantiles"], ranges["value_ranges"], strict=True):
        limits = {"min_value": low, "max_value": high}
        parts.append(f"{quantile:g}: {_describe_between(limits)}")
    return "; ".join(parts)


def _about(subject: str, verb: str, rest: Callable[[Args], str]) -> Callable[[Args], Sentence]:
    """A sentence whose subject names the expectation's own column."""
    return lambda args: Sentence(subject.format_map(_Shorts(args)), verb, rest(args))


class _Shorts(dict[str, Any]):
    def __init__(self, args: Args) -> None:
        super().__init__({k: _short(v) if isinstance(v, str) else v for k, v in args.items()})


def _constant(text: str) -> Callable[[Args], str]:
    return lambda args: text


_SENTENCES: Mapping[str, Callable[[Args], Sentence]] = {
    "expect_column_values_to_not_be_null": _about("{column}", "is not", _constant("null")),
    "expect_column_values_to_be_null": _about("{column}", "is", _constant("null")),
    "expect_column_values_to_be_in_set": _about("{column}", "is", lambda a: _one_of(a["value_set"])),
    "expect_column_values_to_not_be_in_set": _about("{column}", "is not", lambda a: _one_of(a["value_set"])),
    "expect_column_values_to_be_between": _about("{column}", "is", _describe_between),
    "expect_column_value_lengths_to_be_between": _about("the length of {column}", "is", _describe_between),
    "expect_column_value_lengths_to_equal": _about("the length of {column}", "is", lambda a: format_value(a["value"])),
    "expect_column_values_to_match_regex": _about("{column}", "matches", lambda a: _short(a["regex"])),
    "expect_column_values_to_not_match_regex": _about("{column}", "does not match", lambda a: _short(a["regex"])),
    "expect_column_values_to_match_regex_list": _about(
        "{column}", "matches", lambda a: f"{a['match_on']} of {_names([_short(r) for r in a['regex_list']])}"
    ),
    "expect_column_values_to_not_match_regex_list": _about(
        "{column}", "does not match", lambda a: f"any of {_names([_short(r) for r in a['regex_list']])}"
    ),
    "expect_column_pair_values_a_to_be_greater_than_b": _about(
        "{column_A}", "is", lambda a: f"{'at least' if a['or_equal'] else 'more than'} {_short(a['column_B'])}"
    ),
    "expect_column_pair_values_to_be_equal": _about("{column_A}", "is", lambda a: f"equal to {_short(a['column_B'])}"),
    "expect_column_pair_values_to_be_in_set": _about(
        "({column_A}, {column_B})", "is", lambda a: _one_of(a["value_pairs_set"])
    ),
    "expect_select_column_values_to_be_unique_within_record": lambda a: Sentence(
        _names(a["column_list"]), "are", "all different in a row"
    ),
    "expect_multicolumn_sum_to_equal": lambda a: Sentence(
        f"the sum of {_names(a['column_list'])}", "is", format_value(a["sum_total"])
    ),
    "expect_table_row_count_to_be_between": _about("the number of rows", "is", _describe_between),
    "expect_table_row_count_to_equal": _about("the number of rows", "is", lambda a: format_value(a["value"])),
    "expect_table_columns_to_match_set": lambda a: Sentence(
        "the columns", "are" if a["exact_match"] else "have", f"{_names(a['column_set'])}, in any order"
    ),
    "expect_table_columns_to_match_ordered_list": lambda a: Sentence(
        "the columns", "are", f"{_names(a['column_list'])}, in this order"
    ),
    "expect_table_column_count_to_be_between": _about("the number of columns", "is", _describe_between),
    "expect_table_column_count_to_equal": _about("the number of columns", "is", lambda a: format_value(a["value"])),
    "expect_column_to_exist": _about(
        "{column}", "exists", lambda a: "" if a["column_index"] is None else f"at place {a['column_index']}"
    ),
    "expect_column_values_to_be_unique": _about("{column}", "is", _constant("unique")),
    "expect_compound_columns_to_be_unique": lambda a: Sentence(_names(a["column_list"]), "are", "unique together"),
    "expect_column_unique_value_count_to_be_between": _about(
        "the number of distinct {column}", "is", _describe_between
    ),
    "expect_column_proportion_of_unique_values_to_be_between": _about(
        "the share of distinct {column}", "is", _describe_between
    ),
    "expect_column_proportion_of_non_null_values_to_be_between": _about(
        "the share of {column} that is not null", "is", _describe_between
    ),
    "expect_column_min_to_be_between": _about("the smallest {column}", "is", _describe_between),
    "expect_column_max_to_be_between": _about("the largest {column}", "is", _describe_between),
    "expect_column_mean_to_be_between": _about("the mean of {column}", "is", _describe_between),
    "expect_column_median_to_be_between": _about("the median of {column}", "is", _describe_between),
    "expect_column_sum_to_be_between": _about("the sum of {column}", "is", _describe_between),
    "expect_column_stdev_to_be_between": _about("the standard deviation of {column}", "is", _describe_between),
    "expect_column_quantile_values_to_be_between": _about("the quantiles of {column}", "are", _quantiles),
    "expect_column_distinct_values_to_be_in_set": _about(
        "{column}", "has", lambda a: f"only {_format_values(a['value_set'])}"
    ),
    "expect_column_distinct_values_to_equal_set": _about(
        "{column}", "has", lambda a: f"each of, and only, {_format_values(a['value_set'])}"
    ),
    "expect_column_distinct_values_to_contain_set": _about(
        "{column}", "has", lambda a: f"each of {_format_values(a['value_set'])}"
    ),
    "expect_column_most_common_value_to_be_in_set": _about(
        "the most common {column}", "is", lambda a: _one_of(a["value_set"])
    ),
}
