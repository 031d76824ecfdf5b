"""`.proto` texts → descriptors, by Google's protoc in a process of its own.

Promises: protoc sees a folder with these texts and Google's well-known files, and nothing else; its time, memory and
output are bounded. What does not compile raises UnusableSchema with protoc's first words, which name line and column.
A schema may be what registries keep of one that was compiled elsewhere: a FileDescriptorProto in Base64; or a text
that was written from one, with `option map_entry = true` in the messages that a map's entries are. Google's well-known
files are those of protoc, even if a registry has others under their names.
"""

from __future__ import annotations

import base64
import binascii
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sluice.pipelines.records.rows.value_reader import UnusableSchema
from sluice.pipelines.util.extras import name_missing, require
from sluice.pipelines.util.units import sanitize

if TYPE_CHECKING:
    from google.protobuf.descriptor_pb2 import FileDescriptorSet

MOST_TEXT = 1 << 20
"""Bytes of all texts together."""
MOST_FILES = 256
MOST_COMPILED = 8 << 20
"""Bytes of their descriptors."""
SECONDS = 30
"""Time that protoc may take."""
MEMORY = 1 << 30
"""Memory that it may take."""
GOOGLE = "google/protobuf/"
"""Where the well-known files are."""
_ENTRY = re.compile(r"\boption\s+map_entry\s*=\s*true\s*;")
"""An option that protoc refuses in sources. Apicurio's Java serializer registers it in place of `map<…>`."""
_MARK = "sluice_map_entry"
"""A reserved name in its place, which marks the message in the descriptors."""
_NAME = re.compile(r"(?!/)(?!.*(?:^|/)\.{1,2}(?:/|$))[A-Za-z0-9_./+-]{1,200}")
_IMPORT = re.compile(r'^\s*import\s+(?:public\s+|weak\s+|option\s+)?"([^"\n]{1,200})"\s*;', re.MULTILINE)
_OWN = re.compile(r"^schema\d*\.proto:(\d+):(\d+)")
"""The position of a protoc message in the schema itself, by the name that only this module uses."""
_NOISE = re.compile(r"warning:|^WARNING|^[IWEF][0-9]{4} |libprotobuf", re.IGNORECASE)
_PROTOC = f"""
import resource, sys
resource.setrlimit(resource.RLIMIT_CPU, ({SECONDS}, {SECONDS}))
resource.setrlimit(resource.RLIMIT_AS, ({MEMORY}, {MEMORY}))
resource.setrlimit(resource.RLIMIT_FSIZE, ({MOST_COMPILED}, {MOST_COMPILED}))
sys.path.append(sys.argv[1])
from grpc_tools import protoc
sys.exit(protoc.main(["protoc", *sys.argv[2:]]))
"""
"""Its first argument is the folder of grpc_tools: on an executor that is a pack's, which `python -I` does not know."""


def list_imports(text: str) -> tuple[str, ...]:
    """The files that a `.proto` text imports, but for the well-known ones."""
    return tuple(dict.fromkeys(n for n in _IMPORT.findall(text) if not n.startswith(GOOGLE)))


def load_imports(text: str, folder: Path) -> dict[str, str]:
    """Load the files that a text imports, directly or not, from a folder: their names and texts.

    One that is not there, or whose name leads out of the folder, is left out: protoc reports it as missing.
    """
    imports: dict[str, str] = {}
    queue = list(list_imports(text))
    for name in queue:
        path = folder / name
        inside = _NAME.fullmatch(name) and path.is_file() and path.resolve().is_relative_to(folder.resolve())
        if name in imports or not inside:
            continue
        if len(imports) >= MOST_FILES or path.stat().st_size > MOST_TEXT:
            raise UnusableSchema(name, f"is too large, or one of more than {MOST_FILES} files")
        try:
            imports[name] = path.read_text("utf-8")
        except (OSError, UnicodeDecodeError):
            raise UnusableSchema(name, "cannot be read as UTF-8") from None
        queue += list_imports(imports[name])
    return imports


def compile_schema(texts: Sequence[str], names: Sequence[str]) -> FileDescriptorSet:
    """Compile a schema, the last of the texts, whose references come before it under these names.

    Raises UnusableSchema; SetupError where protoc is needed and not installed.
    """
    if len(texts) != len(names) + 1 or len(texts) > MOST_FILES:
        raise UnusableSchema("", "refers to files whose names are not known, or to too many")
    if sum(map(len, texts)) > MOST_TEXT:
        raise UnusableSchema("", f"is larger than {MOST_TEXT:,} bytes with all that it refers to")
    for name in names:
        if not _NAME.fullmatch(name):
            raise UnusableSchema(sanitize(name), "is no name of a file that a schema may import")
    files = [n for n in zip(names, texts, strict=False) if n[0] not in WELL_KNOWN]
    names, texts = [n for n, _ in files], [*(t for _, t in files), texts[-1]]
    main = next(n for i in range(len(texts)) if (n := f"schema{i or ''}.proto") not in names)
    return _compile_files(tuple(zip((*names, main), texts, strict=True)))


@lru_cache(64)
def _compile_files(files: tuple[tuple[str, str], ...]) -> FileDescriptorSet:
    """The descriptors of files by their names and texts; where one is compiled already, each after its imports."""
    compiled_files, last = make_descriptor_set(), files[-1][0]
    own = {name: _from_base64(name, text) for name, text in files}
    if not any(own.values()):
        ready = {file.name: file for file in _by_protoc(dict(files), compiled_files, last).file}
    else:
        ready = {}
        for name, text in files:
            dependencies = make_descriptor_set()
            dependencies.file.extend(_in_order(ready))
            ready |= (
                {file.name: file for file in _by_protoc({name: text}, dependencies, name).file} if not own[name] else {}
            )
            ready[name] = own[name] or ready[name]
    compiled_files.file.extend(_in_order(ready, last))
    return compiled_files


