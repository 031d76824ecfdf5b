"""A part of `make fuzz`, always the same: kept inputs, and some hundreds of new ones for each reader."""

from __future__ import annotations

import sys

import pytest

from tests.fuzz.hunt import PLACES, hunt, target
from tests.fuzz.processes import hunt as in_a_process

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="pages and memory are bounded by Linux's own calls")

COMPILED = ("records", "loops", "codecs", "typed", "typed-values", "avro", "protobuf")
"""They run beside guarded pages: one byte too far ends the process, which is not to be pytest's."""


def test_whatever_the_bytes_no_loop_and_no_codec_goes_beyond_them() -> None:
    found = in_a_process(*COMPILED, inputs=250)
    assert found.findings == []
    assert found.inputs > 250 * len(COMPILED)


def test_what_expands_beyond_256_mib_is_refused_in_bounded_memory() -> None:
    """Six bombs one after another in a process that may grow by a gigabyte: together they would be twelve."""
    assert in_a_process("bombs").findings == []


@pytest.mark.parametrize("name", [n for n in PLACES if n not in (*COMPILED, "bombs")])
def test_whatever_a_file_or_an_answer_says_its_reader_ends_in_words(name: str) -> None:
    work = hunt(target(name), seed=0, inputs=150, seconds=0)
    assert work.findings == []
