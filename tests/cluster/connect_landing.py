"""Lands a feed through Spark Connect, in a process of its own: one that was once a client of it makes no other Spark.

python -m tests.cluster.connect_landing FEED-FILE
"""

from __future__ import annotations

import sys
from pathlib import Path

from sluice.pipelines.feed.load import load_feed
from tests.cluster.conftest import landed

if __name__ == "__main__":
    landed(load_feed(Path(sys.argv[1]), {}))
