"""One cluster for each process of the suite, healed between faults; each fault has its own topic and feed.

A module without Kafka faults sets `BROKERS = 1`: three brokers cost three times the CPU.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.clouds import LAKES, CloudStore
from tests.faults.account import SEED, Account
from tests.faults.arena import Arena, run_arena
from tests.faults.field import Field
from tests.faults.nemeses.lakes import with_store
from tests.resources.lake.s3_faults import Proxy, run_proxy
from tests.stores import Store


@pytest.fixture(autouse=True, scope="module")
def _land_on_the_default_engine(default_engine: None) -> None:
    """`sluice run` of a course lands on Spark, unless the course chooses an engine."""


@pytest.fixture(scope="session")
def shared_arena(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Arena]:
    with run_arena(tmp_path_factory.mktemp("arena") / "kafka") as cluster:
        yield cluster


@pytest.fixture(scope="session")
def lone_arena(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Arena]:
    with run_arena(tmp_path_factory.mktemp("arena") / "kafka", brokers=1) as cluster:
        yield cluster


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort tests by their cluster, so that a process of the suite seldom runs both."""
    items.sort(key=lambda item: _get_broker_count(item) == 1)


def _get_broker_count(item: pytest.Item) -> int:
    return getattr(getattr(item, "module", None), "BROKERS", 3)


@pytest.fixture
def arena(request: pytest.FixtureRequest) -> Iterator[Arena]:
    """The cluster, healed before and after the test."""
    cluster: Arena = request.getfixturevalue("lone_arena" if _get_broker_count(request.node) == 1 else "shared_arena")
    cluster.heal()
    yield cluster
    cluster.heal()


def _build_printer(config: pytest.Config) -> Callable[[str], None]:
    """Returns a function that prints a line to the terminal, past pytest's capture."""
    capture: Any = config.pluginmanager.getplugin("capturemanager")

    def print_line(line: str) -> None:
        with capture.global_and_fixture_disabled():
            # pytest-xdist talks with its workers over their standard output.
            print(line, flush=True, file=sys.stderr if hasattr(config, "workerinput") else sys.stdout)

    return print_line


def _collect_lines(request: pytest.FixtureRequest) -> tuple[Callable[[str], None], Callable[[], None]]:
    """Returns a function that prints or, in a worker of pytest-xdist, buffers lines, and one that prints the buffer."""
    print_line = _build_printer(request.config)
    if not hasattr(request.config, "workerinput"):
        return print_line, lambda: None
    lines: list[str] = []
    return lines.append, lambda: print_line("\n".join(lines))


@pytest.fixture
def account(request: pytest.FixtureRequest) -> Iterator[Account]:
    print_line, flush = _collect_lines(request)
    account_report = Account(request.node.name.removeprefix("test_"), print_line)
    account_report.write_line(f"\n{account_report.fault} (seed {SEED})")
    yield account_report
    flush()
    test_report = getattr(request.node, "called", None)
    account_report.record_duration("took_s", account_report.elapsed)
    account_report.save(test_report.outcome if test_report else "error")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    report: Any = yield
    if call.when == "call":
        item.called = report  # type: ignore[attr-defined]
    return report


@pytest.fixture
def field(arena: Arena, account: Account, tmp_path: Path) -> Field:
    """A feed over an empty topic of three partitions."""
    return Field.create(arena, tmp_path, account)


@pytest.fixture
def crowd(arena: Arena, account: Account, tmp_path: Path) -> Field:
    """A feed over an empty topic of 24 partitions: each task reads several."""
    return Field.create(arena, tmp_path, account, partitions=24)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run the tests of `bucket` on S3, or on the stores of `SLUICE_TEST_LAKES` (`make lakes`)."""
    if "bucket" in metafunc.fixturenames and metafunc.module.__name__.endswith("test_lakes"):
        kinds = [kind for kind in LAKES if kind in ("s3", "azure", "google")]
        metafunc.parametrize("bucket", kinds or ["s3"], indirect=True)


@pytest.fixture
def bucket(request: pytest.FixtureRequest) -> Store | CloudStore:
    bucket: Store | CloudStore = request.getfixturevalue(f"{getattr(request, 'param', 's3')}_store")
    if isinstance(bucket, Store) and not bucket.local:
        pytest.skip("faults are played before moto's server")
    return bucket


@pytest.fixture
def store(bucket: Store | CloudStore) -> Iterator[Proxy]:
    """A proxy before the store, which injects faults into runs."""
    with run_proxy(bucket.settings.endpoint or "") as proxy:
        yield proxy


@pytest.fixture
def remote(field: Field, bucket: Store | CloudStore, store: Proxy, monkeypatch: pytest.MonkeyPatch) -> Field:
    """A feed whose lake is in the store. The checker reaches the store without the proxy."""
    for name, value in bucket.environment.items():
        monkeypatch.setenv(name, value)
    return with_store(field.with_settings(lake=bucket.make_address()), store.endpoint)
