"""The rules that a contract can have: expectations of Great Expectations' core. A rule stands here, in one place.

`RULES` is the table: names, arguments, columns, words, and DuckDB's functions of simple aggregates. `suite` reads files
by it. Two tables by the same names have the functions that test rows: `records.contract_rows.row_checks` over Arrow in
tasks, and `validation.batch_expectations` over a whole batch on the driver. docs/contracts.md lists all. This module is
light: it loads neither Arrow nor Great Expectations.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from sluice.pipelines.contract.expectation import Contract, Expectation, Severity
from sluice.pipelines.contract.sentences import (
    Args,
    Sentence,
    Words,
    abbreviate,
    describe_between,
    describe_quantiles,
    fill,
    format_value,
    format_values,
    one_of,
)
from sluice.pipelines.model.receipts import EXAMPLES
from sluice.pipelines.schema.schema import EXTRA, KAFKA, Field, Kind, Schema, Type, TypeFamily
from sluice.pipelines.util.documents import Derived, Internal
from sluice.pipelines.util.grouping import group_by

if TYPE_CHECKING:
    from sluice.pipelines.contract.expectation import Expectation
    from sluice.pipelines.model.receipts import Receipt


class Scope(StrEnum):
    """The unit that breaks an expectation: a single row, or a batch as a whole."""

    ROW = "row"
    WHOLE = "batch"


class Issue(StrEnum):
    """The subject of an expectation: Great Expectations' `DataQualityIssues`. Checks are grouped by it."""

    COMPLETENESS = "Completeness"
    VALIDITY = "Validity"
    UNIQUENESS = "Uniqueness"
    NUMERIC = "Numeric"
    VOLUME = "Volume"
    SCHEMA = "Schema"


class Takes(StrEnum):
    """The kind of value that an argument takes. `arguments` checks files against it."""

    COLUMN = "a column"
    COLUMNS = "a list of columns"
    NAMES = "a list of names"
    TRUTH = "true or false"
    BOUND = "a value of the column"
    COUNT = "a whole number from 0 on"
    NUMBER = "a number"
    SHARE = "a number from 0 to 1"
    VALUES = "a list of values of the column"
    PAIRS = "a list of pairs of values of the columns"
    REGEX = "a regular expression"
    REGEXES = "a list of regular expressions"
    CHOICE = "one of a few words"
    QUANTILES = "quantiles and their ranges"
    WINDOWS = "a list of windows"


@dataclass(frozen=True, slots=True)
class Kwarg:
    """One argument of an expectation. `default` applies where it is absent; `choices` are the words of a CHOICE."""

    name: str
    takes: Takes
    required: bool = False
    default: Any = None
    choices: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Rule:
    """One type of expectation, under its name in Great Expectations.

    `families` are the kinds of columns that it can be about. `reason` is the word that rows get in quarantine; empty
    for rules about whole batches. `aggregate` is DuckDB's function of the value that has bounds. `words` are subject,
    verb and rest of its sentence.
    """

    type: str
    scope: Scope
    issue: Issue
    families: frozenset[TypeFamily]
    kwargs: Mapping[str, Kwarg] = field(hash=False)
    reason: str = ""
    aggregate: str = ""
    words: tuple[Words, Words, Words] = ("", "", "")

    @property
    def needs_bounds(self) -> bool:
        """Returns whether it needs `min_value`, `max_value` or both."""
        return "min_value" in self.kwargs

    def reads(self, subject: Words, verb: Words, rest: Words) -> Rule:
        """Returns the rule with these words."""
        return replace(self, words=(subject, verb, rest))


_ORDERED = frozenset({TypeFamily.NUMBER, TypeFamily.TIME, TypeFamily.DAY})
_SIMPLE = _ORDERED | {TypeFamily.TEXT, TypeFamily.TRUTH}
_FLAT = _SIMPLE | {TypeFamily.BYTES}
_ANY = frozenset(TypeFamily)
_TEXT = frozenset({TypeFamily.TEXT})
_NUMBER = frozenset({TypeFamily.NUMBER})

