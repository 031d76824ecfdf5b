"""Any message and any bytes: landed rows equal those of Google's library; records that it refuses are quarantined."""

from __future__ import annotations

from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import scale_examples
from tests.pipelines.records.json.rows import FIRST, by_offset
from tests.pipelines.records.protobuf import wild
from tests.pipelines.records.protobuf.rows import convert, make_wild_message, normalize, read_by_google

SEEDS = st.integers(0, 1 << 40)


# Google's library skips numbers that a closed enum does not have, and accepts proto2 strings that are not UTF-8. Sluice
# refuses both.
STRICTER = ("wrong_type", "invalid_utf8")


def check(seed: int, *, spoil: bool) -> None:
    rnd = Random(seed)
    reader, kind = make_wild_message(rnd)
    values = [wild.make_record(rnd, kind.DESCRIPTOR) for _ in range(30)]
    if spoil:
        values = [wild.mutate(rnd, v) if rnd.randrange(3) else v for v in values]
    landed, quarantined, _ = convert(reader, values)
    rows, refused = by_offset(landed, "kafka_offset"), by_offset(quarantined, "offset")
    for at, value in enumerate(values, FIRST):
        expected = read_by_google(kind, value)
        if at not in rows:
            assert expected is None or refused[at]["reason"] in STRICTER, (seed, value)
            continue
        if expected is None:
            # Documents are read at the end, so one that another member of its oneof replaced is not read.
            assert spoil, (seed, value)
            assert any("json" in f.text for f in reader.columns.fields), (seed, value)
            continue
        for f in reader.columns.fields:
            # Google's library also skips map entries with unknown fields.
            if not (spoil and "map<" in f.text):
                assert normalize(rows[at][f.name], f.type) == expected[f.name], (seed, value, f.name)


@settings(max_examples=scale_examples(60))
@given(SEEDS)
def test_landed_records_match_google_protobuf(seed: int) -> None:
    check(seed, spoil=False)


@settings(max_examples=scale_examples(60))
@given(SEEDS)
def test_mutated_bytes_match_google_protobuf_or_are_refused(seed: int) -> None:
    check(seed, spoil=True)
