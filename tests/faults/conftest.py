"""One cluster for each process of the suite, healed between two faults; each fault has its own topic and feed.

A module whose faults are none of Kafka's says `BROKERS = 1`: three cost three times the CPU.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.clouds import LAKES, CloudStore
from tests.faults.account import SEED, Account
from tests.faults.arena import Arena, opened
from tests.faults.field import Field
from tests.faults.nemeses.lakes import in_store
from tests.resources.lake.s3_faults import Proxy, run_proxy
from tests.stores import Store


@pytest.fixture(scope="session")
def shared_arena(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Arena]:
    with opened(tmp_path_factory.mktemp("arena") / "kafka") as made:
        yield made


@pytest.fixture(scope="session")
def lone_arena(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Arena]:
    with opened(tmp_path_factory.mktemp("arena") / "kafka", brokers=1) as made:
        yield made


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Those of one cluster follow each other, so that a process of the suite seldom has both."""
    items.sort(key=lambda item: _brokers(item) == 1)


def _brokers(item: pytest.Item) -> int:
    return getattr(getattr(item, "module", None), "BROKERS", 3)


@pytest.fixture
def arena(request: pytest.FixtureRequest) -> Iterator[Arena]:
    """The cluster, sound before and after."""
    found: Arena = request.getfixturevalue("lone_arena" if _brokers(request.node) == 1 else "shared_arena")
    found.heal()
    yield found
    found.heal()


def _teller(config: pytest.Config) -> Callable[[str], None]:
    """Lines for the terminal, past whatever pytest keeps of a test's output."""
    capture: Any = config.pluginmanager.getplugin("capturemanager")

    def tell(line: str) -> None:
        with capture.global_and_fixture_disabled():
            # Where courses run side by side, pytest talks with its workers over their standard output.
            print(line, flush=True, file=sys.stderr if hasattr(config, "workerinput") else sys.stdout)

    return tell


def _kept_together(request: pytest.FixtureRequest) -> tuple[Callable[[str], None], Callable[[], None]]:
    """Tell a course's lines as they come, or all at its end where others run beside it; and what tells them then."""
    tell = _teller(request.config)
    if not hasattr(request.config, "workerinput"):
        return tell, lambda: None
    lines: list[str] = []
    return lines.append, lambda: tell("\n".join(lines))


@pytest.fixture
def account(request: pytest.FixtureRequest) -> Iterator[Account]:
    tell, tell_rest = _kept_together(request)
    told = Account(request.node.name.removeprefix("test_"), tell)
    told.tell(f"\n{told.fault} (seed {SEED})")
    yield told
    tell_rest()
    report = getattr(request.node, "called", None)
    told.measured("took_s", told.elapsed)
    told.keep(report.outcome if report else "error")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    report: Any = yield
    if call.when == "call":
        item.called = report  # type: ignore[attr-defined]
    return report


@pytest.fixture
def field(arena: Arena, account: Account, tmp_path: Path) -> Field:
    """A feed over a topic of three partitions, nothing produced yet."""
    return Field.fresh(arena, tmp_path, account)


@pytest.fixture
def crowd(arena: Arena, account: Account, tmp_path: Path) -> Field:
    """The same over 24 partitions, several of which each task reads."""
    return Field.fresh(arena, tmp_path, account, partitions=24)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Courses of lakes run on S3, or on the stores of `SLUICE_TEST_LAKES` (`make lakes`)."""
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
    """A store as runs see it: its bad days are the proxy's."""
    with run_proxy(bucket.settings.endpoint or "") as proxy:
        yield proxy


@pytest.fixture
def remote(field: Field, bucket: Store | CloudStore, store: Proxy, monkeypatch: pytest.MonkeyPatch) -> Field:
    """A feed whose lake is in that store. The checker reaches the store itself."""
    for name, value in bucket.environment.items():
        monkeypatch.setenv(name, value)
    return in_store(field.with_settings(lake=bucket.lake()), store.endpoint)
