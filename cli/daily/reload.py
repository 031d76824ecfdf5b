"""Keeps what Dagster shows in step with the project's files: a new feed, contract or report shows within seconds.

Promises: the servers load anew only when a file of those that shape the definitions has changed, and then stayed the
same for a moment. Runs that are under way go on.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sluice.resources.project import Project

Stamps = Mapping[str, tuple[int, int]]
"""When each file was written last, and its length, by its path in the project."""

_ENDINGS = {".yaml", ".yml", ".json", ".sql"}
_SECONDS = 120.0
"""How long a location may take to load."""
_RELOAD = """
mutation ($name: String!) {
  reloadRepositoryLocation(repositoryLocationName: $name) {
    __typename
    ... on WorkspaceLocationEntry { locationOrLoadError { __typename ... on PythonError { message } } }
    ... on PythonError { message }
    ... on UnauthorizedError { message }
  }
}"""


def stamps(project: Project) -> Stamps:
    """Of the files that shape what Dagster shows: feeds, contracts, reports, and what runs last saw of a feed."""
    found: dict[str, tuple[int, int]] = {}
    for folder in (project.feeds_folder, project.root / "reports", project.state / "seen"):
        for path in folder.iterdir() if folder.is_dir() else ():
            if path.suffix in _ENDINGS and not path.name.startswith("."):
                with suppress(OSError):  # gone since
                    told = path.stat()
                    found[str(path.relative_to(project.root))] = (told.st_mtime_ns, told.st_size)
    return found


@dataclass
class Changes:
    """What has changed since Dagster's servers loaded the project: `loaded` is how its files were then."""

    project: Project
    loaded: Stamps
    _seen: Stamps | None = None

    def settled(self) -> list[str]:
        """The files that were made, changed or removed, if none of them has changed since the last look. They count as
        loaded from then on."""
        now = stamps(self.project)
        before, self._seen = self._seen, now
        if now == self.loaded or now != before:
            return []
        changed = sorted(p for p in {*now, *self.loaded} if now.get(p) != self.loaded.get(p))
        self.loaded = now
        return changed


def reload(address: str, location: str) -> str | None:
    """Have Dagster's web server there load the location anew. Returns what is wrong with it now, or None.

    Raises OSError if the server does not answer.
    """
    from urllib.request import Request, urlopen

    body = json.dumps({"query": _RELOAD, "variables": {"name": location}}).encode()
    asked = Request(f"{address}/graphql", body, {"content-type": "application/json"})
    with urlopen(asked, timeout=_SECONDS) as answer:
        said = json.load(answer)
    entry = (said.get("data") or {}).get("reloadRepositoryLocation") or {"message": str(said.get("errors"))}
    found = entry.get("locationOrLoadError") or entry
    return (found.get("message") or found["__typename"]) if found.get("__typename") != "RepositoryLocation" else None
