"""Reads a contract's file: a Great Expectations suite, strictly, into frozen expectations.

Guarantee: a contract that was read can be evaluated on every row of its feed. Any other file is refused with all its
problems, each named by its place in the file. Size, depth and counts are bounded.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from sluice.pipelines.contract.arguments import flaws
from sluice.pipelines.contract.catalogue import RULES, Scope, column_types, rule_of
from sluice.pipelines.contract.catalogue import columns as columns_of
from sluice.pipelines.contract.expectation import Contract, Expectation, Severity
from sluice.pipelines.schema.protection import Action, Rule
from sluice.pipelines.schema.schema import Schema, Type
from sluice.pipelines.util.units import sanitize

CONTRACT = ".contract.json"
"""The ending of a contract's file name. The name begins as its feed's file does."""

MAX_BYTES = 256 << 10

MAX_DEPTH = 32

MOST = 500
"""The most expectations of a contract."""

MOST_PROBLEMS = 50


def recall(text: str) -> Contract:
    """The contract with this `Contract.text`, which the ledger keeps. Raises ValueError."""
    try:
        items = json.loads(text)
        if not all(item["type"] in RULES and isinstance(item["kwargs"], dict) for item in items):
            raise ValueError("no expectation that we know")
        return Contract(
            tuple(Expectation(i, x["type"], x["kwargs"], Severity(x["severity"])) for i, x in enumerate(items))
        )
    except (KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"no contract's text ({type(error).__name__})") from None


@dataclass(frozen=True, slots=True)
class ContractProblem:
    """One problem in the file: its position, description and remedy.

    `place` is such as `expectations[3] expect_column_to_exist: column`; empty for the whole file.
    """

    place: str
    what: str
    remedy: str = ""


class ContractError(ValueError):
    """The file is no contract of its feed. `problems` holds all that was found, up to `MOST_PROBLEMS`."""

    def __init__(self, *problems: ContractProblem) -> None:
        super().__init__("; ".join(f"{p.place}: {p.what}" if p.place else p.what for p in problems))
        self.problems = problems[:MOST_PROBLEMS]


def read_contract(path: Path, columns: Schema | None, protected: Mapping[str, Rule] = {}) -> Contract | None:
    """The contract in the file, for a feed with this schema (None: raw records) and these protected columns.

    None without a file. Raises ContractError.
    """
    if not path.exists() and not path.is_symlink():
        return None
    data = None
    if path.is_file():
        with contextlib.suppress(OSError), path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    if data is None:
        raise ContractError(ContractProblem("", "cannot be read", "check that it is a file and its permissions"))
    return parse_contract(data, columns, protected)


def parse_contract(data: bytes, columns: Schema | None, protected: Mapping[str, Rule] = {}) -> Contract:
    """The contract in a file's bytes, as `read_contract` reads it. Raises ContractError."""
    suite = _parse_document(data)
    problems = [*_of_suite(suite)]
    items = suite.get("expectations")
    if not isinstance(items, list) or not 1 <= len(items) <= MOST:
        raise ContractError(*problems, ContractProblem("expectations", f"should be a list of 1 to {MOST}"))
    types = column_types(columns)
    expectations = []
    for index, item in enumerate(items):
        flaws = [*_of_item(item, f"expectations[{index}]", types)]
        flaws += [] if flaws else _of_protected(_expectation(index, item), f"expectations[{index}]", protected)
        problems += flaws
        if not flaws:
            expectations.append(_expectation(index, item))
    if problems:
        raise ContractError(*problems)
    return Contract(tuple(expectations))


class _ContractRefused(Exception):
    pass