_COLUMN = Kwarg("column", Takes.COLUMN, required=True)
_MOSTLY = Kwarg("mostly", Takes.SHARE, default=1)
_SET = Kwarg("value_set", Takes.VALUES, required=True)
_PAIR = (Kwarg("column_A", Takes.COLUMN, required=True), Kwarg("column_B", Takes.COLUMN, required=True))
_PAIR_NULLS = Kwarg(
    "ignore_row_if",
    Takes.CHOICE,
    default="both_values_are_missing",
    choices=("both_values_are_missing", "either_value_is_missing", "neither"),
)
_COLUMNS = Kwarg("column_list", Takes.COLUMNS, required=True)
_NULLS = Kwarg(
    "ignore_row_if",
    Takes.CHOICE,
    default="all_values_are_missing",
    choices=("all_values_are_missing", "any_value_is_missing", "never"),
)
_COUNT = Kwarg("value", Takes.COUNT, required=True)
_MATCH_ON = Kwarg("match_on", Takes.CHOICE, default="any", choices=("any", "all"))
_OR_EQUAL = Kwarg("or_equal", Takes.TRUTH, default=False)
_PAIRS = Kwarg("value_pairs_set", Takes.PAIRS, required=True)
_TOTAL = Kwarg("sum_total", Takes.NUMBER, required=True)
_REGEX = Kwarg("regex", Takes.REGEX, required=True)
_REGEXES = Kwarg("regex_list", Takes.REGEXES, required=True)
_STRICT = (Kwarg("strict_min", Takes.TRUTH, default=False), Kwarg("strict_max", Takes.TRUTH, default=False))
_WINDOWS = Kwarg("windows", Takes.WINDOWS)


def _bounds(takes: Takes) -> tuple[Kwarg, ...]:
    return Kwarg("min_value", takes), Kwarg("max_value", takes), *_STRICT


def _row(type_: str, issue: Issue, reason: str, families: frozenset[TypeFamily], *kwargs: Kwarg) -> Rule:
    return Rule(type_, Scope.ROW, issue, families, {k.name: k for k in (*kwargs, _MOSTLY)}, reason)


def _whole(type_: str, issue: Issue, families: frozenset[TypeFamily], *kwargs: Kwarg, aggregate: str = "") -> Rule:
    return Rule(type_, Scope.WHOLE, issue, families, {k.name: k for k in kwargs}, aggregate=aggregate)


def _value(value: str, families: frozenset[TypeFamily], takes: Takes, subject: str, aggregate: str = "") -> Rule:
    """Returns the rule about bounds of a number or value that all rows of a column have together."""
    kwargs, issue = (_COLUMN, *_bounds(takes)), _ISSUES.get(value, Issue.NUMERIC)
    rule = _whole(f"expect_column_{value}_to_be_between", issue, families, *kwargs, aggregate=aggregate)
    return rule.reads(subject, "is", describe_between)


_ISSUES = {
    "unique_value_count": Issue.UNIQUENESS,
    "proportion_of_unique_values": Issue.UNIQUENESS,
    "proportion_of_non_null_values": Issue.COMPLETENESS,
}


def _describe_member(args: Args) -> str:
    return one_of(args["value_set"])


def _describe_count(args: Args) -> str:
    return format_value(args["value"])


def _describe_set(args: Args) -> str:
    return format_values(args["value_set"])


