"""A program that lands `test_engine.PLAN` through Spark Connect and prints the outcome.

It is a process of its own, since a former client of Spark Connect cannot create any other Spark session.

    python -m tests.resources.spark.connect_client MASTER FOLDER [cancelled | dies]
"""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path

from sluice.pipelines.errors import Failed
from sluice.pipelines.feed.sections import SparkSettings
from sluice.pipelines.landing.proof import prove
from sluice.pipelines.ports import Job
from sluice.resources.lake.local_lake import LocalLake
from sluice.resources.spark.engine import SparkEngine
from tests.resources.kafka.tools import wait_until
from tests.resources.log_wiring import LogWiring
from tests.resources.spark.test_engine import LOGS, PLAN


def land_batch(master: str, folder: Path, how: str) -> dict[str, object]:
    """Returns the proof or the error of one batch."""
    notes = folder / "notes"
    notes.mkdir()
    wiring = LogWiring(folder / "lake", notes, LOGS, dies=1 if how == "dies" else 0, hangs=how == "cancelled")
    engine = SparkEngine(SparkSettings(master=master))
    if how == "cancelled":

        def cancel() -> None:
            wait_until(lambda: any(notes.iterdir()))
            engine.cancel()

        threading.Thread(target=cancel).start()
    try:
        receipts, failures = prove(PLAN, 12, engine.run(Job(PLAN, 12, "token", wiring), [0, 1]), LocalLake(wiring.lake))
    except Failed as e:
        return {"error": e.message}
    return {"receipts": len(receipts), "failures": len(failures), "begun": len(list(notes.iterdir()))}


if __name__ == "__main__":
    print(json.dumps(land_batch(sys.argv[1], Path(sys.argv[2]), sys.argv[3])))
