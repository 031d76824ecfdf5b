"""Any message, any bytes: what lands equals what Google's library reads, and what it does not read is in quarantine."""

from __future__ import annotations

from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tests.pipelines.records.json.rows import FIRST, by_offset
from tests.pipelines.records.protobuf import wild
from tests.pipelines.records.protobuf.rows import comparable, convert, read_by_google, wild_message

SEEDS = st.integers(0, 1 << 40)


# What Google's library passes over, and we do not: numbers that a closed enum does not have, texts of proto2 that are
# no UTF-8.
STRICTER = ("wrong_type", "invalid_utf8")


def check(seed: int, *, spoil: bool) -> None:
    rnd = Random(seed)
    reader, kind = wild_message(rnd)
    values = [wild.record(rnd, kind.DESCRIPTOR) for _ in range(30)]
    if spoil:
        values = [wild.mutated(rnd, v) if rnd.randrange(3) else v for v in values]
    landed, held, _ = convert(reader, values)
    rows, refused = by_offset(landed, "kafka_offset"), by_offset(held, "offset")
    for at, value in enumerate(values, FIRST):
        expected = read_by_google(kind, value)
        if at not in rows:
            assert expected is None or refused[at]["reason"] in STRICTER, (seed, value)
            continue
        if expected is None:
            # A document is read at the end: one that another member of its oneof has taken the place of is not.
            assert spoil, (seed, value)
            assert any("json" in f.text for f in reader.columns.fields), (seed, value)
            continue
        for f in reader.columns.fields:
            # It also passes over entries of maps that have fields which entries do not have.
            if not (spoil and "map<" in f.text):
                assert comparable(rows[at][f.name], f.type) == expected[f.name], (seed, value, f.name)


@settings(max_examples=examples(60))
@given(SEEDS)
def test_records_land_as_google_reads_them(seed: int) -> None:
    check(seed, spoil=False)


@settings(max_examples=examples(60))
@given(SEEDS)
def test_any_bytes_land_as_google_reads_them_or_not_at_all(seed: int) -> None:
    check(seed, spoil=True)
