"""A peer's own process: it reports when it is ready, lands on request, and ends when its input closes.

One JSON document a line. In: the assignment, then `{"out": folder}` for each landing. Out: `{"versions": …}` once
ready, then `{"detail": …}` when a landing is done. Whatever libraries print goes to stderr.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class PeerTask:
    """A whole topic to land, to the end of each partition, on `cores` cores, typed by `schema` if there is one.

    `jars` is a folder, or empty; `contract` the text of a contract for peers that check rows, or empty;
    `format` the format of the values, if not JSON.
    """

    bootstrap: str
    topic: str
    ends: dict[int, int]
    cores: int
    jars: str = ""
    schema: dict[str, str] = field(default_factory=dict)
    contract: str = ""
    format: str = ""

    @property
    def records(self) -> int:
        return sum(self.ends.values())

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> PeerTask:
        document = json.loads(text)
        return cls(**document | {"ends": {int(p): end for p, end in document["ends"].items()}})


@dataclass(frozen=True, slots=True)
class Ready:
    """A peer that stands by: `land` writes everything below a new folder and may tell where its time went."""

    land: Callable[[Path], dict[str, Any]]
    versions: dict[str, str]


def serve(stand: Callable[[PeerTask], AbstractContextManager[Ready]]) -> None:
    """Be a peer. A landing that raises ends the process; its traceback is on stderr."""
    from sluice.cli.terminal.output import claimed_stdout  # programs take only the task from here

    with claimed_stdout() as answers, stand(PeerTask.from_json(sys.stdin.readline())) as ready:
        print(json.dumps({"versions": ready.versions}), file=answers, flush=True)
        for line in sys.stdin:
            detail = ready.land(Path(json.loads(line)["out"]))
            print(json.dumps({"detail": detail}), file=answers, flush=True)
