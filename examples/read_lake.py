"""Lists the rows of a window from a lake in a folder, by docs/lake-format.md, version 3, with pyarrow alone.

    python read_lake.py LAKE FEED 2026-11-20T14:00 2026-11-20T15:00 [landed|quarantined [OUTPUT]]

Raises ValueError for a window that is not complete, and for a lake that it cannot read."""

import json
import sys
import zlib
from base64 import b64decode
from collections import defaultdict
from datetime import UTC, datetime
from hashlib import sha256
from operator import itemgetter
from pathlib import Path

import pyarrow.parquet as pq

KINDS = "origin plan own intent commit loss skip abandon accept moved take retire erase hold gap"
NEWEST = dict.fromkeys(KINDS.split(), 1) | {"boundary": 3, "publish": 3, "schema": 7}
ENDLESS = 1 << 63
identify = itemgetter("topic", "partition", "incarnation")


def subtract(spans, taken):
    """Returns what remains of spans `(start, end, …)` without the offsets of others."""
    for start, end, *_ in taken:
        spans = [s for a, b, *c in spans for s in ((a, min(b, start), *c), (max(a, end), b, *c)) if s[0] < s[1]]
    return spans


def intersect(spans, start, end):
    return subtract(spans, [(-ENDLESS, start), (end, ENDLESS)])


