"""Keeps what Dagster shows in step with the project's files: a new feed, contract or report shows within seconds.

Promises: the servers load again only when a file of those that shape the definitions has changed, and then stayed the
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
_RELOAD_SECONDS = 120.0
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


def read_stamps(project: Project) -> Stamps:
    """A digest of the files that shape Dagster's definitions: feeds, contracts, reports, and last-seen facts."""
    times: dict[str, tuple[int, int]] = {}
    for folder in (project.feeds_folder, project.root / "reports", project.state / "seen"):
        for path in folder.iterdir() if folder.is_dir() else ():
            if path.suffix in _ENDINGS and not path.name.startswith("."):
                with suppress(OSError):  # gone since
                    stat = path.stat()
                    times[str(path.relative_to(project.root))] = (stat.st_mtime_ns, stat.st_size)
    return times


@dataclass
class Changes:
    """Lists changes since Dagster's servers loaded the project; `loaded` is the state of its files then."""

    project: Project
    loaded: Stamps
    _seen: Stamps | None = None

    def take(self) -> list[str]:
        """The files that were made, changed or removed, if none of them has changed since the last look. They count as
        loaded from then on."""
        now = read_stamps(self.project)
        before, self._seen = self._seen, now
        if now == self.loaded or now != before:
            return []
        changed = sorted(p for p in {*now, *self.loaded} if now.get(p) != self.loaded.get(p))
        self.loaded = now
        return changed


def reload_location(address: str, location: str) -> str | None:
    """Have Dagster's web server there load the location again. Returns what is wrong with it now, or None.

    Raises OSError if the server does not answer.
    """
    from urllib.request import Request, urlopen

    body = json.dumps({"query": _RELOAD, "variables": {"name": location}}).encode()
    request = Request(f"{address}/graphql", body, {"content-type": "application/json"})
    with urlopen(request, timeout=_RELOAD_SECONDS) as answer:
        result = json.load(answer)
    entry = (result.get("data") or {}).get("reloadRepositoryLocation") or {"message": str(result.get("errors"))}
    location_state = entry.get("locationOrLoadError") or entry
    return (
        (location_state.get("message") or location_state["__typename"])
        if location_state.get("__typename") != "RepositoryLocation"
        else None
    )
