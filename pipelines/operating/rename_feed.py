"""Renames a feed: its file gets the new name, its ledger and its folders keep the former one (`stored_as`).

Nothing in the lake or in Kafka changes, so rows, offsets, history and the hour of the rename stay whole. After each
step the feed is valid, with its contract. A retired feed has the key `retired`, and stays in place as well.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from sluice.pipelines.errors import UsageError
from sluice.pipelines.feed.feed import Feed
from sluice.pipelines.feed.sections import NAME_PATTERN
from sluice.pipelines.lake import paths
from sluice.pipelines.ports import Lake
from sluice.pipelines.util.documents import Internal


def match_key(key: str) -> re.Pattern[str]:
    """Returns a pattern for a key of a feed file, with its lines."""
    return re.compile(rf"^{key}\s*:.*\n?(?:(?:[ \t]|- ).*\n?)*", re.MULTILINE)


def replace_file(path: Path, text: str) -> None:
    """Write the file in one step, with its permissions."""
    partial = path.with_name(f".{path.name}.tmp")
    partial.write_text(text, "utf-8")
    if path.exists():
        shutil.copymode(path, partial)
    os.replace(partial, path)


def retire(path: Path, lake: Lake, feed: Feed, *, retired: bool) -> None:
    """Let the feed of this file land nothing any more, or land again. Its line of the project's page goes."""
    text = match_key("retired").sub("", path.read_text("utf-8"))
    replace_file(path, f"retired: true\n{text}" if retired else text)
    if retired:
        lake.remove(paths.get_feed_row_path(feed.stored))


@dataclass(frozen=True, slots=True)
class Rename:
    """A new name of a feed. `contracts` are files by their new paths, `mentions` other files with the former name."""

    feed: str
    name: str
    stored_as: str
    group: str
    path: Path
    target: Path
    text: Internal[str]
    contracts: Mapping[Path, Path]
    mentions: tuple[Path, ...]

    def carry_out(self) -> None:
        """Write and move the files."""
        replace_file(self.path, self.text)  # without a key `feed`, still the former name
        for new, old in self.contracts.items():
            shutil.copy2(old, new)
        os.replace(self.path, self.target)
        for old in self.contracts.values():
            old.unlink()


def plan_rename(feed: Feed, path: Path, name: str, others: Mapping[str, Feed], root: Path) -> Rename:
    """Returns the changes of a rename. `path` is the feed's file, `root` the project's folder. Raises UsageError."""
    if not re.fullmatch(NAME_PATTERN, name):
        raise UsageError(f"{name!r} is no name of a feed", remedy="letters, digits, - and _, such as sales")
    text = path.read_text("utf-8")
    target = path if match_key("feed").search(text) else path.with_name(f"{name}{path.suffix}")
    taken = next((f"feed {f.name} has it" for f in others.values() if name in (f.name, f.stored) and f != feed), "")
    if taken or name == feed.name or (target != path and target.exists()):
        raise UsageError(f"{name} is not free: {taken or f'{target} exists'}", remedy="choose another name")
    text = match_key("feed").sub(f"feed: {name}\n", text, count=1)
    if not match_key("stored_as").search(text):
        text = f"stored_as: {feed.stored}\n{text}"
    contracts = sorted(p for p in path.parent.glob(f"{path.stem}.*") if p != path) if target != path else []
    word = re.compile(rf"(?<![\w-]){re.escape(feed.name)}(?![\w-])")
    read = (root / "fleet.yaml", root / "notify.yaml", *sorted((root / "reports").glob("*.sql")))
    return Rename(
        feed.name,
        name,
        feed.stored,
        feed.group,
        path,
        target,
        text,
        {p.with_name(name + p.name.removeprefix(path.stem)): p for p in contracts},
        tuple(p for p in read if p.is_file() and word.search(p.read_text("utf-8", "replace"))),
    )
