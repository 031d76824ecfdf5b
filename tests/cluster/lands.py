"""Lands a feed in a process of its own: one that can be killed, or that was once a client of Spark Connect.

python -m tests.cluster.lands FEED-FILE
"""

from __future__ import annotations

import sys
from pathlib import Path

from sluice.pipelines.feed.load import load_feed
from tests.cluster.conftest import landed

if __name__ == "__main__":
    landed(load_feed(Path(sys.argv[1]), {}))
