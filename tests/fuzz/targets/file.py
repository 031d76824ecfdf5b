"""Files that people write: feeds, contracts, offsets to import."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from random import Random

import pyarrow as pa

from sluice.pipelines.contract.suite import ContractError, parse_contract
from sluice.pipelines.errors import FeedError, UsageError
from sluice.pipelines.feed.load import load_feed
from sluice.pipelines.model.kafka import TopicPartition
from sluice.pipelines.operating.move_offsets import parse_offsets
from sluice.pipelines.records.contract_rows.contract_format import RowChecks
from sluice.pipelines.schema.schema import parse_schema
from tests.fuzz.mutation import ODD, mutate_bytes, mutate_json
from tests.fuzz.target import Target
from tests.pipelines.records.json.rows import convert

_ROOT = Path(__file__).parents[3]

# -- feeds


def _make_feed_seeds() -> list[bytes]:
    """Return the feeds of this project, and the examples on its pages."""
    examples = [
        t for page in ("feeds", "contracts") for t in (_ROOT / f"docs/{page}.md").read_text().split("```") if ": " in t
    ]
    files = [p.read_text() for p in sorted((_ROOT / "feeds").glob("*.yaml"))]
    minimal = "kafka: {bootstrap: '127.0.0.1:9'}\ntopics: t\nstart: earliest\n"
    bombs = [
        "a: &a [x, x]\nb: &b [*a, *a, *a, *a]\nc: [*b, *b, *b, *b]\n",
        "[" * 5000,
        "{a: " * 5000,
        "a: " + "x" * 300_000,
    ]
    tags = [
        f"a: !!{t} [x]\n"
        for t in ("python/object/apply:os.system", "python/name:os.system", "binary", "set", "omap", "timestamp")
    ]
    merged = [
        "<<: {a: 1}\nb: 2\n",
        "? [a]\n: b\n",
        "a: 1\na: 2\n",
        "--- a\n--- b\n",
        "%YAML 1.2\n---\na: 1\n",
        "a: ${HOME}\n",
        "a: ${X:-${Y}}\n",
    ]
    texts = [*files, minimal + "alerts: {lag: 1h}\n", *(minimal + m for m in merged), *bombs, *tags, *merged, *examples]
    return [t.encode() for t in texts]


_YAML = [
    *b"&a |*a|!!python/name:os |!!binary |<<: |? |- |: |[|{|'|${|${HOME}|${A:-|}|# |--- |0x1f|1e400|.inf|~".split(b"|"),
    *b"2026-11-20|\xef\xbb\xbf|\xc2\x85|\x00|\\ud800|1d|-1h|999999999999999d|s3://|../..".split(b"|"),
    *(b'"', b"\n", b"\t", b"|\n ", b">\n ", b"...\n", b"9" * 50, b"9" * 5000, b"a" * 300),
]


def _mutate_yaml(random: Random, data: bytes, others: Sequence[bytes]) -> bytes:
    lines = data.split(b"\n")
    for _ in range(1 << random.randrange(3)):
        at = random.randrange(len(lines))
        match random.randrange(6):
            case 0:
                lines[at:at] = random.choice(others).split(b"\n")[: random.choice((1, 2, 10))]
            case 1:
                lines[at] = lines[at].partition(b":")[0] + b": " + random.choice(_YAML)
            case 2:
                lines[at] = (
                    lines[at].partition(b":")[0] + b": " + str(random.choice(ODD)).encode("utf-8", "surrogatepass")
                )
            case 3:
                column = random.randrange(len(lines[at]) + 1)
                lines[at] = lines[at][:column] + random.choice(_YAML) + lines[at][column + random.randrange(3) :]
            case 4:
                lines[at : at + 1] = []
            case 5:
                lines[at] = mutate_bytes(random, lines[at], others)
        lines = lines or [b""]
    return b"\n".join(lines)


@cache
def _make_folder() -> Path:
    folder = Path(tempfile.mkdtemp()) / "feeds"
    folder.mkdir()
    return folder


def _run_feed(data: bytes) -> str:
    path = _make_folder() / "orders.yaml"
    path.write_bytes(data)
    try:
        feed = load_feed(path, {"HOME": "secret-of-the-environment"})
    except FeedError as error:
        return _check_refusal(error, "orders.yaml")
    assert "secret-of-the-environment" not in repr(feed.kafka)
    return "a feed"


def _check_refusal(error: Exception, name: str) -> str:
    """Check that the error names the file and quotes nothing from the environment."""
    assert name in str(error)
    assert "secret-of-the-environment" not in str(error)
    return "refused"


# -- contracts


_SCHEMA = parse_schema(
    {"id": "int64 not null", "a": "string", "d": "decimal(12,2)", "t": "timestamp", "f": "float64", "ok": "bool"}
)


def _make_contract_seeds() -> list[bytes]:
    examples = [
        t[t.find("{") :].encode() for t in (_ROOT / "docs/contracts.md").read_text().split("```") if '"expect' in t
    ]
    return [*examples, *(_write_suite(type_, kwargs) for type_, kwargs in _EXPECTATIONS)]


_EXPECTATIONS: list[tuple[str, str]] = [
    ("expect_column_values_to_not_be_null", '{"column": "a"}'),
    ("expect_column_values_to_be_between", '{"column": "id", "min_value": 0, "max_value": 10, "strict_min": true}'),
    (
        "expect_column_values_to_be_between",
        '{"column": "t", "min_value": "2024-01-01", "max_value": "2025-01-01T00:00:00Z"}',
    ),
    ("expect_column_values_to_be_between", '{"column": "d", "min_value": "0.01"}'),
    ("expect_column_values_to_be_in_set", '{"column": "a", "value_set": ["x", "y"], "mostly": 0.9}'),
    ("expect_column_values_to_match_regex", '{"column": "a", "regex": "^(a+)+$"}'),
    (
        "expect_column_values_to_match_regex_list",
        '{"column": "a", "regex_list": ["^x", "[0-9]{1,5}"], "match_on": "any"}',
    ),
    ("expect_column_value_lengths_to_be_between", '{"column": "a", "min_value": 1, "max_value": 5}'),
    ("expect_column_pair_values_a_to_be_greater_than_b", '{"column_A": "id", "column_B": "f", "or_equal": true}'),
    ("expect_compound_columns_to_be_unique", '{"column_list": ["id", "a"]}'),
    ("expect_column_mean_to_be_between", '{"column": "f", "min_value": 0, "max_value": 1}'),
]


def _write_suite(type_: str, kwargs: str) -> bytes:
    item = f'{{"type": "{type_}", "kwargs": {kwargs}, "severity": "critical"}}'
    return f'{{"name": "orders", "expectations": [{item}], "meta": {{}}}}'.encode()


@cache
def _make_rows() -> pa.RecordBatch:
    values = [
        b'{"id":1,"a":"x","d":1.5,"t":"2024-06-01T00:00:00Z","f":0.5,"ok":true}',
        b'{"id":-9223372036854775808,"a":"","d":-9999999999.99,"t":"0001-01-01T00:00:00Z","f":1e308}',
        '{"id":0,"a":"\u00e9\U0001f600\\u0000","f":-0.0,"ok":false}'.encode(),
        b'{"id":9223372036854775807,"a":"' + b"a" * 500 + b'!","t":"9999-12-31T23:59:59Z"}',
        None,
    ]
    landed, _ = convert(_SCHEMA, values)
    return landed.combine_chunks().to_batches()[0]


def _run_contract(data: bytes) -> str:
    try:
        contract = parse_contract(data, _SCHEMA)
    except ContractError as error:
        return _check_refusal(error, "")
    checked = RowChecks(contract).check(_make_rows())
    assert all(0 <= t.unexpected <= t.checked <= 4 for t in checked.tallies)
    return "held"


# -- offsets to import


def _make_offsets_seeds() -> list[bytes]:
    return [
        b"orders,0,5\norders,1,7\n",
        b"orders,0,5",
        b"",
        b'"orders",0,5\r\n',
        b"group,orders,0,5\n",
        b"\xef\xbb\xbforders,0,1\n",
    ]


def _run_offsets(data: bytes) -> str:
    partitions = [TopicPartition("orders", 0), TopicPartition("orders", 1)]
    try:
        offsets = parse_offsets(data, "offsets.csv", "group", partitions)
    except UsageError as error:
        return _check_refusal(error, "offsets.csv")
    assert set(offsets) <= set(partitions)
    return f"{len(offsets)} offsets"


FEEDS = Target("feeds", _make_feed_seeds, _run_feed, _mutate_yaml)
CONTRACTS = Target("contracts", _make_contract_seeds, _run_contract, mutate_json)
OFFSETS = Target("offsets", _make_offsets_seeds, _run_offsets, mutate_bytes)