_ALL = (
    _row("expect_column_values_to_not_be_null", Issue.COMPLETENESS, "is_null", _ANY, _COLUMN).reads(
        "{column}", "is not", "null"
    ),
    _row("expect_column_values_to_be_null", Issue.COMPLETENESS, "not_null", _ANY, _COLUMN).reads(
        "{column}", "is", "null"
    ),
    _row("expect_column_values_to_be_in_set", Issue.VALIDITY, "not_in_set", _SIMPLE, _COLUMN, _SET).reads(
        "{column}", "is", _describe_member
    ),
    _row("expect_column_values_to_not_be_in_set", Issue.VALIDITY, "in_set", _SIMPLE, _COLUMN, _SET).reads(
        "{column}", "is not", _describe_member
    ),
    _row(
        "expect_column_values_to_be_between", Issue.NUMERIC, "out_of_bounds", _ORDERED, _COLUMN, *_bounds(Takes.BOUND)
    ).reads("{column}", "is", describe_between),
    _row(
        "expect_column_value_lengths_to_be_between",
        Issue.VALIDITY,
        "wrong_length",
        _TEXT,
        _COLUMN,
        *_bounds(Takes.COUNT),
    ).reads("the length of {column}", "is", describe_between),
    _row("expect_column_value_lengths_to_equal", Issue.VALIDITY, "wrong_length", _TEXT, _COLUMN, _COUNT).reads(
        "the length of {column}", "is", _describe_count
    ),
    _row("expect_column_values_to_match_regex", Issue.VALIDITY, "no_match", _TEXT, _COLUMN, _REGEX).reads(
        "{column}", "matches", "{regex}"
    ),
    _row("expect_column_values_to_not_match_regex", Issue.VALIDITY, "matches", _TEXT, _COLUMN, _REGEX).reads(
        "{column}", "does not match", "{regex}"
    ),
    _row(
        "expect_column_values_to_match_regex_list", Issue.VALIDITY, "no_match", _TEXT, _COLUMN, _REGEXES, _MATCH_ON
    ).reads("{column}", "matches", "{match_on} of {regex_list}"),
    _row("expect_column_values_to_not_match_regex_list", Issue.VALIDITY, "matches", _TEXT, _COLUMN, _REGEXES).reads(
        "{column}", "does not match", "any of {regex_list}"
    ),
    _row(
        "expect_column_pair_values_a_to_be_greater_than_b",
        Issue.NUMERIC,
        "not_greater",
        _ORDERED,
        *_PAIR,
        _OR_EQUAL,
        _PAIR_NULLS,
    ).reads(
        "{column_A}", "is", lambda a: f"{'at least' if a['or_equal'] else 'more than'} {abbreviate(a['column_B'])}"
    ),
    _row("expect_column_pair_values_to_be_equal", Issue.VALIDITY, "not_equal", _SIMPLE, *_PAIR, _PAIR_NULLS).reads(
        "{column_A}", "is", "equal to {column_B}"
    ),
    _row(
        "expect_column_pair_values_to_be_in_set", Issue.VALIDITY, "not_in_set", _SIMPLE, *_PAIR, _PAIRS, _PAIR_NULLS
    ).reads("({column_A}, {column_B})", "is", lambda a: one_of(a["value_pairs_set"])),
    _row(
        "expect_select_column_values_to_be_unique_within_record",
        Issue.UNIQUENESS,
        "not_unique",
        _SIMPLE,
        _COLUMNS,
        _NULLS,
    ).reads("{column_list}", "are", "all different in a row"),
    _row("expect_multicolumn_sum_to_equal", Issue.NUMERIC, "wrong_sum", _NUMBER, _COLUMNS, _TOTAL, _NULLS).reads(
        "the sum of {column_list}", "is", lambda a: format_value(a["sum_total"])
    ),
    _whole("expect_table_row_count_to_be_between", Issue.VOLUME, _ANY, *_bounds(Takes.COUNT), _WINDOWS).reads(
        "the number of rows", "is", describe_between
    ),
    _whole("expect_table_row_count_to_equal", Issue.VOLUME, _ANY, _COUNT).reads(
        "the number of rows", "is", _describe_count
    ),
    _whole(
        "expect_table_columns_to_match_set",
        Issue.SCHEMA,
        _ANY,
        Kwarg("column_set", Takes.NAMES, required=True),
        Kwarg("exact_match", Takes.TRUTH, default=True),
    ).reads("the columns", lambda a: "are" if a["exact_match"] else "have", "{column_set}, in any order"),
    _whole(
        "expect_table_columns_to_match_ordered_list",
        Issue.SCHEMA,
        _ANY,
        Kwarg("column_list", Takes.NAMES, required=True),
    ).reads("the columns", "are", "{column_list}, in this order"),
    _whole("expect_table_column_count_to_be_between", Issue.SCHEMA, _ANY, *_bounds(Takes.COUNT)[:2]).reads(
        "the number of columns", "is", describe_between
    ),
    _whole("expect_table_column_count_to_equal", Issue.SCHEMA, _ANY, _COUNT).reads(
        "the number of columns", "is", _describe_count
    ),
    _whole("expect_column_to_exist", Issue.SCHEMA, _ANY, _COLUMN, Kwarg("column_index", Takes.COUNT)).reads(
        "{column}", "exists", lambda a: "" if a["column_index"] is None else f"at place {a['column_index']}"
    ),
    _whole("expect_column_values_to_be_unique", Issue.UNIQUENESS, _FLAT, _COLUMN, _MOSTLY).reads(
        "{column}", "is", "unique"
    ),
    _whole("expect_compound_columns_to_be_unique", Issue.UNIQUENESS, _FLAT, _COLUMNS, _NULLS, _MOSTLY).reads(
        "{column_list}", "are", "unique together"
    ),
    _value("unique_value_count", _FLAT, Takes.COUNT, "the number of distinct {column}"),
    _value("proportion_of_unique_values", _FLAT, Takes.SHARE, "the share of distinct {column}"),
    _value("proportion_of_non_null_values", _ANY, Takes.SHARE, "the share of {column} that is not null", "count"),
    _value("min", _ORDERED, Takes.BOUND, "the smallest {column}", "min"),
    _value("max", _ORDERED, Takes.BOUND, "the largest {column}", "max"),
    _value("mean", _NUMBER, Takes.NUMBER, "the mean of {column}", "avg"),
    _value("median", _NUMBER, Takes.NUMBER, "the median of {column}"),
    _value("sum", _NUMBER, Takes.NUMBER, "the sum of {column}", "sum"),
    _value("stdev", _NUMBER, Takes.NUMBER, "the standard deviation of {column}", "stddev_samp"),
    _whole(
        "expect_column_quantile_values_to_be_between",
        Issue.NUMERIC,
        _NUMBER,
        _COLUMN,
        Kwarg("quantile_ranges", Takes.QUANTILES, required=True),
        Kwarg("allow_relative_error", Takes.TRUTH, default=False),
    ).reads("the quantiles of {column}", "are", describe_quantiles),
    _whole("expect_column_distinct_values_to_be_in_set", Issue.UNIQUENESS, _SIMPLE, _COLUMN, _SET).reads(
        "{column}", "has", lambda a: f"only {_describe_set(a)}"
    ),
    _whole("expect_column_distinct_values_to_equal_set", Issue.UNIQUENESS, _SIMPLE, _COLUMN, _SET).reads(
        "{column}", "has", lambda a: f"each of, and only, {_describe_set(a)}"
    ),
    _whole("expect_column_distinct_values_to_contain_set", Issue.UNIQUENESS, _SIMPLE, _COLUMN, _SET).reads(
        "{column}", "has", lambda a: f"each of {_describe_set(a)}"
    ),
    _whole(
        "expect_column_most_common_value_to_be_in_set",
        Issue.VALIDITY,
        _SIMPLE,
        _COLUMN,
        _SET,
        Kwarg("ties_okay", Takes.TRUTH, default=False),
    ).reads("the most common {column}", "is", _describe_member),
)
RULES: Mapping[str, Rule] = {r.type: r for r in _ALL}
"""Every supported rule by its type."""


