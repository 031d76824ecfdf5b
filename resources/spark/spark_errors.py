"""Reads Spark's errors as its driver reports them: the line with the cause, the host, and the remedy.

telling(text)     the line with the cause
cause(error)      the same, of an exception, with Spark's error around it
host(text)        the host where the named task failed
excluded(text)    whether Spark gave up since it had excluded every executor (spark.excludeOnFailure)
ended(text)       whether the application was ended by its master
Ended             executors that ended, and why
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

from sluice.pipelines.util.units import join_first

_LINE = 500
_SHOWN = 3
_FULL = "No space left on device"
_NO_ROOM = re.compile(rf"{_FULL}|^tar: .*: Wrote only \d+ of \d+ bytes", re.MULTILINE)
"""Messages of Java, and of the `tar` that unpacks archives, for a full disk."""
_EXCLUDED = "excludeOnFailure"
_ENDED = re.compile(r"Master removed our application|SparkContext was shut ?down|stopped SparkContext")
_ON_PURPOSE = re.compile(r"killed by driver|decommission", re.IGNORECASE)
"""Spark's words for executors that it ended itself."""
_PREFIX = re.compile(r"^(Unable to create executor due to|Executor self-exiting due to ?:)\s*")
_LOST = re.compile(r"Lost executor (\S+) on (\S+): (.*)")
"""The driver's log line for an executor that ended, with its number and host."""
EXCLUSION = "`spark.conf` controls when Spark excludes a host (spark.excludeOnFailure.…)"
ROOM_THERE = (
    "free space on these hosts where Spark works (SPARK_WORKER_DIR and SPARK_LOCAL_DIRS of the worker); have it remove"
    " what old applications left (spark.worker.cleanup.enabled)"
)
PRINTED = "see their output: the application's stderr on the workers"


def cause(error: Exception) -> str:
    """Return why a job failed, in one line of at most 500 characters."""
    text = str(error)
    message, address = telling(text) or type(error).__name__, host(text)
    where = f"on {address}: " if address else ""
    if is_excluded(text):
        where = f"Spark excluded every executor, the last one {where or 'since: '}"
    return f"{where}{message}"[:_LINE]


def telling(text: str) -> str:
    """Return the line with the cause from a Java stack trace around a Python one; empty if there is none."""
    _, traceback, python = text.rpartition("Traceback (most recent call last):")
    if traceback and (match := re.search(r"^[A-Za-z_][\w.]*(?::.*)?$", python, re.MULTILINE)):
        return match[0]
    if lost := re.search(r"most recent failure:\s*Lost task .*?\): (.+)", text, re.IGNORECASE):
        return lost[1]
    lines = [line.strip(" :") for line in text.splitlines() if line.strip(" :")]
    return next((line for line in lines if not line.startswith("An error occurred while")), "")


def host(text: str) -> str:
    """Return the host of the task that failed last.

    Empty if the error is not of a task, or the host is this machine.
    """
    hosts = re.findall(r"\(TID \d+\) \((\S+) executor (?!driver\b)", text)
    return hosts[-1] if hosts else ""


def is_excluded(text: str) -> bool:
    return f"due to node and executor {_EXCLUDED}" in text


def is_ended(text: str) -> bool:
    return _ENDED.search(text) is not None


def full(*texts: str) -> bool:
    """Return whether a disk was full: Spark's own, not the lake's, whose errors are ours."""
    return any(_NO_ROOM.search(line) for line in texts)


class Ended:
    """Executors of an application that ended without being asked to, and the reasons.

    They are recorded while the application runs: an ended context has no data. The last events are only in the
    driver's log: `printed` returns its last lines.
    """

    def __init__(self, printed: Callable[[], str] = lambda: "") -> None:
        self._printed = printed
        self._application = ""
        self._counted = (0, 0)
        self._why: dict[str, tuple[str, str]] = {}

    def look(self, spark: Any) -> None:
        """Record the events of this context's driver since the last call. Raises nothing."""
        with suppress(Exception):  # the context may just have ended
            context = spark._jsc.sc()
            counted = context.statusStore().executorList(False).size(), len(context.statusTracker().getExecutorInfos())
            if self._application != spark.applicationId:
                self._application, self._why = spark.applicationId, {}
            elif counted == self._counted:
                return
            every = context.statusStore().executorList(False)
            for one in (every.apply(i) for i in range(every.size())):
                if not one.isActive():
                    reason = one.removeReason()
                    address, why = one.hostPort().rpartition(":")[0], reason.get() if reason.isDefined() else ""
                    self._why.setdefault(one.id(), (address, why))
            self._counted = counted

    def summarize(self) -> tuple[str, str]:
        """Return what happened to them, and the remedy; empty texts if none ended."""
        lost = {name: (address, why) for name, address, why in _LOST.findall(self._printed())}
        return summarize_ends({**lost, **self._why}.values())


def summarize_ends(ends: Iterable[tuple[str, str]]) -> tuple[str, str]:
    """Summarize executors that ended, from their hosts and Spark's reasons; return text and remedy.

    Both are empty if none ended by itself. The most frequent reason stands for all.
    """
    remaining = [
        (address, _PREFIX.sub("", why.strip()).rstrip(".")) for address, why in ends if not _ON_PURPOSE.search(why)
    ]
    if not remaining:
        return "", ""
    reasons = Counter(_FULL if full(why) else why.partition("\n")[0] for _, why in remaining)
    why = reasons.most_common(1)[0][0] or "no reason is given"
    where = join_first(dict.fromkeys(address for address, _ in remaining), _SHOWN)
    several = f"{len(remaining)} executors on {where} ended" if len(remaining) > 1 else f"an executor on {where} ended"
    return f"{several}: {why[:_LINE]}", ROOM_THERE if full(*(why for _, why in remaining)) else PRINTED
