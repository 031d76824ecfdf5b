"""The `sluice` command: its subcommands, and how their errors are reported.

Exit codes: 0 done, 1 failed, 2 usage or configuration, 3 refused to protect data, 75 not yet, 130 interrupted. An
error is a message and what to do next, on stderr. With `--json` it is also a document with `error`, `message`, `remedy`
and `exit_code`. A traceback appears only with `--debug`. Commands import Dagster, Spark and numba only when they need
them.
"""

from __future__ import annotations

import errno
import sys
from collections.abc import Sequence
from contextlib import nullcontext

import typer

from sluice.cli.app import completers
from sluice.cli.app.menu import build_app
from sluice.cli.terminal import process
from sluice.cli.terminal.output import CommandOutput, claimed_stdout
from sluice.pipelines.errors import Failed, SluiceError, explain_memory_error
from sluice.pipelines.util import extras


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    words = sys.argv[1:] if arguments is None else arguments
    first = words[:1] if words and words[0] not in ("--version", "--help", "-h") else ["docs"]  # any command will do
    return run_app(build_app(*([] if completers.prepare() else first)), "sluice", arguments)


def run_app(commands: typer.Typer, name: str, arguments: Sequence[str] | None = None) -> int:
    """Run a command of an application and return its exit code. Its errors become messages and exit codes."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    process.handle_signals()
    try:
        with claimed_stdout() if "--json" in words else nullcontext() as documents:
            code = _run(commands, name, words, CommandOutput(documents))
        sys.stdout.flush()
    except BrokenPipeError:  # the reader of our output has closed it
        return process.hush()
    except OSError as error:  # the error's document had no room either
        print(f"error: stdout cannot be written: {error.strerror}", file=sys.stderr, flush=True)
        return process.hush()
    return code


def _run(commands: typer.Typer, name: str, words: list[str], terminal: CommandOutput) -> int:
    """Returns the command's exit code. Raises BrokenPipeError if the output's reader is gone."""
    try:
        code = int(commands(words, prog_name=name, standalone_mode=False, obj=terminal) or 0)
    except SystemExit:
        raise
    except Exception as error:  # noqa: BLE001 - any error becomes a message and an exit code here
        code = _tell_error(error, words, terminal)
    except BaseException:  # noqa: BLE001 - an interrupt, Python's or Dagster's, before typer could make a code of it
        code = process.INTERRUPTED
    if code == process.INTERRUPTED or (code and process.Interrupts.pending):
        return process.report_interrupt()
    return code


def _tell_error(error: Exception, words: list[str], terminal: CommandOutput) -> int:
    """Report the error, unless an interrupt caused it or the reader is gone. Returns the exit code."""
    if isinstance(error, BrokenPipeError) and terminal.unheard:
        raise error
    if process.Interrupts.pending:
        return process.INTERRUPTED
    problem = _as_sluice_error(error)
    if problem.message.startswith("Usage:"):  # a group without a command: its help
        print(problem.message)
        return problem.exit_code
    if "--debug" in words:
        terminal.traceback()
    terminal.fail(problem)
    terminal.print_document(problem, exit_code=problem.exit_code)
    return problem.exit_code


def _as_sluice_error(error: Exception) -> SluiceError:
    """Any exception as one of ours: of the command line, of the system, or unforeseen."""
    if isinstance(error, SluiceError):
        return error
    if isinstance(error, typer.BadParameter) or hasattr(error, "format_message"):
        from sluice.cli.app.usage import describe_usage

        return describe_usage(error)
    if isinstance(error, ModuleNotFoundError) and (lacking := extras.explain_import_error(error)):
        return lacking
    if isinstance(error, OSError) and error.errno != errno.ENOMEM:
        where = f": {error.filename}" if error.filename else ""
        remedy = _REMEDIES.get(error.errno or 0, "fix it")
        return Failed(f"{error.strerror or error}{where}", remedy=f"{remedy}, and run the command again")
    return explain_memory_error(error) or Failed(
        f"unexpected {type(error).__name__}: {error}",
        remedy="report this bug with the traceback of --debug; to check the lake: sluice audit FEED --strict",
    )


_REMEDIES = {
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), "check that this user may read it and write there"),
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "free space there"),
    **dict.fromkeys((errno.ENOENT, errno.ENOTDIR), "check the path"),
}
"""By the system's number of an error."""