def rule_of(expectation: Expectation) -> Rule:
    """Returns the rule of an expectation."""
    return RULES[expectation.type]


def get_argument(expectation: Expectation, name: str) -> Any:
    """An argument's value in the suite, or its default."""
    value = expectation.kwargs.get(name)
    return rule_of(expectation).kwargs[name].default if value is None else value


def text(expectation: Expectation) -> str:
    """Returns the expectation in words: "amount is between 0 and 10,000"."""
    rendered, share = _make_sentence(expectation).text, expectation.kwargs.get("mostly")
    return rendered if share in (None, 1) else f"{rendered}, in at least {share * 100:g}% of rows"


def demand(expectation: Expectation) -> str:
    """Returns the demand on a row that breaks the expectation: "amount should be between 0 and 10,000"."""
    return _make_sentence(expectation).demand


def _make_sentence(expectation: Expectation) -> Sentence:
    rule = rule_of(expectation)
    args = {name: get_argument(expectation, name) for name in rule.kwargs}
    return Sentence(*(fill(part, args) for part in rule.words))


def columns(expectation: Expectation) -> tuple[str, ...]:
    """The columns that the expectation is about; none if it is about the table as a whole."""
    names: list[str] = []
    for kwarg in rule_of(expectation).kwargs.values():
        if kwarg.takes is Takes.COLUMN:
            names.append(expectation.kwargs[kwarg.name])
        elif kwarg.takes is Takes.COLUMNS:
            names += expectation.kwargs[kwarg.name]
    return tuple(names)


_OF_KAFKA = {
    "key": Type(Kind.BINARY),
    "topic": Type(Kind.STRING),
    "partition": Type(Kind.INT32),
    "offset": Type(Kind.INT64),
    "timestamp": Type(Kind.TIMESTAMP, unit="ms"),
    "timestampType": Type(Kind.INT32),
    "headers": Type(Kind.LIST, fields=(Field("", Type(Kind.BINARY)),)),
}


