"""Modules that a cold run imports; each delays the start of every run. Counts them instead of measuring times.

`cold_modules.json` has the number of modules of each package, by process. HOW=write updates it.
"""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

from sluice.resources import local_engine
from sluice.resources.local.local_kafka import LocalKafka
from sluice.resources.local_engine import LocalEngine
from tests.cli.conftest import Sluice
from tests.modules import list_modules

CEILINGS = Path(__file__).with_name("cold_modules.json")
FEED = "kafka: {{bootstrap: '{kafka}'}}\ntopics: {topic}\nstart: earliest\nformat: json\nschema: {{order_id: string}}\n"
LISTING = (
    "import sys; from sluice.cli.main import main; code = main(sys.argv[2:]);"
    " from tests.modules import list_modules; open(sys.argv[1], 'w').write(list_modules()); sys.exit(code)"
)
PYTHON = "python"
"""The package name that stands for the standard library."""


def count(modules: Iterable[str]) -> Mapping[str, list[str]]:
    """Return modules by package, without those that compilers and launchers add."""
    by_package = defaultdict[str, list[str]](list)
    for module in sorted(m for m in modules if not m.startswith("_") or m.partition(".")[0] in sys.stdlib_module_names):
        package = module.partition(".")[0]
        by_package[PYTHON if package in sys.stdlib_module_names else package].append(module)
    return by_package


def check(process: str, modules: Iterable[str]) -> None:
    """Fail if a package has more modules than recorded, with a margin for other versions. The message lists them."""
    ceilings, by_package = json.loads(CEILINGS.read_text()), count(modules)
    if os.environ.get("HOW") == "write":
        ceilings[process] = {package: len(names) for package, names in sorted(by_package.items())}
        CEILINGS.write_text(json.dumps(ceilings, indent=1) + "\n")
        return
    ceiling = ceilings[process]
    more = {
        package: names
        for package, names in by_package.items()
        if package not in ceiling or len(names) > ceiling[package] + 3 + ceiling[package] // 10
    }
    lines = [f"{p}: {len(names)}, and {ceiling.get(p, 0)} before: {' '.join(names)}" for p, names in more.items()]
    assert not more, "\n".join([f"{process} imports more; import it where it is needed:", *lines])


def run(project: Path, *options: str) -> set[str]:
    """Run the feed in a new process. Return the modules that it imported."""
    document, modules = call(project, "run", "orders", *options)
    (feed,) = document["feeds"]
    assert sum(batch["landed"] for batch in feed["runs"][0]["batches"])
    return modules


def call(project: Path, *words: str) -> tuple[Any, set[str]]:
    """Run a command in a new process. Return its document, and the modules that it imported."""
    modules = project / "modules"
    command = [sys.executable, "-c", LISTING, str(modules), *words, "--json"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(command, cwd=project, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode in (0, 75), done.stderr  # 75: the hour is not over
    return json.loads(done.stdout), set(modules.read_text().split())


@pytest.mark.slow
def test_cold_run_imports_no_more_modules_than_recorded(project: Path, kafka: LocalKafka, sluice: Sluice) -> None:
    topic = f"orders-{secrets.token_hex(4)}"
    (project / "feeds" / "orders.yaml").write_text(FEED.format(kafka=kafka.bootstrap, topic=topic))
    produce = ("produce", "orders", "-n", "300", "--seed", "7", "--bootstrap", kafka.bootstrap)
    assert sluice(*produce, "--create").code == 0
    without = run(project, "--no-dagster")
    check("without Dagster", without)
    assert sluice(*produce).code == 0
    check("through Dagster", run(project, "--dagster") - without)
    assert sluice(*produce).code == 0
    # PySpark's converters of arguments would import these, where they are installed.
    assert not run(project, "--no-dagster", "--engine", "spark") & {"pandas", "grpc", "pyspark.testing"}
    document, modules = call(project, "run", "orders", "--no-dagster")
    assert not document["feeds"][0]["runs"][0]["batches"]
    assert not modules & {"numpy", "pyarrow", "sluice.resources.spark.engine"}, "nothing is pending"
    window = call(project, "check", "orders")[0]["window"]
    for command in (("files", "orders", "--window", window, "--partial"), ("explain", "orders", f"{topic}:0:0")):
        document, modules = call(project, *command)
        assert document
        assert "sluice.resources.open_ports" in modules
        assert not {m.partition(".")[0] for m in modules} & {"kafka", "pyspark", "dagster"}
        assert command[0] != "files" or not modules & {"pyarrow", "numpy"}


@pytest.mark.slow
def test_worker_imports_no_more_modules_than_recorded() -> None:
    local_engine.end()  # a pool of an earlier test has imported more
    try:
        (modules,) = LocalEngine().map("orders", "the modules", list_modules, 1)
    finally:
        local_engine.end()
    check("worker", modules.split())


@pytest.mark.slow
def test_workers_with_record_time_layout_do_not_import_pandas(project: Path, kafka: LocalKafka, sluice: Sluice) -> None:
    topic = f"orders-{secrets.token_hex(4)}"
    feed = FEED.format(kafka=kafka.bootstrap, topic=topic) + "window: 1h\nlanding: {layout: record_time}\n"
    (project / "feeds" / "orders.yaml").write_text(feed)
    produce = ("produce", "orders", "-n", "300", "--seed", "7", "--bootstrap", kafka.bootstrap)
    assert sluice(*produce, "--create").code == 0
    local_engine.end()
    try:
        assert sluice("run", "orders", "--no-dagster").code == 0
        (modules,) = LocalEngine().map("orders", "the modules", list_modules, 1)
    finally:
        local_engine.end()
    assert "sluice.pipelines.landing.writer" in modules.split()
    assert "pandas" not in modules.split()
