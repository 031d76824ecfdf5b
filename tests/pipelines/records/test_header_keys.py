"""Keys of headers as text: every key's bytes come back, and a key that is UTF-8 is its text."""

from __future__ import annotations

import pyarrow as pa
from hypothesis import example, given
from hypothesis import strategies as st

from sluice.pipelines.records.rows.row_format import MARK, bytes_column, key_bytes, key_column, key_text

keys = st.binary(max_size=12) | st.text(max_size=8).map(str.encode) | st.binary(max_size=3).map(MARK.encode().__add__)


@given(st.lists(keys, max_size=8))
@example([b"A\xffB", b"plain", MARK.encode() + b"41", MARK.encode() + b"zz", MARK.encode()])
@example([MARK[:6].encode(), MARK[6:].encode()])
def test_every_key_comes_back(some: list[bytes]) -> None:
    texts = key_column(pa.array(some, pa.binary()))
    assert texts.type == pa.string()
    texts.validate(full=True)
    assert texts.to_pylist() == [key_text(k) for k in some]
    assert bytes_column(texts).to_pylist() == some
    assert [key_bytes(t) for t in texts.to_pylist()] == some


@given(st.text().filter(lambda t: not t.startswith(MARK)))
def test_a_key_that_is_utf8_is_its_text(text: str) -> None:
    assert key_text(text.encode()) == text


@given(st.text())
def test_any_text_has_bytes(text: str) -> None:
    assert isinstance(key_bytes(text), bytes)


def test_a_column_of_usual_keys_is_not_copied() -> None:
    keys = pa.array([b"trace", b"tenant", b"trace"], pa.binary())
    assert key_column(keys).buffers()[2].address == keys.buffers()[2].address
    assert bytes_column(key_column(keys)).buffers()[2].address == keys.buffers()[2].address
