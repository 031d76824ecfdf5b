"""Errors of `sluice`, `sluice.dagster` and the command line: `from sluice.errors import WindowIncomplete`.

`sluice.pipelines.errors` defines them and shows their tree.
"""

from sluice.pipelines.errors import *  # noqa: F403 - one name for each error, in one place
