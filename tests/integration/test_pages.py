"""The page of all feeds on a real Kafka: it shows what `status` says, links to hours, and is refreshed by runs.

With Chromium on this machine, both pages are drawn at the widths of a screen and of a phone, light and dark.
"""

from __future__ import annotations

import functools
import http.server
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from html.parser import HTMLParser
from pathlib import Path

import pytest
from kafka import KafkaProducer

from sluice.pipelines.operating.project_page import UNKNOWN, Cell, FeedRow, render
from sluice.resources.local.local_kafka import LocalKafka
from tests.integration.conftest import Call
from tests.integration.support import FeedProject

HOUR = 3_600_000


@pytest.fixture
def project(tmp_path: Path, kafka: LocalKafka, fresh_topic: Callable[..., str]) -> FeedProject:
    """A project of two feeds over records of the last hours; one does not fit, and `orders` allows none."""
    feed_project = FeedProject(tmp_path, kafka, fresh_topic(partitions=2, config={"retention.ms": "-1"}), {})
    producer, now = KafkaProducer(bootstrap_servers=kafka.bootstrap), int(time.time() * 1000)
    for i in range(40, 0, -1):
        value = b"no json" if i == 20 else b'{"id": %d}' % i
        producer.send(feed_project.topic, value, b"%d" % i, partition=i % 2, timestamp_ms=now - i * HOUR // 8)
    producer.close()
    write_orders(feed_project, 0)
    feed_project.write_feed("a_copy", engine="processes")
    return feed_project


def write_orders(project: FeedProject, records: int) -> None:
    limit = f"{{quarantine_limit: {{at_most: {records}}}}}"
    project.write_feed("orders", format="json", schema="{id: int64}", engine="processes", policies=limit)


class Cells(HTMLParser):
    """The windows of a page, with their links and labels, in order."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links, self.labels = list[str](), list[str]()
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = dict(attrs)
        if tag == "a" and (attributes.get("class") or "").startswith("c "):
            self.links.append(attributes.get("href") or "")
            self.labels.append(attributes["title"] or "")


def expect_labels(call: Call) -> list[str]:
    """Returns the labels of cells by `status`: feeds with severe findings first, then those with findings."""
    _, status = call("status", "--json")
    feeds = sorted(
        status["feeds"], key=lambda f: (-sum(x["severe"] for x in f["findings"]), -len(f["findings"]), f["feed"])
    )
    return [f"{f['feed']} {w['window']}: {w['state']}" for f in feeds for w in f["windows"]]


@pytest.mark.kafka
@pytest.mark.slow
def test_page_of_all_feeds_matches_status_and_runs_refresh_it(project: FeedProject, call: Call) -> None:
    assert call("run", "a_copy")[0] == 0
    assert call("run", "orders")[0] == 3
    code, text = call("report", "--all")
    page = Path(text.strip())
    assert (code, page.name) == (0, "report.html")
    cells = Cells(page)
    assert cells.labels == expect_labels(call)
    assert cells.labels[0].startswith("orders "), "the feed with the refused batch is first"
    assert any(label.endswith(": failed") for label in cells.labels)
    linked = {link for link in cells.links if link}
    assert {link.partition("/")[0] for link in linked} == {"a_copy", "orders"}
    for link in linked:
        hour = re.sub(r"T(\d\d)(\d\d)\.html", r"T\1:\2", link.rpartition("/")[2])
        assert f"{link.partition('/')[0]}</bdi> · {hour}" in (page.parent / link).read_text()
    write_orders(project, 5)
    assert call("run", "orders")[0] == 0
    cells = Cells(page)
    assert cells.labels == expect_labels(call)
    assert not any(label.endswith(": failed") for label in cells.labels)
    assert len({link for link in cells.links if link}) > len(linked)


ENTRY = "import sys; from sluice.cli.main import main; sys.exit(main(sys.argv[1:]))"
READING = (
    "status", "check orders", "report orders", "report --all", "audit orders --strict", "explain orders {topic}:0:0",
    "plan orders", "quarantine list orders", "metrics orders", "offsets show orders", "compact orders --dry-run",
)  # fmt: skip


@pytest.mark.kafka
@pytest.mark.slow
@pytest.mark.skipif(shutil.which("setpriv") is None, reason="needs setpriv of util-linux")
def test_reading_commands_work_for_users_without_the_right_to_write(project: FeedProject, call: Call) -> None:
    write_orders(project, 5)
    assert call("run", "orders")[0] == 0
    (page,) = (project.root / ".sluice/lake/_sluice/orders/reports").glob("[0-9]*/*.html")
    page.unlink()
    paths = [project.root, *project.root.rglob("*")]
    before = {path: path.stat().st_mtime_ns for path in paths}
    for path in paths:
        path.chmod(path.stat().st_mode & ~0o222)
    command = [
        "setpriv",
        "--bounding-set",
        "-dac_override,-dac_read_search,-fowner",
        sys.executable,
        "-c",
    ]
    try:
        for words in READING:
            arguments = words.format(topic=project.topic).split()
            done = subprocess.run(
                [*command, ENTRY, *arguments, "--project", project.root], capture_output=True, text=True
            )
            assert done.returncode == 0, (words, done.stdout, done.stderr)
            if words.startswith("report"):
                copy = Path(done.stdout.split()[-1])
                assert not copy.is_relative_to(project.root)
                assert copy.stat().st_mode & 0o077 == 0, "nobody else reads values of records"
                assert copy.read_text().startswith("<!DOCTYPE html>")
                copy.unlink()
        assert {path: path.stat().st_mtime_ns for path in [project.root, *project.root.rglob("*")]} == before
    finally:
        for path in paths:
            path.chmod(path.stat().st_mode | 0o200)


def test_windows_after_the_last_run_are_unknown_and_the_feed_comes_first(tmp_path: Path) -> None:
    now = 1_795_186_800_000
    cells = [Cell(now - HOUR * back, f"hour -{back}", "landed") for back in (9, 8, 7)]
    stale = FeedRow(
        "stale", now - 6 * HOUR, HOUR, "caught up", (), (*cells, Cell(now - 6 * HOUR, "hour -6", "not closed"))
    )
    fresh = FeedRow("fresh", now, HOUR, "caught up", (), (Cell(now - HOUR, "hour -1", "landed"),))
    path = tmp_path / "page.html"
    path.write_bytes(render([fresh, stale], now + 20 * 60_000))
    labels = Cells(path).labels
    assert [label.rpartition(": ")[2] for label in labels if label.startswith("stale")] == [
        *["landed"] * 3,
        *[UNKNOWN] * 6,
        "not closed",
    ]
    assert labels[0].startswith("stale")
    assert "no run and no status since" in path.read_text()


def test_feeds_without_findings_are_folded_if_they_are_many(tmp_path: Path) -> None:
    now = 1_795_186_800_000
    fine = [FeedRow(f"f{n}", now, HOUR, "caught up", (), (Cell(now - HOUR, "h", "landed"),)) for n in range(500)]
    bad = FeedRow("refused", now, HOUR, "", ((True, "batch 5 was refused", "fix it"),), fine[0].cells)
    pending = FeedRow("pending", now, HOUR, "", (), (Cell(now - HOUR, "h", "pending"),))
    empty = FeedRow("empty", now, HOUR, "nothing landed yet", (), ())
    page = render([*fine, empty, pending, bad], now).decode()
    above, _, folded = page.partition("500 feeds without findings")
    assert re.findall(r'id="feed-(\w+)"', above) == ["refused", "pending", "empty"]
    assert len(re.findall(r'id="feed-f\d+"', folded)) == 500
    assert "without findings" not in render([*fine[:5], bad], now).decode()


def test_findings_of_several_feeds_are_one_line_and_the_worst_come_first(tmp_path: Path) -> None:
    now = 1_795_186_800_000
    cells = (Cell(now - HOUR, "h", "landed"),)

    def build(name: str, *findings: tuple[bool, str, str]) -> FeedRow:
        return FeedRow(name, now, HOUR, "", findings, cells)

    late = [build(f"late_{n}", (False, f"late_{n} is {n} h old", f"sluice run late_{n}")) for n in range(37)]
    refused = [build(f"f{n}", (True, f"batch {n} was refused", f"sluice run f{n}")) for n in range(2)]
    single = [build(f"s{n}", (False, f"only {chr(97 + n)}", "fix it")) for n in range(3)]
    page = render([*late, *refused, *single], now).decode()
    lines = re.findall(r'<summary><b class="(\w+)">(.*?): </b>(.*?)</summary>', page)
    assert lines == [
        ("bad", "2 feeds, such as f0", "batch 0 was refused"),
        ("warn", "37 feeds, such as late_0", "late_0 is 0 h old"),
        *(("warn", f"s{n}", f"only {chr(97 + n)}") for n in range(3)),
    ]
    above, _, folded = page.partition("2 more findings")
    assert "only a" in above
    assert ("only b" in above, "only b" in folded) == (False, True)
    assert above.count('href="#feed-late_') == 37
    assert "Findings" not in render(single, now).decode(), "each is in the line of its feed"


# -- in a browser


def build_many(now: int) -> Iterator[FeedRow]:
    """Yields 500 feeds with long names, of which 120 have findings."""
    cells = tuple(Cell(now - HOUR * back, f"h{back}", "landed") for back in range(24, 0, -1))
    for n in range(500):
        text = f"{'a_long_word_' * 20}of partition {n} is refused\nby {'x' * 200}"
        findings = ((n % 3 == 0, text, f"sluice run feed_{n} --offsets {'1' * 100}"),) if n < 120 else ()
        yield FeedRow(f"feed_{n}{'_long' * (n % 30)}", now, HOUR, "caught up", findings, cells)


@contextmanager
def serve(folder: Path, requests: list[str]) -> Iterator[str]:
    """Serve the folder on the loopback interface, and note each requested path."""

    class Handler(http.server.SimpleHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:
            requests.append(self.path)

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


FRAME = """<body><iframe id=f src="{page}" style="border:0;width:{width}px;height:900px"></iframe><script>
onload = () => {{ const d = document.getElementById('f').contentDocument, e = d.documentElement;
  const wide = [...d.querySelectorAll('main *, header *')].filter(x => x.getBoundingClientRect().right > {width} + 1
    && !x.parentElement.closest('.scroll, summary')).length;
  document.title = [e.scrollWidth, wide, getComputedStyle(d.body).backgroundColor].join(' ') }}</script>"""


@pytest.mark.kafka
@pytest.mark.slow
@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs Chromium: apt-get install chromium")
def test_pages_fit_screens_and_phones_in_light_and_dark(project: FeedProject, call: Call, tmp_path: Path) -> None:
    call("run", "--all")
    root = Path(call("report", "--all")[1].strip()).parent
    pages = ["report.html", next(link for link in Cells(root / "report.html").links if link.startswith("a_copy"))]
    (root / "many.html").write_bytes(render(build_many(1_795_186_800_000), 1_795_186_800_000))
    pages.append("many.html")
    requests, grounds = list[str](), set[str]()
    with serve(root, requests) as address:
        for page in pages:
            for width in (1280, 390):
                for scheme in ("1", "0"):
                    frame = root / f"frame-{pages.index(page)}-{width}.html"  # a name of its own: the browser caches
                    frame.write_text(FRAME.format(page=page, width=width))
                    command = [
                        "chromium", "--headless", "--no-sandbox", "--disable-gpu", "--window-size=1400,1000",
                        f"--user-data-dir={tmp_path}/browser", "--virtual-time-budget=3000", "--dump-dom",
                        f"--blink-settings=preferredColorScheme={scheme}", f"{address}/{frame.name}",
                    ]  # fmt: skip
                    dom = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
                    measured = re.search(r"<title>(\d+) (\d+) (.+?)</title>", dom)
                    assert measured is not None, dom[:500]
                    assert (int(measured[1]) <= width, measured[2]) == (True, "0"), (page, width)
                    grounds.add(measured[3])
    assert len(grounds) == 2, "light and dark"
    others = {r.lstrip("/") for r in requests if not r.startswith("/frame-")}
    assert others <= {"favicon.ico", *pages}, "a page loads nothing"
