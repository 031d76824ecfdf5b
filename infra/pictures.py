"""Draw the pictures of the docs from the running product: `make pictures`.

    .venv/bin/python infra/pictures.py [NAME ...]       such as hour.png; by default all of them

Makes a project in a temporary folder, with a local Kafka and orders of five hours, lands hours through Dagster, and
captures the pages and Dagster's UI with headless Chromium. One hour breaks its contract; its run is executed again from
the UI, after the contract was corrected.
"""

from __future__ import annotations

import json
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from kafka import KafkaProducer
from kafka.admin import KafkaAdminClient, NewTopic

from sluice.resources.local.local_kafka import LocalKafka

ROOT = Path(__file__).resolve().parents[1]
IMAGES, SLUICE = ROOT / "docs" / "images", ROOT / ".venv" / "bin" / "sluice"
PORT = 3910
PAGES = {
    "home.png": (880, 270),
    "hour.png": (1280, 1000),
    "batch_report.png": (1280, 1240),
    "batch_report_columns.png": (1280, 900),
    "all_feeds.png": (1280, 560),
}
"""Width and height by picture, of pages that are files."""
CHECK = "assets/orders/landed?view=checks&checkDetail="
REFUSED = {
    "hours.png": ("assets/orders/landed?view=partitions", 1100, 620),
    "contract_volume.png": (f"{CHECK}contract_volume", 1360, 825),
}
"""Path, width and height by picture, of Dagster's UI after an hour was refused."""
AGAIN = {
    "runs.png": ("runs", 1500, 620),
    "reexecuted.png": ("runs/{run}", 1500, 900),
    "contract_validity.png": (f"{CHECK}contract_validity", 1460, 1060),
    "contract_schema.png": (f"{CHECK}schema_drift", 1260, 760),
}
"""The same after its run was executed again."""
EXPECTATIONS: list[tuple[str, str, dict[str, object]]] = [
    ("expect_column_values_to_be_in_set", "critical", {"column": "currency", "value_set": ["EUR", "USD", "CHF"]}),
    ("expect_column_values_to_match_regex", "critical", {"column": "order_id", "regex": "^o-[0-9]{8}$"}),
    ("expect_column_values_to_be_between", "warning", {"column": "amount", "min_value": 1, "max_value": 990}),
    ("expect_column_values_to_be_in_set", "info", {"column": "items", "value_set": [1, 2, 3, 4, 5, 6, 7]}),
    ("expect_column_values_to_be_unique", "warning", {"column": "order_id"}),
]
RUN_AGAIN = """mutation($run: String!) {
  launchRunReexecution(reexecutionParams: {parentRunId: $run, strategy: FROM_FAILURE}) {
    __typename ... on LaunchRunSuccess { run { runId } }
  }
}"""
WAIT_MS = 20_000
RECORDS = 4_000
"""Of an hour."""


