"""Requests as the configuration of runs, and runs over many feeds by Dagster's records.

A run over many feeds has the requests in its configuration, and the outcomes in its tags.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

import dagster as dg
from pydantic import Field

from sluice.assets.instance.internals import RUN_KEY_TAG
from sluice.assets.runs.run_session import FEED_TAG
from sluice.assets.specs.asset_specs import closing_cron, closings_until, now
from sluice.pipelines.batch.result import Skip
from sluice.pipelines.errors import UsageError
from sluice.pipelines.feed.feed import SHARED
from sluice.pipelines.feed.sections import WindowSettings
from sluice.pipelines.model.kafka import TopicPartition
from sluice.pipelines.model.plans import AskedRange, Request, RequestKind
from sluice.pipelines.planning.windows import check_aligned
from sluice.pipelines.ports import Clock
from sluice.pipelines.util.units import show_instant, show_window

# No `from __future__ import annotations` here: Dagster reads the annotations of `Config` themselves, not as text.


class PartitionConfig(dg.Config):
    topic: str
    partition: int


class OffsetsConfig(dg.Config):
    """Offsets from `start` up to `end`, which is not included."""

    topic: str
    partition: int
    start: int
    end: int


class LandConfig(dg.Config):
    """The ranges to land. By default, everything pending."""

    offsets: list[OffsetsConfig] = Field(default=[], description="Land exactly these ranges, instead of catching up.")
    window: str = Field(default="", description="Land this window, such as 2026-11-20T14:00, instead of catching up.")
    until: str = Field(
        default="", description="With `window`: land all windows from it up to this one, which is not included."
    )
    only: list[PartitionConfig] = Field(default=[], description="Land these partitions only.")
    replace: bool = Field(
        default=False, description="Land the requested windows or offsets again, instead of pending ones."
    )
    skip_to: str = Field(
        default="", description="Skip pending offsets: to the end (`latest`), or up to an ISO time with zone."
    )
    reason: str = Field(default="", description="Why it is skipped; the ledger keeps the reason.")

    def request(self, settings: WindowSettings | None = None) -> Request:
        """The request that this configures, for a feed with these windows (default: hours). Raises UsageError."""
        ranges = tuple(AskedRange(o.topic, o.partition, o.start, o.end) for o in self.offsets)
        only = tuple(TopicPartition(p.topic, p.partition) for p in self.only)
        if self.window:
            settings = settings or WindowSettings()
            first, until = (window_start(text, settings) if text else None for text in (self.window, self.until))
            if until is None and len(windows := settings.list_named(self.window)) > 1:
                until = settings.end_of(windows[-1])
            return Request(RequestKind.WINDOW, (), first, only, until, self.replace)
        if self.until:
            raise UsageError("`until` without `window`", remedy="say where to begin: window: 2026-11-20T14:00")
        kind = RequestKind.OFFSETS if ranges else RequestKind.CATCH_UP
        return Request(kind, ranges, only=only, replace=self.replace)

    def skip(self) -> Skip | None:
        """Returns the ranges to skip first. Raises UsageError."""
        return Skip.parse(self.skip_to, self.reason)


def window_start(text: str, settings: WindowSettings) -> int:
    try:
        return settings.parse_name(text)
    except ValueError as error:
        raise UsageError(f"{text!r} {error}", remedy="such as 2026-11-20T14:00") from None


def list_windows(first: str, until: str, settings: WindowSettings) -> Sequence[int]:
    """Returns the starts (ms) of the windows from `first` up to `until`. If that is empty: of those that `first` names.

    Raises UsageError.
    """
    start = window_start(first, settings)
    end = window_start(until, settings) if until else settings.end_of(settings.list_named(first)[-1])
    check_aligned(start, settings)
    check_aligned(end, settings)
    if start >= end:
        raise UsageError(f"no window lies between {first} and {until}", remedy="`until` must be later")
    return settings.list_starts(start, end)


class FeedConfig(LandConfig):
    """One feed with its request."""

    feed: str


CATCH_UP, LAND = "catch_up", "land_and_commit"
"""The job that lands any request of one feed, and its op."""


def catch_up_config(feed: str, request: Request, skip: Skip | None = None) -> dict[str, Any]:
    """Returns the configuration of the job `catch_up` for a request of a feed."""
    config = {"feed": feed} | request_config(request)
    if skip:
        config |= {"skip_to": "latest" if skip.to is None else show_instant(skip.to), "reason": skip.reason}
    return {"ops": {LAND: {"config": config}}}


def request_config(request: Request) -> dict[str, Any]:
    """The fields of `LandConfig` that ask for the request."""
    offsets = [{"topic": r.topic, "partition": r.partition, "start": r.start, "end": r.end} for r in request.ranges]
    only = [{"topic": p.topic, "partition": p.partition} for p in request.only]
    config = {"offsets": offsets, "only": only, "replace": request.replace}
    return config | {
        name: show_window(at) for name in ("window", "until") if (at := getattr(request, name)) is not None
    }


FLEET_TAG = "sluice/fleet"
"""Tag of a run over many feeds: the schedule whose feeds they are."""
DONE_TAG, FAILED_TAG, PASSES_TAG, LEFT_TAG = "sluice/done", "sluice/failed", "sluice/passes", "sluice/left"
ERRORS_TAG = "sluice/errors"
"""Tags of such a run that has ended: how many feeds are done, which failed, those of them whose failure passes by
itself, the feeds that were left to the next run, and by which errors the failed ones ended (`orders=GroupMoved`)."""
AT_WORK_TAG = "sluice/at_work"
"""Tag of such a run that has not ended, or was killed or canceled: the feeds that it was landing or committing."""

PENDING = "pending_feeds"
"""The op of such a run."""


def fleet_job(schedule: str) -> str:
    """The name of the job over the feeds of a schedule."""
    return f"pending_of_{schedule}_feeds"


def fleet_pool(schedule: str) -> str:
    """The Dagster pool of the job: one run of it after the other."""
    return f"sluice_{fleet_job(schedule)}"


def fleet_config(schedule: str, requests: Mapping[str, Request]) -> dict[str, Any]:
    """The configuration of the job that asks each feed for its request, in that order."""
    feeds = [{"feed": name} | request_config(request) for name, request in requests.items()]
    return {"ops": {op_name(PENDING, schedule): {"config": {"feeds": feeds}}}}


def asked_of(run: dg.DagsterRun) -> Mapping[str, Mapping[str, Any]] | None:
    """Returns the request of a run over many feeds, by feed; None for other runs. Empty: all of its feeds."""
    if FLEET_TAG not in run.tags:
        return None
    configs = (_drop_defaults(one) for one in _read_fleet(run).get("feeds", ()))
    return {str(one["feed"]): one if len(one) > 1 else _read_default(run) | one for one in configs}


def find_feeds(run: dg.DagsterRun, schedules: Mapping[str, str | None], landed: Mapping[dg.AssetKey, str]) -> set[str]:
    """Returns the feeds that the run works on, from any job or backfill.

    `schedules`: the feeds in question, with their schedule if known. `landed`: the same feeds by asset.
    """
    requests = asked_of(run)
    if requests:
        return requests.keys() & schedules.keys()
    if requests is not None:  # a run over all feeds of its schedule
        return {name for name, schedule in schedules.items() if schedule in (None, run.tags[FLEET_TAG])}
    selected = {landed[key] for key in run.asset_selection or () if key in landed}
    # A queued run of `catch_up` has no tag yet.
    return selected | ({run.tags.get(FEED_TAG, ""), _read_config(run, LAND).get("feed", "")} & schedules.keys())


def asked_of_feed(run: dg.DagsterRun, feed: str) -> Mapping[str, Any]:
    """Returns the request of such a run for one of its feeds, as configuration."""
    request = (asked_of(run) or {}).get(feed)
    return _read_default(run) if request is None else {k: v for k, v in request.items() if k != "feed"}


def _read_default(run: dg.DagsterRun) -> dict[str, Any]:
    """Returns the default request, for feeds without one of their own."""
    return _drop_defaults({k: v for k, v in _read_fleet(run).items() if k != "feeds"})


def _drop_defaults(config: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in config.items() if v}


def _read_fleet(run: dg.DagsterRun) -> Mapping[str, Any]:
    return _read_config(run, op_name(PENDING, run.tags[FLEET_TAG]))


def _read_config(run: dg.DagsterRun, op: str) -> Mapping[str, Any]:
    ops: Any = run.run_config.get("ops", {})
    config: Mapping[str, Any] = ops.get(op, {}).get("config", {})
    return config


_TAG_LENGTH = 2000
"""The longest value of a tag: PostgreSQL refuses one of more than 2,704 bytes, since Dagster has an index of them."""


def build_tags(tag: str, items: Iterable[str], inherited: Mapping[str, str]) -> dict[str, str]:
    """Returns the tag with the items, and `tag.2` and so on for those that do not fit. `inherited`: the run's tags of
    an earlier run, which are emptied."""
    values = [""]
    for item in items:
        if len(values[-1]) + 1 + len(item) > _TAG_LENGTH:
            values.append("")
        values[-1] = f"{values[-1]},{item}" if values[-1] else item
    tags = {f"{tag}.{number}" if number > 1 else tag: value for number, value in enumerate(values, 1) if value}
    return {key: "" for key in inherited if _is_part(key, tag)} | tags


def _is_part(key: str, tag: str) -> bool:
    return key == tag or key.startswith(f"{tag}.")


def _read_items(run: dg.DagsterRun, tag: str) -> Iterator[str]:
    values = (value for key, value in run.tags.items() if _is_part(key, tag))
    return (item for value in values for item in value.split(",") if item)


def named_in(run: dg.DagsterRun, tag: str) -> set[str]:
    """The feeds that a tag of the run names."""
    return {*_read_items(run, tag)}


def errors_in(run: dg.DagsterRun) -> Mapping[str, str]:
    """By feed, the class of the error that ended it in a run that has ended."""
    pairs = (pair.partition("=") for pair in _read_items(run, ERRORS_TAG))
    return {name: error for name, _, error in pairs}


def find_retried(instance: dg.DagsterInstance, run: dg.DagsterRun) -> set[str]:
    """Returns the feeds that did not succeed in the run that this one executes again from its failure. Empty, which is
    all feeds, for another run, and after one that was killed."""
    parent = instance.get_run_by_id(run.parent_run_id) if run.parent_run_id and run.is_resume_retry else None
    if parent is None or FLEET_TAG not in parent.tags:
        return set()
    if not parent.tags.get(DONE_TAG):
        return find_retried(instance, parent)
    return named_in(parent, FAILED_TAG) | named_in(parent, LEFT_TAG)


def reset_outcome(instance: dg.DagsterInstance, run: dg.DagsterRun) -> None:
    """Empty the tags about feeds that Dagster copied from the run that this one executes again."""
    if run.parent_run_id:
        tags = (build_tags(tag, (), run.tags) for tag in (FAILED_TAG, ERRORS_TAG, PASSES_TAG, LEFT_TAG, AT_WORK_TAG))
        instance.add_run_tags(run.run_id, {key: "" for emptied in (*tags, {DONE_TAG: ""}) for key in emptied})


def op_name(op: str, schedule: str) -> str:
    """The name of an op of the job over the feeds of a schedule."""
    return op if schedule == SHARED else f"{op}_{schedule}"


MORE_TAG = "sluice/more"
"""Tag of a run after which more is pending: it was asked for a part, or left the rest when its time was up."""

UNTIL_TAG = "sluice/until"
"""Tag of a run over several windows: its partition is the first of them, and this is where they end."""

OPEN_WINDOWS_TAG = "sluice/open_windows"
"""Tag of a run: the first window of its request that was still open."""

BETWEEN = "*/5 * * * *"
"""When the schedule ticks besides, to go on with a catch-up."""


class TickPolicy:
    """When the schedule of a job looks. `windows`: those of its feeds. `clock`: by which a look sees them closed, which
    may be behind the clock of the daemon that ticks. `runs`: the schedule's, by their job and `tags`.

    `unread`: the feeds whose ledgers the last look could not read. The next tick reads them again. `requested`: the key
    of the run that the last look requested last, or empty. Dagster drops the requests of a tick that took more than a
    minute, or whose daemon was killed: the next tick looks again.
    """

    def __init__(
        self, job: str, windows: Iterable[WindowSettings], clock: Clock = now, tags: Mapping[str, str] | None = None
    ) -> None:
        self.unread: frozenset[str] = frozenset()
        self.requested = ""
        self.runs, self._windows, self._clock = dg.RunsFilter(job_name=job, tags=tags), [*dict.fromkeys(windows)], clock
        self._last: int | None = None
        self._newest: dg.DagsterRun | None = None

    @property
    def crons(self) -> list[str]:
        return [*dict.fromkeys((*sorted(map(closing_cron, self._windows)), BETWEEN))]

    def is_due(self, instance: dg.DagsterInstance, at: datetime) -> bool:
        """Returns true if a survey is due.

        One is due when windows have closed since the last survey of this process, when that survey or the job's last
        run left pending windows, or when Dagster made no run of the survey's requests.
        """
        now = int(at.timestamp() * 1000)
        last, self._last = self._last, min(now, self._clock())
        repeated = last is None or now <= last  # Dagster did not get the answer
        closed = repeated or any(closings_until(w, last or 0) < closings_until(w, now) for w in self._windows)
        self._newest = None if closed else next(iter(instance.get_runs(self.runs, limit=1)), None)
        if closed or _is_unfinished(self._newest) or not self._is_requested(self._newest):
            self.unread = frozenset()  # all feeds
            return True
        return bool(self.unread) and (self._newest is None or self._newest.is_finished)  # else it may leave more

    def _is_requested(self, newest: dg.DagsterRun | None) -> bool:
        """Returns whether the last look's requests have become runs, by the job's newest run."""
        return not self.requested or (newest is not None and newest.tags.get(RUN_KEY_TAG) == self.requested)

    def forget_look(self) -> None:
        """Make the next tick look: this one's look failed."""
        self._last = None

    @property
    def skip_reason(self) -> dg.SkipReason:
        """Why a tick does not look."""
        return dg.SkipReason(f"no window has closed since the last look{_describe(self._newest)}")


def _is_unfinished(run: dg.DagsterRun | None) -> bool:
    if run is None:
        return False
    well = run.status is dg.DagsterRunStatus.SUCCESS or run.tags.get(DONE_TAG, "0") not in ("", "0")
    return run.is_finished and well and bool(run.tags.get(MORE_TAG) or run.tags.get(LEFT_TAG))


def _describe(run: dg.DagsterRun | None) -> str:
    """Describes the newest run. It does not read the ledger, so it never reports that nothing is pending."""
    if run is None:
        return ""
    name = f"run {run.run_id[:8]}"
    if not run.is_finished:
        return f"; {name} has not ended (`sluice unstick` ends it if its process was killed)"
    if run.status is dg.DagsterRunStatus.SUCCESS:
        return f"; {name} completed its request"
    return f"; {name} did not succeed: the next look, when a window closes, requests the remaining windows again"
