"""Runs a whole republish: its lanes in tasks of the engine, or one after the other in this process.

Guarantee: `done.json` is written after every lane is done, so it names the whole map. If a run ends before
that, the next one carries out the lanes that are left, each behind its mark.
"""

from __future__ import annotations

import base64
import json
import pickle
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from sluice.pipelines.batch.carry_out import report_while_running
from sluice.pipelines.errors import SluiceError, UsageError, choose_exit_code
from sluice.pipelines.lake import paths
from sluice.pipelines.ledger import Ledger
from sluice.pipelines.model.plans import to_json
from sluice.pipelines.model.receipts import Progress, Reporter
from sluice.pipelines.ports import Clock, Engine, Lake, Target
from sluice.pipelines.records.shape import Shape
from sluice.pipelines.republishing.republish_plan import PartitionBy, Republish, pieces
from sluice.pipelines.republishing.send_lane import (
    FREELY,
    TRANSACTION_SECONDS,
    LaneSent,
    Pace,
    Report,
    Run,
    claim,
    finish,
    load,
    progress_of,
)
from sluice.pipelines.republishing.values import check_schema
from sluice.pipelines.util.documents import Flat
from sluice.pipelines.util.units import parse_size

STAGE = "send"
_SENT = TypeAdapter(LaneSent)


@dataclass(frozen=True, slots=True)
class Sent:
    """Records sent by a republish: by this run, and in all. `records_by_partition` counts this run's by target
    partition; `bytes` are those of its records before they are compressed; `took` is in seconds; `throttled_ms`: how
    long brokers had its lanes pause, summed up."""

    plan: Flat[Republish]
    records: int
    bytes: int
    transactions: int
    records_in_all: int
    took: float
    done_before: bool = False
    records_by_partition: dict[int, int] = field(default_factory=dict)
    throttled_ms: int = 0


@dataclass(frozen=True, slots=True)
class LaneSender:
    """Returns a picklable function that sends a lane.

    `open_target` opens the target under the name of a lane. `root` is the project's folder, in which the plan's
    function is looked for; `token` that of the run; `seconds`: for how long rows go into one transaction.
    """

    plan: Republish
    lake: Lake
    open_target: Callable[[str], AbstractContextManager[Target]]
    shape: Shape
    clock: Clock
    codec: int = 3
    pace: Pace = FREELY
    root: Path | None = None
    token: str = ""
    seconds: float = TRANSACTION_SECONDS

    def __call__(self, lane: int) -> str:
        """Carry the lane out. Returns the result or the error, as JSON. An error is no exception: an engine would try a
        lane again that another run has taken over."""
        try:
            return to_json(self.carry_out(lane))
        except SluiceError as error:
            return json.dumps({"error": base64.b64encode(pickle.dumps(error)).decode()})

    def carry_out(self, lane: int, report: Report = lambda offsets, paused: None) -> LaneSent:
        """Raises as `Run.carry_out`."""
        plan, function = self.plan, self.plan.wishes.function
        partitioner = load(function, self.root) if function and self.root else None
        with self.open_target(plan.lane_name(lane)) as target:
            ledger = Ledger(self.lake, plan.feed, self.clock)
            run = Run(
                plan,
                lane,
                self.token,
                ledger,
                self.lake,
                target,
                self.shape,
                self.clock,
                self.codec,
                self.pace,
                partitioner,
                report,
                self.seconds,
            )
            return run.carry_out()

    @property
    def alone(self) -> bool:
        """Returns whether one process must carry all lanes out: a bound on the speed holds for all together, and a
        function may be on this machine alone."""
        return self.plan.lanes == 1 or self.pace != FREELY or bool(self.plan.wishes.function)


def carry_out(sending: LaneSender, engine: Engine | None, report: Reporter) -> Sent:
    """Send the rest of the plan: lanes in parallel in the engine's tasks, or in this process without an engine.

    Raises Refused, UsageError, UnknownTopic, NotAuthorized, KafkaUnavailable, CommitFenced, Unknown, LakeUnavailable,
    SetupError and Failed (the engine): then run it again.
    """
    began, plan, lake = time.monotonic(), sending.plan, sending.lake
    if (done := lake.get(paths.republish_done_path(plan.feed, plan.id))) is not None:
        return Sent(plan, 0, 0, 0, json.loads(done)["records"], 0.0, done_before=True)
    check_schema(plan.wishes, sending.shape, plan.feed)
    sending = replace(sending, token=claim(lake, plan))
    lanes = _here(sending, report) if engine is None or sending.alone else _by_tasks(sending, engine, report)
    in_all = finish(lake, plan, sending.clock())
    partitions: dict[int, int] = {}
    for lane in lanes:
        for partition, records in lane.partitions.items():
            partitions[partition] = partitions.get(partition, 0) + records
    sums = (sum(lane.records for lane in lanes), sum(n.bytes for n in lanes), sum(n.transactions for n in lanes))
    throttled = sum(lane.throttled_ms for lane in lanes)
    return Sent(
        plan, *sums, in_all, round(time.monotonic() - began, 3), records_by_partition=partitions, throttled_ms=throttled
    )


