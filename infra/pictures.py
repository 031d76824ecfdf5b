"""Draw the pictures of the docs from the running product: `make pictures`.

    .venv/bin/python infra/pictures.py [NAME ...]       such as hour.png; by default all of them

Makes a project in a temporary folder, with a local Kafka and orders of five hours, lands hours through Dagster, and
captures the pages and Dagster's UI with headless Chromium. The pictures of contracts, of Airflow and of a second
execution are not among them.
"""

from __future__ import annotations

import json
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

from kafka import KafkaProducer
from kafka.admin import KafkaAdminClient, NewTopic

from sluice.resources.local.local_kafka import LocalKafka

ROOT = Path(__file__).resolve().parents[1]
IMAGES, SLUICE = ROOT / "docs" / "images", ROOT / ".venv" / "bin" / "sluice"
PORT = 3910
PAGES = {
    "home.png": (1280, 560),
    "hour.png": (1280, 1000),
    "batch_report.png": (1280, 1240),
    "all_feeds.png": (1280, 560),
}
"""Width and height by picture, of pages that are files."""
VIEWS = {"hours.png": ("assets/orders/landed?view=partitions", 1100, 620), "runs.png": ("runs", 1500, 520)}
"""Path, width and height by picture, of Dagster's UI."""
WAIT_MS = 20_000
RECORDS = 4_000
"""Of an hour."""


def main() -> None:
    """Draw the chosen pictures. Exits without Chromium."""
    chosen = sys.argv[1:] or [*PAGES, *VIEWS]
    if (chromium := shutil.which("chromium")) is None:
        sys.exit("error: the pictures need Chromium: install it (Debian: apt-get install chromium), and run again")
    with tempfile.TemporaryDirectory() as folder, land_hours(Path(folder)) as hours:
        for name in set(chosen) & PAGES.keys():
            words = {"batch_report.png": ["orders"], "all_feeds.png": ["--all"]}.get(name, ["orders", hours[-1]])
            page = Path(folder, f"{name}.html")
            run(Path(folder), "report", *words, "--output", str(page))
            capture(chromium, page.as_uri(), name, *PAGES[name])
        if views := set(chosen) & VIEWS.keys():
            with serve(Path(folder)) as address:
                for name in views:
                    path, *size = VIEWS[name]
                    capture(chromium, f"{address}/{path}", name, *size)


@contextmanager
def land_hours(folder: Path) -> Iterator[list[str]]:
    """Land all hours of a topic but one, and feeds with other states. Yields the starts of the last four hours."""
    begin = datetime.now(UTC).replace(minute=0, second=0, microsecond=0) - timedelta(hours=4)
    hours = [f"{begin + timedelta(hours=n):%Y-%m-%dT%H}" for n in range(4)]
    try:
        run(folder, "kafka", "start")
        bootstrap = LocalKafka.attach(folder / ".sluice" / "kafka").bootstrap
        produce(bootstrap, begin)
        run(folder, "init", "--bootstrap", bootstrap, "--topic", "orders")
        run(folder, "contract", "init", "orders")
        for proposal in (folder / "feeds").glob("*.contract.proposed.json"):
            proposal.rename(proposal.with_name("orders.contract.json"))
        path = folder / "feeds" / "orders.yaml"
        orders = re.sub(r"^window: 1h", "window: {length: 1h, grace: 0s}", path.read_text(), flags=re.MULTILINE)
        path.write_text(orders)
        for name, limit in {"clicks": 0, "customers": 9_000, "payments": 3_000}.items():
            feed = re.sub(r"^(group|feed):.*\n", "", orders, flags=re.MULTILINE)
            limits = f"limits: {{records: {limit}}}\n" if limit else ""
            (folder / "feeds" / f"{name}.yaml").write_text(f"{feed}{limits}")
            run(folder, "run", name, "--engine", "processes")
        for hour in (hours[0], *hours[2:]):
            run(folder, "run", "orders", "--window", hour)
        yield hours
    finally:
        run(folder, "kafka", "stop")


def produce(bootstrap: str, begin: datetime) -> None:
    """Send orders of five hours from `begin` on, of which some are late, sent again, or malformed."""
    draw, producer = random.Random(7), KafkaProducer(bootstrap_servers=bootstrap, linger_ms=5)
    KafkaAdminClient(bootstrap_servers=bootstrap).create_topics([NewTopic("orders", 4, 1)])
    step, begin_ms = 3_600_000 // RECORDS, int(begin.timestamp() * 1000)
    for n in range(4 * RECORDS + 200):
        stamp = begin_ms + n * step
        late = stamp - draw.randrange(7_200_000) if draw.random() < 0.01 else stamp
        order = {"order_id": f"o-{n:08}", "customer": f"c-{draw.randrange(900):04}", "items": draw.randrange(1, 9)}
        order |= {"currency": draw.choice(["EUR", "EUR", "USD", "CHF"]), "amount": draw.randrange(99, 99_999) / 100}
        value = json.dumps(order if draw.random() > 0.004 else order | {"items": "few"})
        for _ in range(1 + (draw.random() < 0.004)):
            key, cut = order["customer"].encode(), -5 if draw.random() < 0.004 else None
            producer.send("orders", value[:cut].encode(), key, partition=n % 4, timestamp_ms=late)
    producer.close()


@contextmanager
def serve(folder: Path) -> Iterator[str]:
    """Run Dagster's UI. Yields its address once the server answers."""
    server = subprocess.Popen(
        [SLUICE, "ui", "--port", str(PORT)], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        for line in server.stdout or ():
            if address := re.search(r"http://127\.0\.0\.1:\d+", line):
                yield address[0]
                return
        sys.exit("error: Dagster's UI did not start")
    finally:
        server.send_signal(signal.SIGINT)
        server.wait(60)


def capture(chromium: str, address: str, name: str, width: int, height: int) -> None:
    """Write the picture of a page."""
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", f"--virtual-time-budget={WAIT_MS}"]
    picture = [f"--window-size={width},{height}", f"--screenshot={IMAGES / name}"]
    subprocess.run([chromium, *options, *picture, address], check=True, stderr=subprocess.DEVNULL)
    print(f"docs/images/{name}")


def run(folder: Path, *words: str) -> None:
    """Run a command in the project. Exits with its output if it fails."""
    done = subprocess.run([SLUICE, *words], cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"error: sluice {' '.join(words)}: {done.stdout}{done.stderr}")


if __name__ == "__main__":
    main()
