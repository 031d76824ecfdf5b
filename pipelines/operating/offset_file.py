"""Committed offsets as a file: written by `offsets export`, read strictly by `offsets import`."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Collection, Iterator, Mapping, Sequence

from sluice.pipelines.errors import UsageError
from sluice.pipelines.model.kafka import TopicPartition, is_topic_name

FILE_BYTES = 16 << 20
"""The largest file of offsets that is read; it holds some 300,000 partitions."""

_NUMBER = re.compile(r"[0-9]{1,19}")


def dump(offsets: Mapping[TopicPartition, int]) -> Iterator[str]:
    """One line `topic,partition,offset` for each partition, in order, without a header."""
    return (f"{tp.topic},{tp.partition},{offset}" for tp, offset in sorted(offsets.items()))


def parse(data: bytes, name: str, group: str, partitions: Collection[TopicPartition]) -> dict[TopicPartition, int]:
    """The offsets in a file, of `known` partitions. Raises UsageError, which names file and line."""
    out: dict[TopicPartition, int] = {}
    for line, row in _rows(data, name):
        tp, offset = _line(row, name, line, group)
        if tp in out:
            raise _bad(name, line, f"names {tp} a second time")
        if tp not in partitions:
            raise _bad(name, line, f"names {tp}, which is not there, or is not read here")
        out[tp] = offset
    if not out:
        raise UsageError(f"{name} holds no offsets", remedy=_FORM)
    return out


_FORM = "write a line TOPIC,PARTITION,OFFSET for each partition, as `sluice offsets export` does"


def _rows(data: bytes, name: str) -> Iterator[tuple[int, list[str]]]:
    try:
        reader = csv.reader(io.StringIO(data.decode("utf-8-sig"), newline=""), strict=True)
        yield from ((reader.line_num, row) for row in reader if row)
    except UnicodeDecodeError as error:
        raise _bad(name, data[: error.start].count(b"\n") + 1, "is not UTF-8") from None
    except csv.Error:
        raise _bad(name, reader.line_num, "is not CSV") from None


def _line(row: Sequence[str], name: str, line: int, group: str) -> tuple[TopicPartition, int]:
    cells = [cell.strip() for cell in row]
    if len(cells) == 4 and cells.pop(0) != group:  # an export of several groups names each first
        raise _bad(name, line, f"is about another group than {group}")
    if len(cells) != 3:
        raise _bad(name, line, f"has {len(row)} columns")
    topic, partition, offset = cells
    if not is_topic_name(topic):
        raise _bad(name, line, "does not begin with a topic's name")
    if not (_NUMBER.fullmatch(partition) and _NUMBER.fullmatch(offset)):
        raise _bad(name, line, "does not end with a partition and an offset, as numbers from 0 on")
    if int(partition) >= 1 << 31 or int(offset) >= 1 << 63:
        raise _bad(name, line, "has a number that Kafka has no room for")
    return TopicPartition(topic, int(partition)), int(offset)


def _bad(name: str, line: int, why: str) -> UsageError:
    return UsageError(f"{name}, line {line}: {why}", remedy=_FORM)
