"""`sluice …` with small republish transactions, in a process that can die after a step of the republish:

    python -m tests.integration.republish_cut STEP TIMES LANE_OFFSETS sluice's words …

The process dies after the TIMES-th execution of STEP; with 0 it never dies.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from sluice.cli import main as cli
from sluice.pipelines.republishing import coordinates, lanes, republish_plan, send_lane
from sluice.resources.kafka.produce.sender import KafkaTarget

STEPS: dict[str, tuple[Any, str]] = {
    "begun": (KafkaTarget, "begin"),
    "sent": (KafkaTarget, "send"),
    "mapped": (coordinates, "write"),
    "committed": (KafkaTarget, "commit"),
    "lane": (send_lane.Run, "_finish"),
    "all": (lanes, "finish"),
}


def crash_after(step: str, times: int) -> None:
    """Patch a step so that this process exits after its `times`-th execution."""
    owner, name = STEPS[step]
    call, remaining = getattr(owner, name), [times]

    def call_and_die(*args: Any, **options: Any) -> Any:
        returned = call(*args, **options)
        remaining[0] -= 1
        if remaining[0] == 0:
            os._exit(9)
        return returned

    setattr(owner, name, call_and_die)


def main(step: str, times: str, lane_offsets: str, *words: str) -> int:
    send_lane.TRANSACTION_BYTES, vars(send_lane)["CHUNK_ROWS"] = 3000, 100
    republish_plan.LANE_OFFSETS = int(lane_offsets)
    crash_after(step, int(times))
    return cli.main(list(words))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
