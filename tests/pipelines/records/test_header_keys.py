"""Header keys as text: the bytes of every key are recovered, and a UTF-8 key is its own text."""

from __future__ import annotations

import pyarrow as pa
from hypothesis import example, given
from hypothesis import strategies as st

from sluice.pipelines.records.rows.row_format import MARK, escape_key, escape_keys, unescape_key, unescape_keys

keys = st.binary(max_size=12) | st.text(max_size=8).map(str.encode) | st.binary(max_size=3).map(MARK.encode().__add__)


@given(st.lists(keys, max_size=8))
@example([b"A\xffB", b"plain", MARK.encode() + b"41", MARK.encode() + b"zz", MARK.encode()])
@example([MARK[:6].encode(), MARK[6:].encode()])
def test_escaped_keys_are_unescaped_to_original_bytes(raw_keys: list[bytes]) -> None:
    texts = escape_keys(pa.array(raw_keys, pa.binary()))
    assert texts.type == pa.string()
    texts.validate(full=True)
    assert texts.to_pylist() == [escape_key(k) for k in raw_keys]
    assert unescape_keys(texts).to_pylist() == raw_keys
    assert [unescape_key(t) for t in texts.to_pylist()] == raw_keys


@given(st.text().filter(lambda t: not t.startswith(MARK)))
def test_utf8_key_is_not_escaped(text: str) -> None:
    assert escape_key(text.encode()) == text


@given(st.text())
def test_any_text_can_be_unescaped_to_bytes(text: str) -> None:
    assert isinstance(unescape_key(text), bytes)


def test_column_of_plain_keys_is_not_copied() -> None:
    keys = pa.array([b"trace", b"tenant", b"trace"], pa.binary())
    assert escape_keys(keys).buffers()[2].address == keys.buffers()[2].address
    assert unescape_keys(escape_keys(keys)).buffers()[2].address == keys.buffers()[2].address