def _parse_document(data: bytes) -> dict[str, Any]:
    if len(data) > MAX_BYTES:
        raise ContractError(ContractProblem("", f"is larger than {MAX_BYTES >> 10} KiB", "a contract is a short list"))
    what, remedy = "is not UTF-8", "save it as UTF-8"
    try:
        text = data.decode("utf-8-sig")
        what, remedy = "is nested too deeply", f"at most {MAX_DEPTH} levels"
        document = json.loads(
            text, object_pairs_hook=_once, parse_float=_float, parse_int=_int, parse_constant=_constant
        )
        _check_depth(document)
        if isinstance(document, dict):
            return document
        what, remedy = "is not a suite", 'write {"name": "…", "expectations": […], "meta": {…}}'
    except json.JSONDecodeError as error:
        what = f"is not JSON at line {error.lineno}, column {error.colno}: {error.msg[:1].lower()}{error.msg[1:]}"
        remedy = "fix it there; json.tool shows it too"
    except _ContractRefused as refused:
        what, remedy = str(refused), ""
    except (UnicodeDecodeError, RecursionError):
        pass
    raise ContractError(ContractProblem("", what, remedy))


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    document = dict(pairs)
    if len(document) < len(pairs):
        keys = [k for k, _ in pairs]
        raise _ContractRefused(
            f"has the key `{sanitize(next(k for k in document if keys.count(k) > 1))}` twice in one object"
        )
    return document


def _float(text: str) -> float:
    """Parse a number whose digits a float keeps. Any other would be compared as a different number."""
    number = float(text)
    if len(text) > 60 or number in (float("inf"), float("-inf")) or Decimal(repr(number)) != Decimal(text):
        raise _ContractRefused(
            f"has a number, {sanitize(text)}, of more digits than a float keeps; a decimal's go into quotes"
        )
    return number


def _int(text: str) -> int:
    if len(text) > 40:
        raise _ContractRefused("has a whole number of more than 39 digits")
    return int(text)


def _constant(text: str) -> float:
    raise _ContractRefused(f"has {text}, which is not a number in JSON")


def _check_depth(value: object, level: int = 0) -> None:
    if level > MAX_DEPTH:
        raise RecursionError
    if isinstance(value, str) and not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            raise _ContractRefused("has half of a surrogate pair, which is not a character") from None
    for key, inner in value.items() if isinstance(value, dict) else ():
        _check_depth(key, level)
        _check_depth(inner, level + 1)
    for inner in value if isinstance(value, list) else ():
        _check_depth(inner, level + 1)


_SUITE = ("name", "id", "expectations", "meta", "notes", "suite_parameters")

_ITEM = ("type", "kwargs", "severity", "id", "meta", "notes", "description", "rendered_content")

_OLD = ("expectation_suite_name", "data_asset_type", "ge_cloud_id")

_SILENT = ("result_format", "catch_exceptions", "id", "meta", "notes", "description", "rendered_content")
"""Arguments that are accepted and ignored, because they change nothing about a row."""

_REFUSED = {
    "row_condition": "an expectation is about all rows; those that it is not about can be allowed by it",
    "condition_parser": "there are no conditions on rows",
    "batch_id": "every batch is checked against its contract",
}


def _of_suite(suite: Mapping[str, Any]) -> Iterator[ContractProblem]:
    meta = suite.get("meta") or {}
    version = meta.get("great_expectations_version", "1.") if isinstance(meta, dict) else None
    old = next((key for key in _OLD if key in suite), None)
    if old or not isinstance(version, str) or not version.startswith("1."):
        suffix = f" ({sanitize(version)})" if isinstance(version, str) and not old else ""
        what = f"is a suite of another Great Expectations than 1.x{suffix}"
        yield ContractProblem("meta.great_expectations_version", what, "save it again with Great Expectations 1.x")
        return
    for key in suite:
        if key not in _SUITE:
            yield ContractProblem(sanitize(key), "is unknown", _near(key, _SUITE))
    if suite.get("suite_parameters"):
        yield ContractProblem("suite_parameters", "are not supported", "write the values themselves")


