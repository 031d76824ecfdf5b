"""Print the part of requirements.lock that compiles the loops and builds the wheel, with its markers and hashes.

    python infra/wheel_requirements.py     in the checkout; needs no package

These are setuptools, numba, the requirements of Sluice and of its extra `kafka`, and what these require.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_NAME = re.compile(r"[\w.-]+")


def main() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wishes = [*project["dependencies"], *project["optional-dependencies"]["kafka"]]
    names = {"setuptools", "numba", *(_NAME.findall(wish)[0].lower() for wish in wishes)}
    pins = re.split(r"^(?=\w)", (ROOT / "requirements.lock").read_text(), flags=re.MULTILINE)[1:]
    before = 0
    while before != len(names):  # a pin names its dependents below `# via`
        before = len(names)
        names |= {_NAME.findall(pin)[0] for pin in pins if names & {*_NAME.findall(pin.partition("# via")[2])}}
    print("".join(pin for pin in pins if _NAME.findall(pin)[0] in names), end="")


if __name__ == "__main__":
    main()