def _here(sending: LaneSender, report: Reporter) -> list[LaneSent]:
    plan, sent, behind, before = sending.plan, list[LaneSent](), 0, 0
    for lane in range(plan.lanes):

        def tell(offsets: int, paused: int, behind: int = behind, before: int = before) -> None:
            report(_progress(plan, behind + offsets, before + paused))

        sent.append(sending.carry_out(lane, tell))
        behind += sum(p.end - p.start for p in pieces(plan, lane))
        before += sent[-1].throttled_ms
    return sent


def _by_tasks(sending: LaneSender, engine: Engine, report: Reporter) -> list[LaneSent]:
    plan, lake = sending.plan, sending.lake

    def get_progress() -> Progress:
        lanes = [progress_of(lake, plan, lane) for lane in range(plan.lanes)]
        return _progress(plan, sum(offsets for offsets, _ in lanes), sum(paused for _, paused in lanes))

    engine.start()
    with report_while_running(_progress(plan, 0, 0), get_progress, report):
        answers = engine.map(plan.feed, f"republish {plan.id}", sending, plan.lanes)
    # The gravest error decides: its exit code tells schedulers if another try can help.
    lanes = [json.loads(text) for text in answers]
    failed: list[SluiceError] = [pickle.loads(base64.b64decode(lane["error"])) for lane in lanes if "error" in lane]
    if failed:
        worst = choose_exit_code(failed)
        raise next(error for error in failed if error.exit_code == worst)
    return [_SENT.validate_python(lane) for lane in lanes]


def _progress(plan: Republish, offsets: int, paused: int) -> Progress:
    return Progress(STAGE, offsets, plan.offsets, f"(paused by a quota for {paused / 1000:.0f} s)" if paused else "")


_BY = (PartitionBy.KEY, PartitionBy.ROUND_ROBIN)


def way_of(keep: bool, by: str) -> tuple[PartitionBy, str]:
    """How partitions are chosen, and the function that does, if one does. `by` empty: nothing was said."""
    if keep and by:
        raise UsageError(f"partitions are kept, and chosen by {by}", remedy="say one of them")
    if ":" in by:
        return PartitionBy.FUNCTION, by
    if by and by not in _BY:
        raise UsageError(
            f"{by!r} is no way to choose a partition", remedy=f"one of {', '.join(_BY)}, or MODULE:FUNCTION"
        )
    return (PartitionBy.SAME if keep else PartitionBy(by or "key")), ""


def pace_of(text: str) -> Pace:
    """`5000` (records a second) or `5MB` (bytes); empty: as fast as it goes."""
    if not text:
        return Pace()
    try:
        pace = Pace(float(text)) if text.replace(".", "", 1).isdigit() else Pace(bytes=parse_size(text))
    except ValueError as error:
        raise UsageError(f"rate {text!r} {error}", remedy="such as 5000 (records) or 5MB (bytes)") from None
    if not (pace.records or pace.bytes):
        raise UsageError("a rate of 0 sends nothing", remedy="such as 5000 (records) or 5MB (bytes)")
    return pace


def check_resumed(options: Mapping[str, Any]) -> None:
    """Raises UsageError, with their names, for settings that the plan of a resumed republish already has."""
    if conflicting := [name for name, value in options.items() if value]:
        raise UsageError(
            f"a republish goes on as it was planned, and these contradict it: {', '.join(conflicting)}",
            remedy="leave them out, or plan another one, without resuming",
        )


def name_of(text: str) -> str:
    """A name for a republish; empty: none was given."""
    if text and not (text.isascii() and text.replace("-", "").replace("_", "").isalnum()):
        raise UsageError(f"{text!r} is no name", remedy="letters, digits, - and _")
    return text