class Ledger:
    """The log of a feed, folded. A key is (topic, partition, incarnation); `accounted` has (start, end, class)."""

    def __init__(self, lake, feed):
        expected, head, self.current, self.known, self.live, self.replaced = 0, "", {}, set(), {}, set()
        self.receipts, self.boundaries, self.accounted, self.erased = [], *map(defaultdict, (dict, list, list))
        for path in sorted((lake / "_sluice" / feed / "log").glob("[0-9]" * 20 + ".json")):
            if int(path.stem) < expected:
                continue  # in a gap: it was lost, and does not count
            entry = json.loads(data := path.read_bytes())
            if entry["format"] == 9 and "packed" in entry:
                entry = json.loads(zlib.decompress(b64decode(entry["packed"])))
            number, known = entry.get("number"), entry["format"] <= NEWEST.get(entry["kind"], 0)
            chained = (number, entry.get("follows")) == (expected, head) if head else number in (None, expected)
            if int(path.stem) > expected or not chained or not known:
                raise ValueError(f"{path} is of a newer release, or the entry before it is missing or was replaced")
            self.add(expected, entry)
            expected = entry["next"] if entry["kind"] == "gap" else expected + 1
            head = "" if number is None else sha256(data).hexdigest()

    def add(self, number, entry):
        match entry["kind"]:
            case "origin" | "take" as kind:
                self.begin(entry["items" if kind == "origin" else "origins"])
            case "boundary":
                for item in entry["items"]:
                    if self.current.get((key := tuple(item["key"]))[:2]) == key:
                        pairs = dict(zip(item["times"], item["offsets"], strict=True))
                        self.boundaries[key] = pairs | self.boundaries[key]
            case "plan":
                self.live[number] = entry["plan"] | {"token": entry["owner"]["token"]}
            case "own" if entry["batch"] in self.live:
                self.live[entry["batch"]]["token"] = entry["owner"]["token"]
            case "publish":
                self.publish(entry)
            case "abandon" | "gap":
                self.live = {n: plan for n, plan in self.live.items() if n != entry.get("batch", n)}
            case "loss" | "skip" | "retire" as kind:
                self.account(kind, entry["ranges"], again=kind == "retire")
                self.replaced.update(entry.get("parts", ()))
            case "erase":
                for item in entry["ranges"]:
                    self.erased[tuple(item["key"])].append(item["range"])
            case "accept":
                self.accept(entry)

    def begin(self, items):
        for item in items:
            key, first = tuple(item["key"]), item["offset"] if item.get("cuts") is None else item["cuts"]
            if self.current.setdefault(key[:2], key) == key and key not in self.known:
                self.known.add(key)
                self.boundaries[key] |= {} if item["opens"] is None else {item["opens"]: first}

    def accept(self, entry):
        left = {k: i["enters"] for i in entry["items"] if self.current.get((k := tuple(i["leaves"]))[:2]) == k}
        self.account("skip", [i for i in entry["passed"] if tuple(i["key"]) in left])
        self.account("loss", [i for i in entry["lost"] if tuple(i["key"]) in left])
        for batch, plan in [*self.live.items()]:
            if any(identify(s) in left for task in plan["tasks"] for s in task["slices"]):
                del self.live[batch]
        for key, enters in left.items():
            del self.current[key[:2]]
            self.begin([enters])

    def account(self, kind, items, *, again=False):
        for key, span in ((tuple(item["key"]), item["range"]) for item in items):
            self.accounted[key] = [*subtract(self.accounted[key], [span]), (*span, kind)]
            if again:  # receipts that share an offset count no more
                self.receipts = [r for r in self.receipts if r["key"] != key or not intersect([r["range"]], *span)]

    def publish(self, entry):
        items = [r | {"key": identify(s := r["slice"]), "range": [s["start"], s["end"]]} for r in entry["receipts"]]
        plan = self.live.get(entry["batch"])
        void = plan is None or plan["token"] != entry["token"] or self.replaced.intersection(plan["replaces"])
        if void or any(subtract(intersect(self.erased[i["key"]], *i["range"]), i.get("erased", ())) for i in items):
            return
        del self.live[entry["batch"]]
        self.replaced.update(plan["replaces"])
        self.account("landed", items, again=plan["request"]["replace"] or plan["replaces"])
        self.receipts += items

    def boundary(self, key, time):  # the offset between the windows before and after it, if that is known
        pinned = sorted(self.boundaries[key].items())
        at = sum(t < time for t, _ in pinned)
        known = at < len(pinned) and (pinned[at][0] == time or at == 0 or pinned[at - 1][1] == pinned[at][1])
        return pinned[at][1] if known else ENDLESS

    def list_parts(self, start, end):  # of the window between two times (ms since 1970), by partition and offset
        now = [key for key in self.current.values() if "#gone" not in key[2]]
        if not now or end <= min(time for pinned in self.boundaries.values() for time in pinned):
            raise ValueError("the feed begins later")
        for key in {*now, *self.accounted}:
            first, last = self.boundary(key, start), self.boundary(key, end)
            within = intersect(self.accounted[key], first, last)
            is_open = ENDLESS in (first, last) or (first < last and subtract([(first, last)], within))
            if (key in now and is_open) or any(kind == "retire" for *_, kind in within):
                raise ValueError(f"the window is not complete in {key[0]}:{key[1]}, or rows were retired")
        for r in sorted(self.receipts, key=lambda r: (r["key"], r["range"])):
            if start <= (r["slice"]["window"] or 0) < end:
                yield from r["parts"]


def read_window(lake, feed, start, end, kind="landed", output=""):
    for part in Ledger(lake, feed).list_parts(start, end):
        if part["kind"] == kind and (not output or part["path"].split("/")[2] == output):
            path, shared = lake / part["path"], part.get("shared") or part | {"first": 0}
            if not path.is_file() or path.stat().st_size != shared["bytes"]:
                raise ValueError(f"{path} is not there yet, was replaced just now, or is damaged")
            yield pq.ParquetFile(path, page_checksum_verification=True).read().slice(shared["first"], part["rows"])


if __name__ == "__main__":
    start, end = (datetime.fromisoformat(t).replace(tzinfo=UTC).timestamp() * 1000 for t in sys.argv[3:5])
    for table in read_window(Path(sys.argv[1]), sys.argv[2], round(start), round(end), *sys.argv[5:]):
        print(*(json.dumps(row, default=str) for row in table.to_pylist()), sep="\n")
