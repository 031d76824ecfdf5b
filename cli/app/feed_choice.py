"""Feeds on the command line: names, patterns, or all of the project."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Annotated

import typer

from sluice.cli.app import completers
from sluice.cli.app.parameters import flag
from sluice.cli.app.usage import is_window
from sluice.cli.terminal.output import CommandOutput
from sluice.pipelines.errors import FeedError, SluiceError, UsageError, choose_exit_code

if TYPE_CHECKING:
    from sluice.assets.specs.feed_files import FeedFiles

FeedNames = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="FEED",
        help="Names of feeds, as in feeds/FEED.yaml, or patterns.",
        show_default=False,
        autocompletion=completers.complete_feeds,
    ),
]
All = Annotated[bool, flag("--all", "All feeds of the project.")]
_PATTERN = 'a pattern, such as "*" for all'


def choose_feeds(files: FeedFiles, names: Sequence[str], *, everything: bool | None) -> list[str]:
    """Returns the names of the requested feeds, sorted; with `everything` those whose files are valid. It is None in
    commands without --all.

    Raises UsageError for no feed, or both; FeedError for an unknown name or an invalid file.
    """
    if everything and names:
        raise UsageError("--all together with feeds", remedy="use either --all or names")
    if not everything and not names:
        raise UsageError("no feed", remedy=f"add names of feeds, or {'--all' if everything is False else _PATTERN}")
    chosen = set(files.feeds) if everything else set[str]()
    if windows := [name for name in names if is_window(name)]:
        raise UsageError(f"a window in place of a feed: {windows[0]}", remedy=f"write it as --window {windows[0]}")
    for name in names:
        is_pattern = any(c in name for c in "*?[")
        matching = {n for n in files.feeds if fnmatchcase(n, name)} if is_pattern else {files.feed(name).name}
        if not matching:
            raise FeedError(f"no feed matches {name}", remedy=files.instead_of(name))
        chosen |= matching
    if not chosen:
        raise FeedError("no feed can be loaded", remedy="sluice feeds check")
    return sorted(chosen)


def run_each(
    files: FeedFiles,
    names: Sequence[str],
    run: Callable[[str], int | None],
    terminal: CommandOutput,
    *,
    everything: bool | None,
) -> int:
    """Run a command for each requested feed, in order. Of several, one that fails does not stop the others.

    Raises as `choose_feeds`, and the error of a single feed. Returns the exit code.
    """
    chosen = choose_feeds(files, names, everything=everything)
    if len(chosen) == 1:
        return run(chosen[0]) or 0
    codes, errors = [0], list[SluiceError](files.broken.values() if everything else ())
    for name in chosen:
        try:
            codes.append(run(name) or 0)
        except SluiceError as error:
            errors.append(error)
    for problem in errors:
        terminal.fail(problem)
    return max(*codes, choose_exit_code(errors))
