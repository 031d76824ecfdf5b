"""Logs as JSON, one object a line, and what each line is about.

Every line has `time`, `level`, `logger`, `message`, and the keys of `ABOUT`, null where they do not apply:

    {"time": "2026-11-20T14:05:00.123Z", "level": "info", "logger": "sluice", "run": "5f…", "feed": "orders",
     "batch": 7, "window": "2026-11-20T13:00", "task": null, "message": "land"}

Other keys come from the line itself (`extra={"about": {...}}`). `log_context` sets the keys for the current thread;
threads that it starts set their own. To run several feeds, use a thread for each.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any

VARIABLE = "SLUICE_LOG_FORMAT"
"""The environment variable that chooses how logs look: `text` or `json`. Runs that Dagster launches inherit it."""
FORMATS = ("text", "json")
ABOUT = ("run", "feed", "batch", "window", "task")
OURS = "sluice"
"""The logger above all of ours."""

_about: ContextVar[Mapping[str, Any]] = ContextVar("about", default={})  # noqa: B039 - it is never changed in place


def as_json() -> bool:
    """Returns true if this process logs JSON."""
    return os.environ.get(VARIABLE) == "json"


@contextmanager
def log_context(**what: str | int | None) -> Iterator[None]:
    """Add these keys to the log lines of this thread until the block ends. None adds nothing."""
    before = _about.get()
    _about.set({**before, **{k: v for k, v in what.items() if v is not None}})
    try:
        yield
    finally:
        _about.set(before)


def get_context() -> Mapping[str, Any]:
    """Returns the keys of this thread's log lines, for `log_context` in its helper threads."""
    return _about.get()


class JsonLines(logging.Formatter):
    """A line of JSON for each record."""

    def format(self, record: logging.LogRecord) -> str:
        own: Mapping[str, Any] = getattr(record, "about", {})
        fields = {**_about.get(), **own}
        line = {
            "time": datetime.fromtimestamp(record.created, UTC)
            .isoformat(timespec="milliseconds")
            .replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            **{key: fields.pop(key, None) for key in ABOUT},
            "message": record.getMessage(),
            **fields,
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=True, default=str)


@contextmanager
def restore_handlers(log: logging.Logger) -> Iterator[None]:
    """Send records of this logger and ours to stderr as JSON until the block ends, if this process logs JSON."""
    if not as_json():
        yield
        return
    written = next((h for h in logging.getLogger().handlers if isinstance(h, Line)), None)  # the command line's
    handler, loggers = written or Line(), [log] if written else [log, logging.getLogger(OURS)]
    for logger in (loggers := [a for a in loggers if not any(isinstance(h, Line) for h in a.handlers)]):
        logger.handlers.insert(0, handler)  # before Dagster's own, which changes the message for all that follow
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeHandler(handler)


class Line(logging.Handler):
    """Writes JSON lines to stderr's descriptor. With `also`, to that one, too, while stderr leads elsewhere: during a
    run from the command line it leads into the run's log in Dagster."""

    def __init__(self, also: int | None = None) -> None:
        super().__init__()
        self._also = also
        self.setFormatter(JsonLines())

    def emit(self, record: logging.LogRecord) -> None:
        try:
            data, own = f"{self.format(record)}\n".encode(), sys.stderr.fileno()
            os.write(own, data)
            if self._also is not None and not os.path.sameopenfile(own, self._also):
                os.write(self._also, data)
        except (OSError, ValueError):  # its reader is gone; that does not end a run
            pass
        except Exception:  # noqa: BLE001 - a message that does not fit its arguments: reported as by any handler
            self.handleError(record)
