"""What Dagster's servers load as the code location: every feed and report of the project around the current folder.

If there are feed files and none of them loads, the location fails and names everything that is wrong.
"""

from __future__ import annotations

import gc
import sys

import dagster as dg

from sluice.assets.factory import build
from sluice.assets.instance.instance import check_home
from sluice.pipelines.util import COLLECTING
from sluice.resources.project import Project


def load() -> dg.Definitions:
    """The project's definitions, for Dagster's servers. Raises FeedError, and UsageError if they show another home."""
    project = Project.find()
    check_home(project, sys.argv)
    collecting = gc.isenabled()
    gc.set_threshold(*COLLECTING)
    gc.disable()  # hardly any of the new objects is garbage: looking for it would take a fifth of the time
    try:
        return build(project)
    finally:
        if collecting:
            gc.enable()


defs = load()
