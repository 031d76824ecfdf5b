"""A fixed part of `make fuzz`: the kept inputs, and some hundreds of new ones for each reader."""

from __future__ import annotations

import sys

import pytest

from tests.fuzz.hunt import TARGETS, load_target, run_hunt
from tests.fuzz.processes import run_hunts

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="pages and memory are bounded by Linux's own calls")

COMPILED = ("records", "loops", "codecs", "typed", "typed-values", "avro", "protobuf")
"""They run next to guarded pages: one byte too far ends the process, so they do not run in the process of pytest."""


def test_loops_and_codecs_stay_within_their_input_bytes() -> None:
    outcome = run_hunts(*COMPILED, inputs=250)
    assert outcome.findings == []
    assert outcome.inputs > 250 * len(COMPILED)


def test_expansion_beyond_256_mib_is_refused_in_bounded_memory() -> None:
    """Six bombs, one after another, in a process that may grow by a gigabyte; together they would take twelve."""
    assert run_hunts("bombs").findings == []


@pytest.mark.parametrize("name", [n for n in TARGETS if n not in (*COMPILED, "bombs")])
def test_readers_of_arbitrary_input_raise_no_unexpected_error(name: str) -> None:
    work = run_hunt(load_target(name), seed=0, inputs=150, seconds=0)
    assert work.findings == []
