"""A hash of the sources that a compiled loop is made of. Light."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

ROOM = Path(__file__).parents[1]
"""The folder of `sluice.pipelines.records`."""
_IMPORT = re.compile(r"^from sluice\.pipelines\.records\.([\w.]+) import", re.MULTILINE)


def source_stamp(module: str) -> str:
    """Return a hash of a module's source and of all sources of this room that it imports.

    `module` is relative to `sluice.pipelines.records`, such as `json.scan`.
    """
    modules = [module]
    digest = hashlib.sha256()
    for name in modules:  # grows while it is walked
        text = (ROOM / f"{name.replace('.', '/')}.py").read_bytes()
        digest.update(hashlib.sha256(text).digest())
        modules += [n for n in dict.fromkeys(_IMPORT.findall(text.decode())) if n not in modules]
    return digest.hexdigest()
