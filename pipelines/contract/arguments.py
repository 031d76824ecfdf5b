"""Checks the arguments of one expectation against the catalogue and the feed's columns, and names every problem.

Guarantee: an expectation that passes can be evaluated on every row that the feed can land, without an error. Light:
Arrow is loaded only to check regular expressions.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, NamedTuple

from sluice.pipelines.contract.catalogue import Kwarg, Rule, Takes
from sluice.pipelines.contract.literals import member, parse_bound
from sluice.pipelines.schema.schema import Kind, Type, TypeFamily
from sluice.pipelines.util.units import sanitize

MOST_VALUES = 10_000
MOST_COLUMNS = 32
MOST_REGEXES = 50
MOST_REGEX = 1000
MOST_WINDOWS = 8
MOST_RANGE = 1000
FUNCTIONS = ("mean", "median", "min", "max")
"""Values that a window can compute from earlier batches."""
DECIMALS = 38
"""The most digits of an exact sum."""

Types = Mapping[str, Type]


class Flaw(NamedTuple):
    """A problem with the argument `name` (empty: with several together), and its remedy."""

    name: str
    what: str
    remedy: str


class Wrong(ValueError):
    """Raised for a flaw of the argument that is being checked. Its name is added later."""

    def __init__(self, what: str, remedy: str = "") -> None:
        super().__init__(what)
        self.what, self.remedy = what, remedy


def flaws(rule: Rule, kwargs: Mapping[str, Any], types: Types) -> Iterator[Flaw]:
    """Everything that is wrong with the arguments. Their names are known; nulls were left out."""
    needed = [k for k in rule.kwargs.values() if k.required and k.name not in kwargs]
    missing = [Flaw(k.name, "is missing", f"it takes {k.takes}") for k in needed]
    flaws_found = [*missing, *_places(rule, kwargs, types)]
    yield from flaws_found or [*_each(rule, kwargs, types)] or [*_together(rule, kwargs, types)]


_PLACES = (Takes.COLUMN, Takes.COLUMNS)


def _places(rule: Rule, kwargs: Mapping[str, Any], types: Types) -> Iterator[Flaw]:
    """Flaws of the columns, which must be right before anything else can be checked."""
    for name, kwarg in rule.kwargs.items():
        if name in kwargs and kwarg.takes in _PLACES:
            try:
                for column in _names(kwargs[name], MOST_COLUMNS, 2) if kwarg.takes is Takes.COLUMNS else [kwargs[name]]:
                    _column(rule, column, types)
            except Wrong as wrong:
                yield Flaw(name, wrong.what, wrong.remedy)


def _column(rule: Rule, name: object, types: Types) -> None:
    if not isinstance(name, str):
        raise Wrong("should be a column's name")
    if name not in types:
        raise _unknown_column(name, types)
    if types[name].kind.family not in rule.families:
        families = ", ".join(f for f in TypeFamily if f in rule.families)
        raise Wrong(
            f"`{sanitize(name)}` is {types[name].kind}, which this expectation does not support",
            f"it is about {families}",
        )


def _unknown_column(name: str, types: Types) -> Wrong:
    top = re.split(r"[.\[{]", name)[0]
    if top != name and top in types:
        what = f"`{sanitize(name)}` is inside `{top}`: fields inside others have no expectations"
        return Wrong(what, f"`{top}` as a whole may be null or not; or make the field a column of its own")
    near = get_close_matches(name, types, n=1)
    hint = f"did you mean `{near[0]}`?" if near else f"columns: {', '.join([*types][:40])}"
    return Wrong(f"`{sanitize(name)}` is not a column of this feed", hint)


def _each(rule: Rule, kwargs: Mapping[str, Any], types: Types) -> Iterator[Flaw]:
    about = [types[kwargs[n]] for n, k in rule.kwargs.items() if k.takes is Takes.COLUMN and n in kwargs]
    for name, value in kwargs.items():
        kwarg = rule.kwargs[name]
        if kwarg.takes in _PLACES or ("windows" in rule.kwargs and _is_parameter(value)):
            continue
        try:
            _CHECKS[kwarg.takes](value, kwarg, about)
        except Wrong as wrong:
            yield Flaw(name, wrong.what, wrong.remedy)
        except ValueError as error:
            yield Flaw(name, str(error), "")


def _together(rule: Rule, kwargs: Mapping[str, Any], types: Types) -> Iterator[Flaw]:
    """Flaws that only several arguments have together."""
    checks = (_bounds, _parameters, _comparable, _summable)
    for check in checks:
        try:
            check(rule, kwargs, types)
        except Wrong as wrong:
            yield Flaw("", wrong.what, wrong.remedy)


def _bounds(rule: Rule, kwargs: Mapping[str, Any], types: Types) -> None:
    if not rule.needs_bounds:
        return
    low, high = kwargs.get("min_value"), kwargs.get("max_value")
    if low is None and high is None:
        raise Wrong("has neither min_value nor max_value", "give one, or both")
    if isinstance(low, dict) or isinstance(high, dict) or low is None or high is None:
        return
    t = types[kwargs["column"]] if rule.kwargs["min_value"].takes is Takes.BOUND else Type(Kind.DECIMAL)
    if parse_bound(t, low) > parse_bound(t, high):
        raise Wrong("has a min_value above its max_value", "no value is between them")


def _parameters(rule: Rule, kwargs: Mapping[str, Any], types: Types) -> None:
    """Every `$PARAMETER` comes from a window, and every window is used."""
    used = [value["$PARAMETER"] for value in kwargs.values() if _is_parameter(value)]
    defined = [w["parameter_name"] for w in kwargs.get("windows", [])]
    if any(name not in defined for name in used) or any(len(s) > 1 for s in kwargs.values() if _is_parameter(s)):
        raise Wrong("has a $PARAMETER that none of its windows gives", "write its value, or a window for it")
    if any(name not in used for name in defined) or len({*defined}) < len(defined):
        raise Wrong("has a window that nothing uses, or two for one parameter", 'write such as {"$PARAMETER": "low"}')


def _is_parameter(value: object) -> bool:
    return isinstance(value, dict) and "$PARAMETER" in value


def _comparable(rule: Rule, kwargs: Mapping[str, Any], types: Types) -> None:
    if rule.reason not in ("not_greater", "not_equal", "not_unique"):
        return
    names = kwargs.get("column_list") or [kwargs["column_A"], kwargs["column_B"]]
    kinds = {_measure(types[name]) for name in names}
    if len(kinds) > 1 and kinds != {"whole numbers", "decimals"} and kinds != {"whole numbers", "floats"}:
        raise Wrong(f"compares {' with '.join(sorted(kinds))}", "compare columns that are alike")
    if "decimals" in kinds and _digits([types[name] for name in names])[0] > DECIMALS:
        raise Wrong(
            f"compares decimals that together need more than {DECIMALS} digits", "compare columns that are alike"
        )


def _measure(t: Type) -> str:
    if t.kind.family is not TypeFamily.NUMBER:
        return str(t.kind.family)
    return {Kind.FLOAT32: "floats", Kind.FLOAT64: "floats", Kind.DECIMAL: "decimals"}.get(t.kind, "whole numbers")


def _summable(rule: Rule, kwargs: Mapping[str, Any], types: Types) -> None:
    if rule.reason != "wrong_sum":
        return
    added = [types[name] for name in kwargs["column_list"]]
    kinds = {_measure(t) for t in added}
    if kinds >= {"floats", "decimals"}:
        raise Wrong("adds floats to decimals", "add columns that are alike")
    if "floats" not in kinds and digits_of_sum(added)[0] > DECIMALS:
        raise Wrong("has a sum that can have too many digits", f"at most {DECIMALS}; fewer columns or smaller decimals")


def digits_of_sum(types: Sequence[Type]) -> tuple[int, int]:
    """How many digits the sum of such columns can have: in all, and after the point."""
    digits, scale = _digits(types)
    return digits + len(types) - 1, scale


def _digits(types: Sequence[Type]) -> tuple[int, int]:
    """How many digits hold a value of each type: in all, and after the point. Whole numbers count as 64 bits wide."""
    scale = max(t.scale for t in types)
    integral = [t.precision - t.scale if t.kind is Kind.DECIMAL else 20 if t.kind is Kind.UINT64 else 19 for t in types]
    return max(integral) + scale, scale


# -- what each kind of argument may be


def _truth(value: Any, kwarg: Kwarg, about: list[Type]) -> None:
    if not isinstance(value, bool):
        raise Wrong("should be true or false")


def _check_bound(value: Any, kwarg: Kwarg, about: list[Type]) -> None:
    parse_bound(about[0], value)


def _number(value: Any, kwarg: Kwarg, about: list[Type]) -> None:
    parse_bound(Type(Kind.FLOAT64), value)


def _count(value: Any, kwarg: Kwarg, about: list[Type]) -> None:
    try:
        member(Type(Kind.UINT32), value)
    except ValueError:
        raise Wrong("should be a whole number from 0 on") from None


def _share(value: Any, kwarg: Kwarg, about: list[Type]) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise Wrong("should be a number from 0 to 1")


def _list(value: Any, maximum: int, minimum: int = 1) -> list[Any]:
    if not isinstance(value, list) or not minimum <= len(value) <= maximum:
        raise Wrong(f"should be a list of {minimum} to {maximum:,}")
    return value


def _names(value: Any, maximum: int, minimum: int = 1) -> list[str]:
    names = _list(value, maximum, minimum)
    if not all(isinstance(name, str) for name in names) or len({*names}) < len(names):
        raise Wrong("should be a list of columns, each once")
    return names


def _all_names(value: Any, kwarg: Kwarg, about: list[Type]) -> None:
    _names(value, MOST_VALUES)


def _values(items: Any, kwarg: Kwarg, about: list[Type]) -> None:
    for i, value in enumerate(_list(items, MOST_VALUES)):
        _member(about[0], value, f"[{i}]")


def _pairs(items: Any, kwarg: Kwarg, about: list[Type]) -> None:
    for i, pair in enumerate(_list(items, MOST_VALUES)):
        if not isinstance(pair, list) or len(pair) != 2:
            raise Wrong(f"[{i}] should be a list of two values")
        for k, value in enumerate(pair):
            if value is not None:
                _member(about[k], value, f"[{i}][{k}]")


def _member(t: Type, value: object, path: str) -> None:
    try:
        member(t, value)
    except ValueError as error:
        remedy = "nulls are not checked: leave it out" if value is None else f"the column is {t}"
        raise Wrong(f"{path} {error}", remedy) from None


def _choice(value: Any, kwarg: Kwarg, about: list[Type]) -> None:
    if value not in kwarg.choices:
        raise Wrong("is none of its words", f"choose {', '.join(kwarg.choices)}")


def _regexes(value: Any, kwarg: Kwarg, about: list[Type]) -> None:
    for i, pattern in enumerate(_list(value, MOST_REGEXES)):
        try:
            _regex(pattern, kwarg, about)
        except Wrong as wrong:
            raise Wrong(f"[{i}] {wrong.what}", wrong.remedy) from None


_BOTH = (
    "patterns are what Python's re and RE2 have in common: no look-around, no back-references (`sluice docs contracts`)"
)


_TOKEN = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\{(?P<counts>\d*,\d*|\d+)\}", re.DOTALL | re.ASCII)
"""An escaped character, a set, or a repetition as Python reads it."""
_COUNTS = re.compile(r"(0|[1-9]\d*)(,(0|[1-9]\d*)?)?", re.ASCII)
"""Counts of a repetition that RE2 does not read as text."""


def _regex(value: Any, kwarg: Kwarg, about: list[Type]) -> None:
    if not isinstance(value, str) or len(value) > MOST_REGEX:
        raise Wrong(f"should be a regular expression of at most {MOST_REGEX} characters")
    if "\0" in value:
        raise Wrong("has a zero byte", r"write \x00")
    for token in _TOKEN.finditer(value):
        counts = token["counts"]
        if counts and not _COUNTS.fullmatch(counts):
            low, comma, high = counts.partition(",")
            written = f"{int(low or 0)}{comma}{int(high) if high else ''}"
            raise Wrong(f"has {token[0]} at position {token.start() + 1}", f"write {{{written}}}")
    _of_python(value)
    _of_re2(value)


def _of_python(pattern: str) -> None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # what Python warns of means another thing to RE2: sets inside sets
            re.compile(pattern)
    except re.error as error:
        at = f" at position {error.pos + 1}" if error.pos is not None else ""
        raise Wrong(f"is not a regular expression{at}: {sanitize(error.msg)}", _BOTH) from None
    except (Warning, RecursionError, OverflowError, MemoryError):
        raise Wrong("is not a regular expression with one meaning", _BOTH) from None


def _of_re2(pattern: str) -> None:
    import pyarrow as pa
    import pyarrow.compute as pc

    from sluice.pipelines.schema.arrays import text_array

    try:
        pc.match_substring_regex(text_array([""]), pattern)
    except pa.ArrowInvalid as error:
        why = str(error).removeprefix("Invalid regular expression: ")
        part = why.partition(": ")[2]
        at = f" at position {pattern.index(part) + 1}" if part and part in pattern else ""
        raise Wrong(f"is not taken by RE2{at}: {sanitize(why)}", _BOTH) from None


def _quantiles(value: Any, kwarg: Kwarg, about: list[Type]) -> None:
    what = 'should be such as {"quantiles": [0.5, 0.99], "value_ranges": [[1, 10], [null, 100]]}'
    if not isinstance(value, dict) or {*value} != {"quantiles", "value_ranges"}:
        raise Wrong(what)
    quantiles, ranges = _list(value["quantiles"], 100), _list(value["value_ranges"], 100)
    for quantile in quantiles:
        _share(quantile, kwarg, about)
    if len(ranges) != len(quantiles) or quantiles != sorted(quantiles) or not all(map(_is_range, ranges)):
        raise Wrong(what, "as many ranges as quantiles, quantiles in order, each range from low to high")


def _is_range(value: Any) -> bool:
    if not isinstance(value, list) or len(value) != 2:
        return False
    numbers = [parse_bound(Type(Kind.FLOAT64), v) for v in value if v is not None]
    return bool(numbers) and numbers == sorted(numbers)


def _windows(value: Any, kwarg: Kwarg, about: list[Type]) -> None:
    for i, window in enumerate(_list(value, MOST_WINDOWS)):
        if not _is_window(window):
            what = f"[{i}] is not a window"
            raise Wrong(
                what, f"write such as {WINDOW}; constraint_fn: {', '.join(FUNCTIONS)}; range: 1 to {MOST_RANGE}"
            )


WINDOW = (
    '{"constraint_fn": "mean", "parameter_name": "low", "range": 10, "offset": {"positive": 0, "negative": 0.5}, '
    '"strict": false}'
)
_WINDOW: Mapping[str, Callable[[Any], bool]] = {
    "constraint_fn": lambda v: v in FUNCTIONS,
    "parameter_name": lambda v: isinstance(v, str) and 0 < len(v) <= 100,
    "range": lambda v: isinstance(v, int) and not isinstance(v, bool) and 1 <= v <= MOST_RANGE,
    "offset": lambda v: isinstance(v, dict) and {*v} == {"positive", "negative"} and all(map(_is_size, v.values())),
    "strict": lambda v: isinstance(v, bool),
}


def _is_size(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < float("inf")


def _is_window(value: Any) -> bool:
    if not isinstance(value, dict) or not {*_WINDOW} - {"strict"} <= {*value} <= {*_WINDOW}:
        return False
    return all(_WINDOW[k](v) for k, v in value.items())


_CHECKS: Mapping[Takes, Callable[[Any, Kwarg, list[Type]], None]] = {
    Takes.NAMES: _all_names,
    Takes.TRUTH: _truth,
    Takes.BOUND: _check_bound,
    Takes.COUNT: _count,
    Takes.NUMBER: _number,
    Takes.SHARE: _share,
    Takes.VALUES: _values,
    Takes.PAIRS: _pairs,
    Takes.REGEX: _regex,
    Takes.REGEXES: _regexes,
    Takes.CHOICE: _choice,
    Takes.QUANTILES: _quantiles,
    Takes.WINDOWS: _windows,
}
