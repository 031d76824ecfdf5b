"""Faults of lakes on Azure and Google Cloud: lost answers, refusals, concurrent writers, and secrets in errors."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from sluice.pipelines.errors import (
    LakeUnavailable,
    NotAuthorized,
    ProofFailed,
    SetupError,
    SluiceError,
    Unknown,
)
from sluice.resources.lake import open_store
from tests.clouds import DELETES, KEY, RETENTION, CloudStore
from tests.resources.lake.s3_faults import Proxy, Rule, run_proxy

pytest.importorskip("obstore")

ENTRY = "_sluice/f/log/1.json"
WRITES = r"^PUT .*1(\.|%2E)json"


@pytest.fixture(params=["azure", "google"])
def store(request: pytest.FixtureRequest) -> CloudStore:
    chosen: CloudStore = request.getfixturevalue(f"{request.param}_store")
    return chosen


@pytest.fixture
def proxy(store: CloudStore) -> Iterator[Proxy]:
    with run_proxy(store.settings.endpoint or "") as between:
        yield between


@pytest.fixture
def lake(store: CloudStore, proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A lake behind the proxy that has passed its probe."""
    monkeypatch.setattr("sluice.resources.lake.obstore_client.choose_pause", lambda _: 0)
    behind = store.pass_through(proxy.endpoint)
    probed = open_store(behind.make_address(), behind.settings.model_copy(update={"retries": 1}))
    probed.put_if_absent("before", b"")
    proxy.requests.clear()
    return probed


def count(proxy: Proxy, start: str) -> int:
    return sum(line.startswith(start) for line in proxy.requests)


def test_lost_response_is_distinguished_from_a_refusal(lake: Any, proxy: Proxy) -> None:
    proxy.rules[:] = [Rule(WRITES, "lose")]
    assert lake.put_if_absent(ENTRY, b"ours"), "the second try finds the first one's object and recognizes its id"
    assert count(proxy, "PUT") == 2
    assert not lake.put_if_absent(ENTRY, b"ours")
    assert lake.get(ENTRY) == b"ours"


def test_other_writer_wins_behind_a_lost_response(lake: Any, proxy: Proxy, store: CloudStore) -> None:
    other = open_store(lake.uri, store.settings)
    proxy.rules[:] = [Rule(WRITES, "reset")]
    assert other.put_if_absent(ENTRY, b"theirs")
    assert not lake.put_if_absent(ENTRY, b"ours")
    assert lake.get(ENTRY) == b"theirs"


def test_write_without_any_response_is_unknown(lake: Any, proxy: Proxy) -> None:
    proxy.rules[:] = [Rule(WRITES, "lose", times=-1)]
    with pytest.raises(Unknown, match="no answer confirmed"):
        lake.put_if_absent(ENTRY, b"ours")
    proxy.rules.clear()
    assert lake.get(ENTRY) == b"ours"


def test_one_of_many_writers_wins(lake: Any, store: CloudStore) -> None:
    lakes = [open_store(lake.uri, store.settings) for _ in range(8)]
    with ThreadPoolExecutor(8) as pool:
        won = list(pool.map(lambda n: lakes[n].put_if_absent(ENTRY, str(n).encode()), range(8)))
    assert won.count(True) == 1
    assert lake.get(ENTRY) == str(won.index(True)).encode()


@pytest.mark.parametrize("status", [429, 500, 503])
def test_throttling_store_is_retried_and_then_reported(lake: Any, proxy: Proxy, status: int) -> None:
    proxy.rules[:] = [Rule(WRITES, "refuse", status=status, code="ServerBusy")]
    assert lake.put_if_absent(ENTRY, b"ours")
    proxy.rules[:] = [Rule("^GET", "refuse", times=-1, status=status, code="ServerBusy")]
    with pytest.raises(LakeUnavailable, match="the store is busy or unavailable"):
        lake.get(ENTRY)


def test_unreachable_store_is_unavailable(lake: Any, proxy: Proxy) -> None:
    proxy.rules[:] = [Rule(".", "reset", times=-1)]
    with pytest.raises(LakeUnavailable):
        lake.get(ENTRY)
    with pytest.raises(Unknown):
        lake.put_if_absent(ENTRY, b"ours")
    proxy.rules.clear()
    assert lake.get(ENTRY) is None


def test_upload_with_a_lost_response_exists_once(lake: Any, proxy: Proxy) -> None:
    proxy.rules[:] = [Rule("^PUT .*part", "lose")]
    with lake.create("data/part") as file:
        file.write(b"rows")
    assert lake.get("data/part") == b"rows"
    proxy.rules[:] = [Rule("^PUT .*other", "lose", times=-1), Rule("^HEAD .*other", "reset", times=-1)]
    with pytest.raises(Unknown), lake.create("data/other") as file:
        file.write(b"rows")
    proxy.rules.clear()
    assert lake.get("data/other") == b"rows"


def test_copy_with_a_lost_response_exists_once(lake: Any, proxy: Proxy) -> None:
    lake.put("staging/p", b"rows")
    proxy.rules[:] = [Rule("^PUT .*data", "lose")]
    lake.show("staging/p", "data/p")
    assert lake.get("data/p") == b"rows"
    lake.put("staging/q", b"more rows")
    with pytest.raises(ProofFailed):
        lake.show("staging/q", "data/p")