def column_types(schema: Schema | None) -> dict[str, Type]:
    """Every column of landed rows with its type, in order. `schema` None means a raw feed."""
    if schema is None:
        value = {"key": _OF_KAFKA["key"], "value": Type(Kind.BINARY)}
        return value | _OF_KAFKA
    typed = {f.name: f.type for f in schema.fields} | {EXTRA: Type(Kind.JSON)}
    kafka = {KAFKA + name: t for name, t in _OF_KAFKA.items()}
    return typed | kafka | {f"{KAFKA}tombstone": Type(Kind.BOOL)}


@dataclass(frozen=True, slots=True)
class Result:
    """The result of one expectation for a batch as a whole, by its position in the contract.

    `observed` is the value that was compared, as text; empty if there was none. Where the expectation is about rows,
    `unexpected` of `checked` rows broke it, and `first` names some of these as `topic:partition:offset`.
    """

    expectation: int
    passed: bool
    observed: str = ""
    checked: int = 0
    unexpected: int = 0
    first: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ExpectationOutcome:
    """The outcome of one expectation for a batch or a window. The other fields are those of `Result`."""

    expectation: Internal[Expectation]
    passed: bool
    observed: str = ""
    checked: int = 0
    unexpected: int = 0
    first: tuple[str, ...] = ()

    @property
    def place(self) -> Derived[int]:
        return self.expectation.place

    @property
    def type(self) -> Derived[str]:
        return self.expectation.type

    @property
    def text(self) -> Derived[str]:
        return text(self.expectation)

    @property
    def severity(self) -> Derived[Severity]:
        return self.expectation.severity

    @property
    def share(self) -> Derived[float]:
        """The share of checked rows that broke it, from 0 to 1."""
        return self.unexpected / self.checked if self.checked else 0.0

    @property
    def quarantines(self) -> bool:
        """Returns whether rows that break it go into quarantine one by one, so that it never holds a batch back."""
        return self.severity is Severity.CRITICAL and by_row(self.expectation)

    @property
    def refuses(self) -> bool:
        """Returns whether a batch with this outcome must not be published."""
        return not self.passed and self.severity is Severity.CRITICAL and not self.quarantines


def by_row(e: Expectation) -> bool:
    """Returns whether each row meets it or breaks it alone, and no row may break it."""
    return rule_of(e).scope is Scope.ROW and get_argument(e, "mostly") == 1


def enough(checked: int, unexpected: int, mostly: float) -> bool:
    """Great Expectations' rule for `mostly`: zero rows are enough, and shares are compared as floats, unrounded."""
    return not checked or (checked - unexpected) / checked >= mostly


def contract_results(
    contract: Contract, receipts: Iterable[Receipt], results: Iterable[Result] = ()
) -> list[ExpectationOutcome]:
    """The outcome of each expectation, in the contract's order, over one batch or several.

    Only receipts whose rows were checked against this contract count. `results` come from these receipts' publish
    entries, the oldest first. Of several batches each must pass; the observed value is that of the newest failed one,
    or else of the newest. An expectation about whole batches without any result is left out.
    """
    condition = f"contract {contract.hash}"
    mine = [r for r in receipts if condition in r.format]
    by_place = group_by(results, lambda result: result.expectation)
    outcomes = []
    for e in contract.expectations:
        if rule_of(e).scope is Scope.ROW:
            outcomes.append(_of_rows(e, mine))
        elif e.place in by_place:
            outcomes.append(_of_batches(e, by_place[e.place]))
    return outcomes


def _of_rows(e: Expectation, receipts: Sequence[Receipt]) -> ExpectationOutcome:
    tallies = [(r, t) for r in receipts for t in r.tallies if t.expectation == e.place]
    checked, unexpected = sum(t.checked for _, t in tallies), sum(t.unexpected for _, t in tallies)
    first = (f"{r.offset_range.tp}:{offset}" for r, t in tallies for offset in t.first)
    return ExpectationOutcome(
        e, enough(checked, unexpected, get_argument(e, "mostly")), "", checked, unexpected, _few(first)
    )


def _of_batches(e: Expectation, results: Sequence[Result]) -> ExpectationOutcome:
    failed = [r for r in results if not r.passed]
    latest = (failed or results)[-1]
    checked, unexpected = sum(r.checked for r in results), sum(r.unexpected for r in results)
    return ExpectationOutcome(
        e, not failed, latest.observed, checked, unexpected, _few(f for r in results for f in r.first)
    )


def _few(first: Iterator[str]) -> tuple[str, ...]:
    return tuple(f for f, _ in zip(first, range(EXAMPLES), strict=False))