def make_descriptor_set(data: bytes = b"") -> FileDescriptorSet:
    """Descriptors from their bytes. Raises ValueError."""
    with name_missing():
        from google.protobuf.descriptor_pb2 import FileDescriptorSet
        from google.protobuf.message import DecodeError
    try:
        return FileDescriptorSet.FromString(data)
    except DecodeError:
        raise ValueError("no descriptors") from None


def _from_base64(name: str, text: str) -> Any:
    """The descriptor of a file that was compiled elsewhere; None for a text."""
    with name_missing():
        from google.protobuf.descriptor_pb2 import FileDescriptorProto
        from google.protobuf.message import DecodeError
    try:
        data = base64.b64decode(text.strip(), validate=True)
        descriptor = FileDescriptorProto.FromString(data)
        descriptor.name = name
        return descriptor if data else None
    except (binascii.Error, ValueError, DecodeError):
        return None


def _by_protoc(sources: Mapping[str, str], dependencies: FileDescriptorSet, main: str) -> FileDescriptorSet:
    """The descriptors of the file `main` of these, and of all that it imports."""
    require("grpc_tools")
    with tempfile.TemporaryDirectory(prefix="sluice-protoc-") as scratch:
        root, out = Path(scratch, "files"), Path(scratch, "out.pb")
        for name, text in sources.items():
            path = root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(_mask_entries(text))
        arguments = [f"-I{root}", f"-I{_find_well_known()}", "--include_imports", f"--descriptor_set_out={out}"]
        if dependencies.file:
            Path(scratch, "known.pb").write_bytes(dependencies.SerializeToString())
            arguments.append(f"--descriptor_set_in={Path(scratch, 'known.pb')}")
        _run([*arguments, main], scratch)
        data = out.read_bytes()
    if len(data) > MOST_COMPILED:
        raise UnusableSchema("", f"has descriptors of more than {MOST_COMPILED:,} bytes")
    compiled_files = make_descriptor_set(data)
    for file in compiled_files.file:
        for message in file.message_type:
            _make_entries(message)
    return compiled_files


def _mask_entries(text: str) -> str:
    """A text in which protoc finds no `option map_entry`, but a mark."""
    mark = f"reserved {_MARK};" if re.search(r"^\s*edition\s*=", text, re.MULTILINE) else f'reserved "{_MARK}";'
    return _ENTRY.sub(lambda match: mark + "\n" * match[0].count("\n"), text)


def _make_entries(message: Any) -> None:
    """Make entries of maps of the marked messages in a message."""
    for inside in message.nested_type:
        _make_entries(inside)
        if _MARK in inside.reserved_name:
            inside.reserved_name.remove(_MARK)
            inside.options.map_entry = True


def _run(arguments: Sequence[str], scratch: str) -> None:
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-c", _PROTOC, str(_find_well_known().parent.parent), *arguments],
            cwd=scratch,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=4 * SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise UnusableSchema("", "takes protoc too long") from None
    if done.returncode:
        output = done.stderr.decode("utf-8", "replace").replace(f"{scratch}/files/", "").splitlines()
        errors = [line for line in output if ": " in line and not _NOISE.search(line)] or [
            "protoc ended without a word"
        ]
        first = _OWN.sub(r"line \1, column \2", errors[0])
        raise UnusableSchema("", f"does not compile: {sanitize(first)}")


def _find_well_known() -> Path:
    with name_missing():
        import grpc_tools
    return Path(grpc_tools.__path__[0]) / "_proto"


def _in_order(files: Mapping[str, Any], last: str = "") -> list[Any]:
    """Files, each after its imports. With `last`, it comes last, and only files that it needs are there."""
    done: dict[str, Any] = {}
    roots = [last] if last else list(files)
    stack = [(name, False) for name in reversed(roots)]
    open_: set[str] = set()
    while stack:
        name, imports = stack.pop()
        if imports:
            open_.discard(name)
            done[name] = files.get(name) or _load_google(name)
        elif name in open_:
            raise UnusableSchema(sanitize(name), "imports itself in a circle")
        elif name not in done:
            file = files.get(name) or _load_google(name)
            open_.add(name)
            stack.append((name, True))
            stack += [(d, False) for d in file.dependency]
    return list(done.values())


_SHORT = ("any", "api", "descriptor", "duration", "empty", "field_mask", "source_context", "struct", "timestamp")
WELL_KNOWN = frozenset(f"{GOOGLE}{short}.proto" for short in (*_SHORT, "type", "wrappers"))


@lru_cache(32)
def _load_google(name: str) -> Any:
    """The descriptor of one of Google's well-known files."""
    import importlib

    with name_missing():
        from google.protobuf.descriptor_pb2 import FileDescriptorProto
    if name not in WELL_KNOWN:
        raise UnusableSchema("", f"imports {sanitize(name)}, which is not there")
    short = name.removeprefix(GOOGLE).removesuffix(".proto")
    descriptor = FileDescriptorProto()
    importlib.import_module(f"google.protobuf.{short}_pb2").DESCRIPTOR.CopyToProto(descriptor)
    return descriptor