def test_object_replaced_while_read_is_an_error(lake: Any) -> None:
    lake.put("x", bytes(3 << 20))
    with lake.open("x") as file:
        file.read(10)
        lake.put("x", b"1" * (3 << 20))
        with pytest.raises(LakeUnavailable, match="replaced or removed"):
            file.read()


def test_truncated_response_is_read_again(lake: Any, proxy: Proxy) -> None:
    lake.put("x", bytes(1 << 20))
    proxy.rules[:] = [Rule("^GET", "cut")]
    assert lake.get("x") == bytes(1 << 20)


def test_truncated_listing_is_read_again(lake: Any, proxy: Proxy) -> None:
    for name in "abc":
        lake.put(f"x/{name}", b"")
    proxy.rules[:] = [Rule(r"^GET .*(comp=list|list-type)", "cut")]
    assert [*lake.list("x")] == ["x/a", "x/b", "x/c"]
    proxy.rules[:] = [Rule(r"^GET .*(comp=list|list-type)", "cut", times=-1)]
    with pytest.raises(LakeUnavailable):
        list(lake.list("x"))


REFUSALS = [
    (401, "AuthenticationFailed", NotAuthorized, "wrong or expired"),
    (403, "AuthenticationFailed", NotAuthorized, "wrong or expired"),
    (403, "AuthorizationPermissionMismatch", NotAuthorized, "forbids"),
    (403, "AccessDenied", NotAuthorized, "forbids"),
    (409, "BlobImmutableDueToPolicy", SetupError, "retention policy"),
    (403, "RetentionPolicyNotMet", SetupError, "retention policy"),
    (404, "ContainerNotFound", SetupError, "no bucket or container"),
    (404, "NoSuchBucket", SetupError, "no bucket or container"),
]


@pytest.mark.parametrize(("status", "code", "kind", "message"), REFUSALS)
def test_refusal_is_a_clear_error(
    lake: Any, proxy: Proxy, status: int, code: str, kind: type[SluiceError], message: str
) -> None:
    proxy.rules[:] = [Rule("^PUT", "refuse", times=-1, status=status, code=code)]
    with pytest.raises(kind, match=message) as refused:
        lake.put(ENTRY, b"ours")
    assert refused.value.remedy
    with pytest.raises(kind, match=message):
        lake.put_if_absent(ENTRY, b"ours")
    proxy.rules.clear()
    assert lake.get(ENTRY) is None


def test_missing_list_permission_is_an_error_and_not_an_empty_ledger(lake: Any, proxy: Proxy) -> None:
    proxy.rules[:] = [Rule(r"^GET .*(comp=list|list-type)", "refuse", times=-1, status=403, code="AccessDenied")]
    with pytest.raises(NotAuthorized, match="forbids"):
        list(lake.list("_sluice/f/log"))


def test_missing_bucket_is_an_error(store: CloudStore) -> None:
    nowhere = open_store(f"{store.scheme}://nowhere/x", store.settings)
    for ask in (lambda: list(nowhere.list("a")), lambda: nowhere.put_if_absent(ENTRY, b"")):
        with pytest.raises(SetupError, match="no bucket or container nowhere"):
            ask()


def test_a_store_that_ignores_conditions_is_refused(store: CloudStore, proxy: Proxy) -> None:
    if store.scheme == "az":
        pytest.skip("a request to Azure is signed with its condition")
    fresh = open_store(store.make_address(), store.pass_through(proxy.endpoint).settings)
    proxy.rules[:] = [Rule("^PUT", "ignore", times=-1)]
    with pytest.raises(SetupError, match="conditional writes"):
        fresh.put_if_absent(ENTRY, b"")
    proxy.rules.clear()
    assert [p for p in fresh.list("") if not p.startswith("_sluice/.probe")] == []


def test_store_that_forbids_deletes_is_refused_before_the_first_entry(store: CloudStore, proxy: Proxy) -> None:
    fresh = open_store(store.make_address(), store.pass_through(proxy.endpoint).settings)
    proxy.rules[:] = [Rule(DELETES, "refuse", times=-1, **RETENTION[store.scheme])]
    with pytest.raises(SetupError, match="retention policy"):
        fresh.put_if_absent(ENTRY, b"")


def test_missing_credentials_are_an_error(azure_store: CloudStore, monkeypatch: pytest.MonkeyPatch) -> None:
    with run_proxy(azure_store.settings.endpoint or "") as metadata:
        metadata.rules[:] = [Rule(".", "refuse", times=-1, status=403, code="no", message="no identity here")]
        monkeypatch.setenv("AZURE_MSI_ENDPOINT", metadata.endpoint)
        settings = azure_store.settings.model_copy(update={"account_key": None, "retries": 0})
        with pytest.raises(NotAuthorized, match="no credentials for az://lake") as refused:
            open_store(azure_store.make_address(), settings).get("x")
    assert "AZURE_STORAGE_ACCOUNT_KEY" in refused.value.remedy


def test_errors_and_reprs_contain_no_secret(lake: Any, store: CloudStore, proxy: Proxy) -> None:
    secret = "emulator" if store.scheme == "gs" else KEY
    detail = f"token {secret} is bad, sig=abc%2Fdef"
    proxy.rules[:] = [Rule("^PUT", "refuse", times=-1, status=403, code="AccessDenied", message=detail)]
    with pytest.raises(NotAuthorized) as refused:
        lake.put("x", b"")
    for text in (str(refused.value), repr(refused.value.__context__), repr(lake.client), repr(lake.client.settings)):
        assert secret not in text
        assert "abc%2Fdef" not in text
