"""Optional files of the project, next to the feeds."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

from sluice.pipelines.feed.problems import problems_of, raise_problems
from sluice.pipelines.feed.settings import Settings
from sluice.pipelines.feed.yaml_file import YamlError, read_yaml

S = TypeVar("S", bound=Settings)


def load_optional(folder: Path, name: str, kind: type[S], environ: Mapping[str, str], page: str) -> S:
    """The settings in that file of the folder, or those without one. `page`: the one that lists its keys. Raises
    FeedError."""
    path = folder / name
    if not path.exists():
        return kind()
    try:
        return kind.model_validate(read_yaml(path, environ, folder).data)
    except YamlError as error:
        raise_problems([(str(path), p) for p in error.problems], page)
    except ValueError as error:
        raise_problems([(str(path), p) for p in problems_of(error, kind)], page)
