"""Random messages, and random bytes close to records of them: fields in any order, repeated, merged, unknown."""

from __future__ import annotations

import struct
from random import Random
from typing import Any

from google.protobuf.descriptor_pb2 import DescriptorProto, FieldDescriptorProto, FileDescriptorProto, FileDescriptorSet

from sluice.pipelines.records.protobuf.compiling import _load_google, make_descriptor_set
from sluice.pipelines.records.protobuf.schema import write_text

F = FieldDescriptorProto
SCALARS = [t for t in range(1, 19) if t not in (F.TYPE_GROUP, F.TYPE_MESSAGE, F.TYPE_ENUM)]
KEYS = [t for t in SCALARS if t not in (F.TYPE_DOUBLE, F.TYPE_FLOAT, F.TYPE_BYTES)]
KNOWN = [
    "Timestamp",
    "Duration",
    "Struct",
    "Value",
    "ListValue",
    "StringValue",
    "Int32Value",
    "DoubleValue",
    "BoolValue",
]
GOOGLE = "google/protobuf/"


def make_schema(rnd: Random) -> str:
    """Return the text of a compiled schema with messages that contain one another, in proto2 or proto3."""
    file = FileDescriptorProto(name="wild.proto", syntax=rnd.choice(["proto2", "proto3"]))
    names = ("timestamp", "duration", "struct", "wrappers")
    file.dependency.extend(f"{GOOGLE}{name}.proto" for name in names)
    enum = file.enum_type.add(name="E")
    for i, (name, number) in enumerate((("NONE", 0), ("ONE", 1), ("BELOW", -7), ("FAR", 2147483647))):
        enum.value.add(name=name if i else "NONE", number=number)
    for i in range(rnd.randint(1, 3)):
        _fill_message(rnd, file.message_type.add(name=f"M{i}"), file, i)
    files: FileDescriptorSet = make_descriptor_set()
    files.file.extend([*(_load_google(f"{GOOGLE}{name}.proto") for name in names), file])
    return write_text(files, f"M{len(file.message_type) - 1}")


def _fill_message(rnd: Random, d: DescriptorProto, file: FileDescriptorProto, earlier: int) -> None:
    proto2 = file.syntax == "proto2"
    numbers = rnd.sample([*range(1, 20), 100, 2047, 536870911], rnd.randint(0 if earlier else 1, 6))
    oneof = bool(rnd.randrange(2))
    for i, number in enumerate(numbers):
        f = d.field.add(name=f"f{i}", number=number, label=F.LABEL_OPTIONAL)
        _choose_type(rnd, f, earlier, d if proto2 else None)
        how = rnd.randrange(8)
        if how < 3 and f.type != F.TYPE_GROUP:
            f.label = F.LABEL_REPEATED
            if rnd.randrange(2) and f.type not in (F.TYPE_STRING, F.TYPE_BYTES, F.TYPE_MESSAGE):
                f.options.packed = bool(rnd.randrange(2))
        elif how == 3 and f.type != F.TYPE_GROUP:
            _map(rnd, d, f, earlier, i)
        elif how == 4 and proto2 and f.type != F.TYPE_GROUP and not rnd.randrange(4):
            f.label = F.LABEL_REQUIRED
        elif how > 5 and oneof and f.type != F.TYPE_GROUP:
            if not d.oneof_decl:
                d.oneof_decl.add(name="choice")
            f.oneof_index = 0


def _choose_type(rnd: Random, f: FieldDescriptorProto, earlier: int, group_in: DescriptorProto | None) -> None:
    kind = rnd.randrange(10)
    if kind == 0:
        f.type, f.type_name = F.TYPE_ENUM, ".E"
    elif kind == 1:
        f.type, f.type_name = F.TYPE_MESSAGE, f".google.protobuf.{rnd.choice(KNOWN)}"
    elif kind in (2, 3, 4) and earlier:
        f.type, f.type_name = F.TYPE_MESSAGE, f".M{rnd.randrange(earlier)}"
    elif kind == 5 and group_in is not None:
        name = f"G{f.number}"
        inside = group_in.nested_type.add(name=name)
        inside.field.add(name="a", number=1, type=F.TYPE_INT32, label=F.LABEL_REPEATED)
        f.type, f.type_name = F.TYPE_GROUP, f".{group_in.name}.{name}"
    else:
        f.type = rnd.choice(SCALARS)


def _map(rnd: Random, d: DescriptorProto, f: FieldDescriptorProto, earlier: int, i: int) -> None:
    entry = d.nested_type.add(name=f"F{i}Entry")
    entry.options.map_entry = True
    entry.field.add(name="key", number=1, type=rnd.choice(KEYS), label=F.LABEL_OPTIONAL)
    value = entry.field.add(name="value", number=2, label=F.LABEL_OPTIONAL)
    _choose_type(rnd, value, earlier, None)
    f.label, f.type, f.type_name = F.LABEL_REPEATED, F.TYPE_MESSAGE, f".{d.name}.{entry.name}"


