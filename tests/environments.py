"""Virtual environments that share packages of the running one, and need no index."""

from __future__ import annotations

import re
import sysconfig
import tomllib
import venv
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
DISTRIBUTION = PROJECT["name"]


def create_environment(folder: Path, distributions: Iterable[str] | None = None) -> None:
    """Create a virtual environment with pip and these distributions; None: all but Sluice."""
    venv.create(folder, symlinks=True)
    (packages,) = folder.glob("lib/python3*/site-packages")
    shared = Path(sysconfig.get_path("purelib"))
    if distributions is None:
        names = {path.name for path in shared.iterdir() if not path.name.startswith(("kafka_sluice", "__editable__"))}
    else:
        files = [path for name in ("pip", *distributions) for path in metadata.files(name) or ()]
        names = {path.parts[0] for path in files} - {"..", "__pycache__"}
    for name in names:
        (packages / name).symlink_to(shared / name)
    pip = folder / "bin/pip"
    pip.write_text(f'#!/bin/sh\nexec {folder}/bin/python -m pip "$@"\n')
    pip.chmod(0o755)


def list_distributions(*extras: str) -> set[str]:
    """Returns the installed distributions that Sluice with these extras requires, other than itself."""
    optional = PROJECT["optional-dependencies"]
    pending = [*map(Requirement, (*PROJECT["dependencies"], *(w for extra in extras for w in optional[extra])))]
    names, visited = set(), set()
    while pending:
        wish = pending.pop()
        if str(wish) in visited or not (wish.marker is None or wish.marker.evaluate({"extra": ""})):
            continue
        visited.add(str(wish))
        if wish.name == DISTRIBUTION:
            pending += [Requirement(w) for extra in wish.extras for w in optional[extra]]
            continue
        names.add(normalize(wish.name))
        for needed in map(Requirement, metadata.requires(wish.name) or ()):
            if needed.marker is None or any(needed.marker.evaluate({"extra": e}) for e in ("", *wish.extras)):
                needed.marker = None
                pending.append(needed)
    return names


def normalize(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
