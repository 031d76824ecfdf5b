"""Lands a record through a feed in memory, and reads it: an installation with its compiled loops works."""

import tempfile
from pathlib import Path

import sluice
from sluice.testing import Message, land

FEED = "kafka: {bootstrap: unused:9092}\ntopics: orders\nstart: earliest\nformat: json\nschema: {id: int64}\n"

with tempfile.TemporaryDirectory() as folder:
    feed = Path(folder, "feeds", "orders.yaml")
    feed.parent.mkdir()
    feed.write_text(FEED + f"lake: {folder}/lake\n")
    landed = land(feed, [Message(b'{"id": 7}')], lake=Path(folder, "lake"))
    rows = sluice.read("orders", landed.windows[0], project=folder).arrow()
    print(f"landed and read {rows.to_pylist()} by {sluice.__file__}")
