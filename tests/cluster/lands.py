"""Lands a feed in a separate process, which can be killed or be a client of Spark Connect.

python -m tests.cluster.lands FEED-FILE
"""

from __future__ import annotations

import sys
from pathlib import Path

from sluice.pipelines.feed.load import load_feed
from tests.cluster.conftest import land_feed

if __name__ == "__main__":
    land_feed(load_feed(Path(sys.argv[1]), {}))
