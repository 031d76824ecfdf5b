"""The modules of a process, for a worker: this module imports no others."""

import sys


def list_modules(number: int = 0) -> str:
    """Return the names of this process's modules, separated by spaces. `number`: of the task, not used."""
    return " ".join(sorted(sys.modules.keys() - {__name__, "tests"}))