def main() -> None:
    """Draw the chosen pictures. Exits without Chromium."""
    chosen = set(sys.argv[1:] or [*PAGES, *REFUSED, *AGAIN])
    if (chromium := shutil.which("chromium")) is None:
        sys.exit("error: the pictures need Chromium: install it (Debian: apt-get install chromium), and run again")
    with tempfile.TemporaryDirectory() as name, land_hours(folder := Path(name)) as hours:
        for picture in chosen & PAGES.keys():
            words = {"all_feeds.png": ["--all"]}.get(picture, ["orders", hours[-1]])
            words = ["orders"] if picture.startswith("batch") else words
            page = folder / f"{picture}.html"
            run(folder, "report", *words, "--output", str(page))
            if "columns" in picture:
                page.write_text(
                    page.read_text() + "<style>header, nav, section:not(#columns) { display: none }</style>"
                )
            capture(chromium, page.as_uri(), picture, *PAGES[picture])
        if not chosen & {*REFUSED, *AGAIN}:
            return
        write_contract(folder, RECORDS * 2)
        run(folder, "run", "orders", "--window", hours[1], refused=True)
        write_contract(folder, RECORDS // 2)
        with serve(folder) as address:
            for picture in chosen & REFUSED.keys():
                path, *size = REFUSED[picture]
                capture(chromium, f"{address}/{path}", picture, *size)
            run_id = execute_again(address)
            for picture in chosen & AGAIN.keys():
                path, *size = AGAIN[picture]
                capture(chromium, f"{address}/{path.format(run=run_id)}", picture, *size)


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
        path = folder / "feeds" / "orders.yaml"
        orders = re.sub(r"^window: 1h", "window: {length: 1h, grace: 0s}", path.read_text(), flags=re.MULTILINE)
        orders = re.sub(r"^ *coupon:.*\n", "", orders, flags=re.MULTILINE)
        path.write_text(orders)
        write_contract(folder, RECORDS // 2)
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


def write_contract(folder: Path, minimum: int) -> None:
    """Write the contract of orders, with the minimum number of rows in an hour."""
    rows = ("expect_table_row_count_to_be_between", "critical", {"min_value": minimum})
    expectations = [{"type": kind, "severity": how, "kwargs": about} for kind, how, about in [*EXPECTATIONS, rows]]
    contract = {"name": "orders", "expectations": expectations}
    (folder / "feeds" / "orders.contract.json").write_text(json.dumps(contract))


def produce(bootstrap: str, begin: datetime) -> None:
    """Send orders of five hours from `begin` on, of which some are late, sent again, or malformed."""
    draw, producer = random.Random(7), KafkaProducer(bootstrap_servers=bootstrap, linger_ms=5)
    KafkaAdminClient(bootstrap_servers=bootstrap).create_topics([NewTopic("orders", 4, 1)])
    step, begin_ms = 3_600_000 // RECORDS, int(begin.timestamp() * 1000)
    for n in range(4 * RECORDS + 200):
        stamp = begin_ms + n * step
        late = stamp - draw.randrange(7_200_000) if draw.random() < 0.01 else stamp
        order = {"order_id": f"o-{n:08}", "customer": f"c-{draw.randrange(900):04}", "items": draw.randrange(1, 9)}
        order |= {
            "currency": draw.choice(["EUR"] * 40 + ["USD"] * 20 + ["CHF"] * 9 + ["eur"] * (n % 9 == 0)),
            "amount": draw.randrange(99, 99_999) / 100,
        }
        order |= {"coupon": "autumn"} if draw.random() < 0.01 else {}
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
        server.terminate()
        server.wait(60)


def capture(chromium: str, address: str, name: str, width: int, height: int) -> None:
    """Write the picture of a page."""
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", f"--virtual-time-budget={WAIT_MS}"]
    picture = [f"--window-size={width},{height}", f"--screenshot={IMAGES / name}"]
    subprocess.run([chromium, *options, *picture, address], check=True, stderr=subprocess.DEVNULL)
    print(f"docs/images/{name}")


def execute_again(address: str) -> str:
    """Execute the newest run again from its failure, as the UI does. Returns the new run, once it has ended."""
    failed = ask(address, "{ runsOrError(limit: 1) { ... on Runs { results { runId } } } }")
    parent = failed["runsOrError"]["results"][0]["runId"]
    launched = ask(address, RUN_AGAIN, run=parent)["launchRunReexecution"]
    if "run" not in launched:
        sys.exit(f"error: the run was not executed again: {launched}")
    run_id = launched["run"]["runId"]
    while True:
        state = ask(address, f'{{ runOrError(runId: "{run_id}") {{ ... on Run {{ status }} }} }}')["runOrError"][
            "status"
        ]
        if state in ("SUCCESS", "FAILURE", "CANCELED"):
            return run_id
        time.sleep(1)


def ask(address: str, query: str, **variables: str) -> dict[str, Any]:
    """Returns the data of a GraphQL query to Dagster's UI."""
    body = json.dumps({"query": query, "variables": variables}).encode()
    question = urllib.request.Request(f"{address}/graphql", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(question, timeout=60) as answer:
        return json.load(answer)["data"]


def run(folder: Path, *words: str, refused: bool = False) -> None:
    """Run a command in the project. Exits with its output if it fails, or if it passes but should be refused."""
    done = subprocess.run([SLUICE, *words], cwd=folder, capture_output=True, text=True, check=False)
    if bool(done.returncode) != refused:
        sys.exit(f"error: sluice {' '.join(words)}: {done.stdout}{done.stderr}")


if __name__ == "__main__":
    main()
