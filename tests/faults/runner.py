"""One run over a feed in a process of its own: land what is owed, then commit; `sluice run` without Dagster and Spark.

    python -m tests.faults.runner FEED.yaml [POINT]

With a POINT of `points` it is killed there. Says what it did as JSON lines; a run that fails says why, and ends with 1.
"""

from __future__ import annotations

import json
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from sluice.pipelines.errors import SluiceError
from sluice.pipelines.feed import load_feed
from tests.faults.points import planted
from tests.integration.support import commit_feed, run


def say(what: str, **more: Any) -> None:
    print(json.dumps({"what": what, "at": time.time(), **more}), flush=True)


def main(path: str, point: str = "") -> int:
    feed = load_feed(Path(path), {})
    with ExitStack() as stack:
        if point:
            stack.enter_context(planted(point))
        say("begun")
        try:
            landed = run(feed)
            say("landed", batches=[b.number for b in landed.batches], records=landed_records(landed))
            say("committed", status=str(commit_feed(feed).status))
        except SluiceError as e:
            say("failed", error=type(e).__name__, message=e.message)
            return 1
    return 0


def landed_records(landed: Any) -> int:
    return sum(r.counts.landed for b in landed.batches for r in b.receipts)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
