"""The expectations of Great Expectations' core that a contract can have: arguments, columns and description of each.

`ENTRIES` is the table. `suite` reads files by it, `records.contract_rows` (tasks) and `validation` (driver) evaluate
its expectations, and docs/contracts.md lists it. This module is light: it loads neither Arrow nor Great Expectations.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from sluice.pipelines.contract.expectation import Contract, Expectation, Severity
from sluice.pipelines.contract.sentences import sentence
from sluice.pipelines.model.receipts import EXAMPLES
from sluice.pipelines.schema.schema import EXTRA, KAFKA, Field, Kind, Schema, Type, TypeFamily
from sluice.pipelines.util.documents import Derived, Internal

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
class CatalogueEntry:
    """One type of expectation.

    `families` are the kinds of columns that it can be about. `reason` is the word that rows get in quarantine; empty
    for expectations about whole batches.
    """

    type: str
    scope: Scope
    issue: Issue
    kwargs: Mapping[str, Kwarg] = field(hash=False)
    families: frozenset[TypeFamily]
    reason: str = ""

    @property
    def needs_bounds(self) -> bool:
        """Returns whether it needs `min_value`, `max_value` or both."""
        return "min_value" in self.kwargs


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
_REGEX = Kwarg("regex", Takes.REGEX, required=True)
_REGEXES = Kwarg("regex_list", Takes.REGEXES, required=True)
_STRICT = (Kwarg("strict_min", Takes.TRUTH, default=False), Kwarg("strict_max", Takes.TRUTH, default=False))
_WINDOWS = Kwarg("windows", Takes.WINDOWS)


def _bounds(takes: Takes) -> tuple[Kwarg, ...]:
    return Kwarg("min_value", takes), Kwarg("max_value", takes), *_STRICT


def _row(type_: str, issue: Issue, reason: str, families: frozenset[TypeFamily], *kwargs: Kwarg) -> CatalogueEntry:
    return CatalogueEntry(type_, Scope.ROW, issue, {k.name: k for k in (*kwargs, _MOSTLY)}, families, reason)


def _whole(type_: str, issue: Issue, families: frozenset[TypeFamily], *kwargs: Kwarg) -> CatalogueEntry:
    return CatalogueEntry(type_, Scope.WHOLE, issue, {k.name: k for k in kwargs}, families)


_ALL = (
    _row("expect_column_values_to_not_be_null", Issue.COMPLETENESS, "is_null", _ANY, _COLUMN),
    _row("expect_column_values_to_be_null", Issue.COMPLETENESS, "not_null", _ANY, _COLUMN),
    _row("expect_column_values_to_be_in_set", Issue.VALIDITY, "not_in_set", _SIMPLE, _COLUMN, _SET),
    _row("expect_column_values_to_not_be_in_set", Issue.VALIDITY, "in_set", _SIMPLE, _COLUMN, _SET),
    _row(
        "expect_column_values_to_be_between",
        Issue.NUMERIC,
        "out_of_bounds",
        _ORDERED,
        _COLUMN,
        *_bounds(Takes.BOUND),
    ),
    _row(
        "expect_column_value_lengths_to_be_between",
        Issue.VALIDITY,
        "wrong_length",
        _TEXT,
        _COLUMN,
        *_bounds(Takes.COUNT),
    ),
    _row(
        "expect_column_value_lengths_to_equal",
        Issue.VALIDITY,
        "wrong_length",
        _TEXT,
        _COLUMN,
        Kwarg("value", Takes.COUNT, required=True),
    ),
    _row("expect_column_values_to_match_regex", Issue.VALIDITY, "no_match", _TEXT, _COLUMN, _REGEX),
    _row("expect_column_values_to_not_match_regex", Issue.VALIDITY, "matches", _TEXT, _COLUMN, _REGEX),
    _row(
        "expect_column_values_to_match_regex_list",
        Issue.VALIDITY,
        "no_match",
        _TEXT,
        _COLUMN,
        _REGEXES,
        Kwarg("match_on", Takes.CHOICE, default="any", choices=("any", "all")),
    ),
    _row("expect_column_values_to_not_match_regex_list", Issue.VALIDITY, "matches", _TEXT, _COLUMN, _REGEXES),
    _row(
        "expect_column_pair_values_a_to_be_greater_than_b",
        Issue.NUMERIC,
        "not_greater",
        _ORDERED,
        *_PAIR,
        Kwarg("or_equal", Takes.TRUTH, default=False),
        _PAIR_NULLS,
    ),
    _row("expect_column_pair_values_to_be_equal", Issue.VALIDITY, "not_equal", _SIMPLE, *_PAIR, _PAIR_NULLS),
    _row(
        "expect_column_pair_values_to_be_in_set",
        Issue.VALIDITY,
        "not_in_set",
        _SIMPLE,
        *_PAIR,
        Kwarg("value_pairs_set", Takes.PAIRS, required=True),
        _PAIR_NULLS,
    ),
    _row(
        "expect_select_column_values_to_be_unique_within_record",
        Issue.UNIQUENESS,
        "not_unique",
        _SIMPLE,
        _COLUMNS,
        _NULLS,
    ),
    _row(
        "expect_multicolumn_sum_to_equal",
        Issue.NUMERIC,
        "wrong_sum",
        _NUMBER,
        _COLUMNS,
        Kwarg("sum_total", Takes.NUMBER, required=True),
        _NULLS,
    ),
    _whole("expect_table_row_count_to_be_between", Issue.VOLUME, _ANY, *_bounds(Takes.COUNT), _WINDOWS),
    _whole("expect_table_row_count_to_equal", Issue.VOLUME, _ANY, Kwarg("value", Takes.COUNT, required=True)),
    _whole(
        "expect_table_columns_to_match_set",
        Issue.SCHEMA,
        _ANY,
        Kwarg("column_set", Takes.NAMES, required=True),
        Kwarg("exact_match", Takes.TRUTH, default=True),
    ),
    _whole(
        "expect_table_columns_to_match_ordered_list",
        Issue.SCHEMA,
        _ANY,
        Kwarg("column_list", Takes.NAMES, required=True),
    ),
    _whole(
        "expect_table_column_count_to_be_between",
        Issue.SCHEMA,
        _ANY,
        Kwarg("min_value", Takes.COUNT),
        Kwarg("max_value", Takes.COUNT),
    ),
    _whole("expect_table_column_count_to_equal", Issue.SCHEMA, _ANY, Kwarg("value", Takes.COUNT, required=True)),
    _whole("expect_column_to_exist", Issue.SCHEMA, _ANY, _COLUMN, Kwarg("column_index", Takes.COUNT)),
    _whole("expect_column_values_to_be_unique", Issue.UNIQUENESS, _FLAT, _COLUMN, _MOSTLY),
    _whole("expect_compound_columns_to_be_unique", Issue.UNIQUENESS, _FLAT, _COLUMNS, _NULLS, _MOSTLY),
    _whole("expect_column_unique_value_count_to_be_between", Issue.UNIQUENESS, _FLAT, _COLUMN, *_bounds(Takes.COUNT)),
    _whole(
        "expect_column_proportion_of_unique_values_to_be_between",
        Issue.UNIQUENESS,
        _FLAT,
        _COLUMN,
        *_bounds(Takes.SHARE),
    ),
    _whole(
        "expect_column_proportion_of_non_null_values_to_be_between",
        Issue.COMPLETENESS,
        _ANY,
        _COLUMN,
        *_bounds(Takes.SHARE),
    ),
    _whole("expect_column_min_to_be_between", Issue.NUMERIC, _ORDERED, _COLUMN, *_bounds(Takes.BOUND)),
    _whole("expect_column_max_to_be_between", Issue.NUMERIC, _ORDERED, _COLUMN, *_bounds(Takes.BOUND)),
    _whole("expect_column_mean_to_be_between", Issue.NUMERIC, _NUMBER, _COLUMN, *_bounds(Takes.NUMBER)),
    _whole("expect_column_median_to_be_between", Issue.NUMERIC, _NUMBER, _COLUMN, *_bounds(Takes.NUMBER)),
    _whole("expect_column_sum_to_be_between", Issue.NUMERIC, _NUMBER, _COLUMN, *_bounds(Takes.NUMBER)),
    _whole("expect_column_stdev_to_be_between", Issue.NUMERIC, _NUMBER, _COLUMN, *_bounds(Takes.NUMBER)),
    _whole(
        "expect_column_quantile_values_to_be_between",
        Issue.NUMERIC,
        _NUMBER,
        _COLUMN,
        Kwarg("quantile_ranges", Takes.QUANTILES, required=True),
        Kwarg("allow_relative_error", Takes.TRUTH, default=False),
    ),
    _whole("expect_column_distinct_values_to_be_in_set", Issue.UNIQUENESS, _SIMPLE, _COLUMN, _SET),
    _whole("expect_column_distinct_values_to_equal_set", Issue.UNIQUENESS, _SIMPLE, _COLUMN, _SET),
    _whole("expect_column_distinct_values_to_contain_set", Issue.UNIQUENESS, _SIMPLE, _COLUMN, _SET),
    _whole(
        "expect_column_most_common_value_to_be_in_set",
        Issue.VALIDITY,
        _SIMPLE,
        _COLUMN,
        _SET,
        Kwarg("ties_okay", Takes.TRUTH, default=False),
    ),
)
ENTRIES: Mapping[str, CatalogueEntry] = {e.type: e for e in _ALL}
"""Every supported expectation by its type."""


def entry(expectation: Expectation) -> CatalogueEntry:
    """The table's entry for an expectation of a contract."""
    return ENTRIES[expectation.type]