def _of_item(item: object, path: str, types: Mapping[str, Type]) -> Iterator[ContractProblem]:
    if not isinstance(item, dict):
        yield ContractProblem(path, "is not an expectation", 'write {"type": "expect_…", "kwargs": {…}}')
        return
    type_ = item.get("type")
    if not isinstance(type_, str) or type_ not in RULES:
        yield _unsupported_type(type_, path, item)
        return
    path = f"{path} {type_}"
    for key in item:
        if key not in _ITEM:
            yield ContractProblem(f"{path}: {sanitize(key)}", "is unknown", _near(key, _ITEM))
    if item.get("severity", Severity.CRITICAL) not in [*Severity]:
        yield ContractProblem(f"{path}: severity", "is none of them", f"choose {', '.join(Severity)}")
    kwargs = item.get("kwargs", {})
    if not isinstance(kwargs, dict):
        yield ContractProblem(f"{path}: kwargs", "should be an object", 'write {"column": "…"}')
        return
    allowed = RULES[type_].kwargs
    for name, value in kwargs.items():
        if name in _REFUSED and value is not None:
            yield ContractProblem(f"{path}: {name}", "is not supported", _REFUSED[name])
        elif name not in allowed and name not in _REFUSED and name not in _SILENT:
            yield ContractProblem(f"{path}: {sanitize(name)}", "is unknown", _near(name, allowed))
    present = {k: v for k, v in kwargs.items() if k in allowed and v is not None}
    for flaw in flaws(RULES[type_], present, types):
        yield ContractProblem(f"{path}: {flaw.name}" if flaw.name else path, flaw.what, flaw.remedy)


def _unsupported_type(type_: object, path: str, item: Mapping[str, Any]) -> ContractProblem:
    if type_ is None and "expectation_type" in item:
        what = "is an expectation of Great Expectations before 1.0"
        return ContractProblem(f"{path}: expectation_type", what, "save the suite again with 1.x")
    if not isinstance(type_, str):
        return ContractProblem(f"{path}: type", "is missing" if type_ is None else "should be text", "expect_…")
    near = get_close_matches(type_, RULES, n=1)
    hint = f"did you mean {near[0]}? " if near else ""
    return ContractProblem(f"{path} {sanitize(type_)}", "is not supported", f"{hint}supported: {', '.join(RULES)}")


_OF_HASHES = {
    "expect_column_values_to_be_unique",
    "expect_compound_columns_to_be_unique",
    "expect_column_unique_value_count_to_be_between",
    "expect_column_proportion_of_unique_values_to_be_between",
}
_OF_NULLS = "expect_column_proportion_of_non_null_values_to_be_between"


def _of_protected(e: Expectation, path: str, protected: Mapping[str, Rule]) -> Iterator[ContractProblem]:
    """Problems of expectations about whole batches, which are decided on landed rows."""
    for name in columns_of(e) if rule_of(e).scope is Scope.WHOLE else ():
        action = protected[name].action if name in protected else None
        decidable = action is Action.HMAC and e.type in _OF_HASHES
        if action is None or decidable or (action is not Action.DROP and e.type == _OF_NULLS):
            continue
        what = f"is about {sanitize(name)}, which lands by `{action}`, and batches are checked as they land"
        yield ContractProblem(f"{path} {e.type}", what, "expectations about single rows see values as they were sent")


def _expectation(index: int, item: Mapping[str, Any]) -> Expectation:
    known_kwargs = RULES[item["type"]].kwargs
    kwargs = {k: v for k, v in (item.get("kwargs") or {}).items() if k in known_kwargs and v != known_kwargs[k].default}
    return Expectation(index, item["type"], kwargs, Severity(item.get("severity", Severity.CRITICAL)))


def _near(name: str, candidates: Mapping[str, Any] | tuple[str, ...]) -> str:
    near = get_close_matches(name, candidates, n=1)
    return f"did you mean `{near[0]}`?" if near else f"known here: {', '.join(candidates)}"
