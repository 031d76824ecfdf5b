"""Targets that kill their Spark worker, for tests of republish."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from sluice.pipelines.ports import Target


@contextmanager
def open_dying_target(
    open_target: Callable[[str], AbstractContextManager[Target]], folder: Path, name: str
) -> Iterator[Target]:
    """Open a target whose process dies before the first commit and, on the retry, after the commit.

    Marker files in `folder` make it die once at each point.
    """

    def exit_once(when: str) -> None:
        try:
            (folder / f"died-{when}-{name}").touch(exist_ok=False)
        except FileExistsError:
            return
        os._exit(9)

    with open_target(name) as target:
        mortal: Any = target
        commit = mortal.commit

        def commit_and_die(mark: Any) -> None:
            exit_once("before")
            commit(mark)
            exit_once("after")

        mortal.commit = commit_and_die
        yield target
