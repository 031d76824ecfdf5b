"""`sluice …` with small transactions of a republish, in a process that may die after a step of it:

    python -m tests.integration.republish_cut STEP TIMES LANE_OFFSETS sluice's words …

It dies when it has done the step so many times; 0: never.
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


def cut(step: str, times: int) -> None:
    """From now on this process dies after it did the step so many times."""
    owner, name = STEPS[step]
    does, left = getattr(owner, name), [times]

    def doing(*args: Any, **options: Any) -> Any:
        done = does(*args, **options)
        left[0] -= 1
        if left[0] == 0:
            os._exit(9)
        return done

    setattr(owner, name, doing)


def main(step: str, times: str, lane_offsets: str, *words: str) -> int:
    send_lane.TRANSACTION_BYTES, vars(send_lane)["CHUNK_ROWS"] = 3000, 100
    republish_plan.LANE_OFFSETS = int(lane_offsets)
    cut(step, int(times))
    return cli.main(list(words))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
