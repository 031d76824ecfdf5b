"""Runs over many feeds by Dagster's records: job, steps, requests and outcomes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import dagster as dg

from sluice.assets.runs.run_config import request_config
from sluice.assets.runs.run_session import FEED_TAG
from sluice.pipelines.feed.feed import SHARED
from sluice.pipelines.model.plans import Request

FLEET_TAG = "sluice/fleet"
"""Tag of a run over many feeds: the schedule whose feeds they are."""
DONE_TAG, FAILED_TAG, PASSES_TAG, LEFT_TAG = "sluice/done", "sluice/failed", "sluice/passes", "sluice/left"
ERRORS_TAG = "sluice/errors"
"""Tags of such a run that has ended: how many feeds are done, which failed, those of them whose failure passes by
itself, the feeds that were left to the next run, and by which errors the failed ones ended (`orders=GroupMoved`)."""

OWED, LAND, COMMIT = "owed_feeds", "land_owed", "commit_owed"
"""The ops of such a run: what finds the feeds, and the two of each feed."""


def fleet_job(schedule: str) -> str:
    """The name of the job over the feeds of a schedule."""
    return f"owed_by_{schedule}_feeds"


def fleet_pool(schedule: str) -> str:
    """The Dagster pool of the job: one run of it after the other."""
    return f"sluice_{fleet_job(schedule)}"


def fleet_config(schedule: str, asked: Mapping[str, Request]) -> dict[str, Any]:
    """The configuration of the job that asks each feed for its request, in that order."""
    feeds = [{"feed": name} | request_config(request) for name, request in asked.items()]
    return {"ops": {op_name(OWED, schedule): {"config": {"feeds": feeds}}}}


def asked_of(run: dg.DagsterRun) -> Mapping[str, Mapping[str, Any]] | None:
    """Returns the request of a run over many feeds, by feed; None for other runs. Empty: all of its feeds."""
    if FLEET_TAG not in run.tags:
        return None
    said = (_said(one) for one in _config(run).get("feeds", ()))
    return {str(one["feed"]): one if len(one) > 1 else _of_all(run) | one for one in said}


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
    return selected | ({run.tags.get(FEED_TAG, "")} & schedules.keys())


def asked_of_feed(run: dg.DagsterRun, feed: str) -> Mapping[str, Any]:
    """What such a run was asked of one of its feeds, as configuration."""
    named = (asked_of(run) or {}).get(feed)
    return _of_all(run) if named is None else {k: v for k, v in named.items() if k != "feed"}


def _of_all(run: dg.DagsterRun) -> dict[str, Any]:
    """Returns the default request, for feeds without one of their own."""
    return _said({k: v for k, v in _config(run).items() if k != "feeds"})


def _said(config: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in config.items() if v}


def _config(run: dg.DagsterRun) -> Mapping[str, Any]:
    ops: Any = run.run_config.get("ops", {})
    found: Mapping[str, Any] = ops.get(op_name(OWED, run.tags[FLEET_TAG]), {}).get("config", {})
    return found


def named_in(run: dg.DagsterRun, tag: str) -> set[str]:
    """The feeds that a tag of the run names."""
    return {name for name in run.tags.get(tag, "").split(",") if name}


def errors_in(run: dg.DagsterRun) -> Mapping[str, str]:
    """By feed, the class of the error that ended it in a run that has ended."""
    pairs = (pair.partition("=") for pair in run.tags.get(ERRORS_TAG, "").split(","))
    return {name: error for name, _, error in pairs if name}


def at_work_at_the_end(instance: dg.DagsterInstance, run: dg.DagsterRun) -> set[str]:
    """The feeds whose steps had begun and not ended when the run did, as in one whose process died."""
    steps = instance.get_run_step_stats(run.run_id)
    return {feed for s in steps if s.start_time and not s.end_time and (feed := feed_at_work(s.step_key))}


def feed_at_work(step: str) -> str:
    """The feed whose step it is, by the step's key; empty for another step."""
    return step.partition("[")[2].removesuffix("]")


def op_name(op: str, schedule: str) -> str:
    """The name of an op of the job over the feeds of a schedule."""
    return op if schedule == SHARED else f"{op}_{schedule}"
