"""Targets in Spark's workers that die, for tests of republish."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from sluice.pipelines.ports import Target


@contextmanager
def opened(open_target: Callable[[str], AbstractContextManager[Target]], folder: Path, name: str) -> Iterator[Target]:
    """A target whose process ends before its first commit, and after that of the next one."""

    def die(when: str) -> None:
        try:
            (folder / f"died-{when}-{name}").touch(exist_ok=False)
        except FileExistsError:
            return
        os._exit(9)

    with open_target(name) as target:
        made: Any = target
        commit = made.commit

        def commit_and_die(mark: Any) -> None:
            die("before")
            commit(mark)
            die("after")

        made.commit = commit_and_die
        yield target