def get_argument(expectation: Expectation, name: str) -> Any:
    """An argument's value in the suite, or its default."""
    value = expectation.kwargs.get(name)
    return entry(expectation).kwargs[name].default if value is None else value


def text(expectation: Expectation) -> str:
    """Returns the expectation in words: "amount is between 0 and 10,000"."""
    rendered = sentence(expectation.type, _arguments(expectation)).text
    share = expectation.kwargs.get("mostly")
    return rendered if share in (None, 1) else f"{rendered}, in at least {share * 100:g}% of rows"


def demand(expectation: Expectation) -> str:
    """Returns the demand on a row that breaks the expectation: "amount should be between 0 and 10,000"."""
    return sentence(expectation.type, _arguments(expectation)).demand


def _arguments(expectation: Expectation) -> dict[str, Any]:
    return {name: get_argument(expectation, name) for name in entry(expectation).kwargs}


def columns(expectation: Expectation) -> tuple[str, ...]:
    """The columns that the expectation is about; none if it is about the table as a whole."""
    names: list[str] = []
    for kwarg in entry(expectation).kwargs.values():
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
    return entry(e).scope is Scope.ROW and get_argument(e, "mostly") == 1


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
    by_place: dict[int, list[Result]] = {}
    for result in results:
        by_place.setdefault(result.expectation, []).append(result)
    outcomes = []
    for e in contract.expectations:
        if entry(e).scope is Scope.ROW:
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