def encode_varint(number: int) -> bytes:
    number &= (1 << 64) - 1
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*out, number])


def add_length(data: bytes) -> bytes:
    return encode_varint(len(data)) + data


def make_record(rnd: Random, d: Any, depth: int = 0) -> bytes:
    """Return bytes of a message with this descriptor, each field a random number of times."""
    out = []
    fields = list(d.fields)
    for _ in range(rnd.choice((0, 1, 2, 4, 8)) if fields else 0):
        out.append(_make_occurrence(rnd, rnd.choice(fields), depth))
    # Google's library treats map entries with a closed enum as unknown if they have unknown fields.
    if not rnd.randrange(6) and not d.GetOptions().map_entry:
        out.append(_make_unknown(rnd))
    rnd.shuffle(out)
    return b"".join(out)


def _make_occurrence(rnd: Random, f: Any, depth: int) -> bytes:
    if f.type == F.TYPE_GROUP:
        inside = make_record(rnd, f.message_type, depth + 1)
        return encode_varint(f.number << 3 | 3) + inside + encode_varint(f.number << 3 | 4)
    if f.type == F.TYPE_MESSAGE:
        return encode_varint(f.number << 3 | 2) + add_length(
            make_record(rnd, f.message_type, depth + 1) if depth < 6 else b""
        )
    if f.type in (F.TYPE_STRING, F.TYPE_BYTES):
        return encode_varint(f.number << 3 | 2) + add_length(_make_text(rnd, f.type))
    wire = _get_wire_type(f)
    if f.is_repeated and rnd.randrange(2):
        several = b"".join(_make_scalar(rnd, f) for _ in range(rnd.randrange(4)))
        return encode_varint(f.number << 3 | 2) + add_length(several)
    return encode_varint(f.number << 3 | wire) + _make_scalar(rnd, f)


def _get_wire_type(f: Any) -> int:
    if f.type in (F.TYPE_DOUBLE, F.TYPE_FIXED64, F.TYPE_SFIXED64):
        return 1
    return 5 if f.type in (F.TYPE_FLOAT, F.TYPE_FIXED32, F.TYPE_SFIXED32) else 0


def _make_scalar(rnd: Random, f: Any) -> bytes:
    if f.enum_type is not None:
        return encode_varint(rnd.choice([v.number for v in f.enum_type.values]))
    if f.type == F.TYPE_DOUBLE:
        return struct.pack("<d", rnd.choice((0.0, -0.0, 1.5, 1e300, float("inf"), rnd.random())))
    if f.type == F.TYPE_FLOAT:
        return struct.pack("<f", rnd.choice((0.0, -0.0, 1.5, float("-inf"), rnd.random())))
    size = {1: 8, 5: 4}.get(_get_wire_type(f))
    if size:
        return rnd.randbytes(size)
    return encode_varint(
        rnd.choice((0, 1, 127, 128, 1 << 31, (1 << 32) - 1, 1 << 40, -1, -5, 1_700_000_000, rnd.getrandbits(64)))
    )


def _make_text(rnd: Random, kind: int) -> bytes:
    if kind == F.TYPE_BYTES:
        return rnd.randbytes(rnd.randrange(6))
    return "".join(rnd.choice('aé€😀 "\\\n') for _ in range(rnd.randrange(6))).encode()


def _make_unknown(rnd: Random, depth: int = 0) -> bytes:
    number = rnd.choice((21, 999, 3000))
    match rnd.randrange(5):
        case 0:
            return encode_varint(number << 3) + encode_varint(rnd.getrandbits(40))
        case 1:
            return encode_varint(number << 3 | 1) + bytes(8)
        case 2:
            return encode_varint(number << 3 | 2) + add_length(b"xyz")
        case 3 if depth < 4:
            return encode_varint(number << 3 | 3) + _make_unknown(rnd, depth + 1) + encode_varint(number << 3 | 4)
    return encode_varint(number << 3 | 5) + bytes(4)


def mutate(rnd: Random, data: bytes) -> bytes:
    """Return the bytes with some of them changed, inserted or removed."""
    out = bytearray(data)
    for _ in range(rnd.randint(1, 3)):
        at = rnd.randrange(len(out) + 1)
        match rnd.randrange(4):
            case 0:
                out[at:at] = rnd.randbytes(1)
            case 1:
                del out[at : at + rnd.randint(1, 3)]
            case 2:
                out[at : at + 1] = bytes([rnd.choice((0, 1, 0x7F, 0x80, 0xFF, rnd.randrange(256)))])
            case _:
                del out[at:]
    return bytes(out)
