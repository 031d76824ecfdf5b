"""The lake on S3, in addition to `test_both_lakes`: faults of network and store by a proxy, and large objects."""

from __future__ import annotations

import io
import logging
import pickle
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial

import pytest
from pydantic import SecretStr

from sluice.pipelines.errors import (
    LakeFull,
    LakeUnavailable,
    NotAuthorized,
    SetupError,
    SluiceError,
    Terminal,
    Unknown,
)
from sluice.pipelines.feed.stores import S3Settings
from sluice.pipelines.lake import paths
from sluice.pipelines.ledger import Ledger
from sluice.pipelines.ledger.entries import OriginEntry, OriginItem, SkipEntry
from sluice.pipelines.operating.repairs import RepairKind
from sluice.pipelines.publishing.publish import abandon
from sluice.pipelines.util.parallel import AT_ONCE, map_parallel
from sluice.resources.lake import object_lake, open_store, s3
from sluice.resources.lake.object_lake import ObjectLake
from sluice.testing.engine import MemoryLiveness
from tests.pipelines.operating.test_repair import World
from tests.pipelines.publishing.test_publish import KEY
from tests.resources.lake.s3_faults import Proxy, Rule, run_proxy
from tests.stores import Store

MIB = 1 << 20


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Removes the pauses between tries."""
    monkeypatch.setattr(s3.time, "sleep", lambda _: None)
    monkeypatch.setattr("sluice.resources.lake.s3.patience", lambda *_: 0)
    monkeypatch.setattr(object_lake, "_checked_lakes", set())


@pytest.fixture(scope="module")
def one_proxy(s3_store: Store) -> Iterator[Proxy]:
    if not s3_store.local:
        pytest.skip("faults are played before moto's server")
    with run_proxy(s3_store.settings.endpoint or "") as proxy:
        yield proxy


@pytest.fixture
def between(one_proxy: Proxy) -> Proxy:
    """The proxy without rules and recorded requests."""
    one_proxy.rules, one_proxy.requests = [], []
    return one_proxy


def make_lake(store: Store, endpoint: str, **changes: object) -> ObjectLake:
    settings = {"endpoint": endpoint, "retries": 2, "part_bytes": 5 * MIB, "read_timeout_ms": 5000}
    return open_store(store.make_address(), store.settings.model_copy(update=settings | changes))


@pytest.fixture
def lake(s3_store: Store, between: Proxy) -> ObjectLake:
    """A lake behind the proxy that has passed its probe."""
    probed = make_lake(s3_store, between.endpoint)
    assert probed.put_if_absent("first", b"")
    probed.remove("first")
    between.requests.clear()
    return probed


@pytest.fixture
def aside(lake: ObjectLake, s3_store: Store) -> ObjectLake:
    """The same lake without the proxy."""
    return open_store(lake.uri, s3_store.settings)


# -- conditional writes


def test_own_write_with_a_lost_response_succeeds(lake: ObjectLake, between: Proxy) -> None:
    between.rules = [Rule("PUT .*log/1", "lose")]
    assert lake.put_if_absent("log/1", b"entry")
    assert not lake.put_if_absent("log/1", b"entry")
    assert lake.get("log/1") == b"entry"


def test_lost_response_after_write_of_other_writer_is_a_conflict(
    lake: ObjectLake, aside: ObjectLake, between: Proxy
) -> None:
    assert aside.put_if_absent("log/1", b"entry")
    between.rules = [Rule("PUT .*log/1", "lose")]
    assert not lake.put_if_absent("log/1", b"entry")


def test_write_without_response_is_unknown_and_ledger_reads_back(lake: ObjectLake, between: Proxy) -> None:
    between.rules = [Rule("PUT .*log/", "lose", times=3)]
    with pytest.raises(Unknown, match="no answer confirmed whether log/1 was created"):
        lake.put_if_absent("log/1", b"entry")
    assert lake.get("log/1") == b"entry"
    between.rules = [Rule("PUT .*_sluice/orders/log", "lose", times=3)]
    ledger = Ledger(lake, "orders", lambda: 7, "run")
    done = ledger.append(lambda state: SkipEntry(ranges=(), reason="a test") if state.number < 2 else None)
    assert done is not None
    assert (done.number, Ledger(lake, "orders", lambda: 7).read().number) == (0, 1)


@pytest.mark.parametrize("code", ["ConditionalRequestConflict", "OperationAborted"])
def test_conflicting_writes_are_retried(lake: ObjectLake, between: Proxy, code: str) -> None:
    between.rules = [Rule("PUT .*log/1", "refuse", times=2, status=409, code=code)]
    assert lake.put_if_absent("log/1", b"entry")
    between.rules = [Rule("PUT .*log/2", "refuse", times=-1, status=409, code=code)]
    with pytest.raises(Unknown):
        lake.put_if_absent("log/2", b"entry")


def test_exactly_one_rival_wins_each_number(s3_store: Store) -> None:
    lake = open_store(s3_store.make_address(), s3_store.settings)

    def play(me: int) -> list[int]:
        return [n for n in range(30) if lake.put_if_absent(f"log/{n:020}", str(me).encode())]

    with ThreadPoolExecutor(4) as pool:
        won = list(pool.map(play, range(4)))
    assert sorted(n for wins in won for n in wins) == list(range(30))
    for me, wins in enumerate(won):
        assert all(lake.get(f"log/{n:020}") == str(me).encode() for n in wins)


# -- guarantees of the store


def test_a_store_that_ignores_conditions_is_refused_before_anything_is_written(s3_store: Store, between: Proxy) -> None:
    lake = make_lake(s3_store, between.endpoint)
    between.rules = [Rule("PUT", "ignore", times=-1)]
    with pytest.raises(SetupError, match="does not honour conditional writes"):
        lake.put_if_absent("log/1", b"entry")
    assert list(lake.list("")) == []


def test_store_without_conditional_writes_is_refused(s3_store: Store, between: Proxy) -> None:
    lake = make_lake(s3_store, between.endpoint)
    between.rules = [Rule("PUT", "refuse", times=-1, status=501, code="NotImplemented")]
    with pytest.raises(SetupError, match="does not honour conditional writes"):
        lake.put_if_absent("log/1", b"entry")


@pytest.mark.parametrize(("seconds", "direction"), [(-3600, "60 min 0 s ahead"), (3600, "behind")])
def test_clock_skew_of_an_hour_is_refused_although_the_store_accepts_it(
    s3_store: Store, between: Proxy, seconds: int, direction: str
) -> None:
    lake = make_lake(s3_store, between.endpoint)
    between.rules = [Rule(".", "skew", times=-1, seconds=seconds)]
    with pytest.raises(SetupError, match="this machine's clock is") as caught:
        lake.put_if_absent("log/1", b"entry")
    assert direction.split()[-1] in caught.value.message
    assert list(lake.list("")) == []


def test_repeated_probe_costs_one_request(s3_store: Store, between: Proxy) -> None:
    lake = make_lake(s3_store, between.endpoint)
    assert lake.put_if_absent("log/1", b"")
    object_lake._checked_lakes.clear()  # as in another process
    between.requests.clear()
    assert lake.put_if_absent("log/2", b"")
    assert lake.put_if_absent("log/3", b"")
    assert [line.split()[0] for line in between.requests] == ["HEAD", "PUT", "PUT"]


# -- errors


@pytest.mark.parametrize(
    ("status", "code", "kind", "says"),
    [
        (404, "NoSuchBucket", SetupError, "aws s3 mb s3://"),
        (403, "AccessDenied", NotAuthorized, "s3:ListBucket"),
        (403, "InvalidAccessKeyId", NotAuthorized, "does not know these credentials"),
        (403, "SignatureDoesNotMatch", NotAuthorized, "does not know these credentials"),
        (400, "ExpiredToken", NotAuthorized, "have expired"),
        (400, "AuthorizationHeaderMalformed", SetupError, "s3.region"),
        (403, "RequestTimeTooSkewed", SetupError, "NTP"),
        (400, "KMS.DisabledException", NotAuthorized, "s3.kms_key"),
        (503, "SlowDown", LakeUnavailable, "tuning.s3_retries"),
        (500, "InternalError", LakeUnavailable, "run again"),
        (429, "TooManyRequests", LakeUnavailable, "run again"),
        (507, "XMinioStorageFull", LakeFull, "raise the quota"),
        (400, "InvalidDigest", Terminal, "InvalidDigest"),
    ],
)
def test_each_error_response_has_a_name_and_a_remedy(
    lake: ObjectLake, between: Proxy, status: int, code: str, kind: type[SluiceError], says: str
) -> None:
    between.rules = [Rule(".", "refuse", times=-1, status=status, code=code)]

    def write() -> None:
        with lake.create("big") as file:
            file.write(bytes(6 * MIB))

    calls: list[Callable[[], object]] = [
        lambda: lake.get("x"),
        lambda: lake.put("x", b""),
        lambda: list(lake.list("")),
        lambda: list(lake.list_unfinished("x")),
        lambda: lake.open("x"),
        lambda: lake.remove("x"),
        write,
    ]
    for call in calls:
        with pytest.raises(kind) as caught:
            call()
        assert says in str(caught.value)
        assert pickle.loads(pickle.dumps(caught.value)).message == caught.value.message


def test_missing_bucket_is_an_error(s3_store: Store) -> None:
    lake = open_store("s3://no-such-bucket-of-ours/x", s3_store.settings)
    for call in (lambda: list(lake.list("")), lambda: lake.put("x", b""), lambda: lake.put_if_absent("x", b"")):
        with pytest.raises((SetupError, NotAuthorized)):
            call()


def test_unreachable_endpoint_is_an_error(s3_store: Store) -> None:
    lake = make_lake(s3_store, "http://127.0.0.1:9", connect_timeout_ms=500)
    with pytest.raises(LakeUnavailable, match=r"127\.0\.0\.1:9"):
        lake.get("x")
    with pytest.raises(LakeUnavailable):
        lake.put_if_absent("x", b"")


def test_missing_credentials_or_profile_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, f"{tmp_path}/none")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    with pytest.raises(NotAuthorized, match="no credentials for s3://b"):
        open_store("s3://b", S3Settings(region="xx-nowhere-1")).get("x")
    with pytest.raises(SetupError, match="nobody"):
        open_store("s3://b", S3Settings(region="eu-west-1", profile="nobody")).get("x")


def test_secrets_are_in_no_error_log_or_repr(s3_store: Store, between: Proxy, caplog: pytest.LogCaptureFixture) -> None:
    secret = {n: SecretStr("hunter2-s3cr3t") for n in ("access_key_id", "secret_access_key", "session_token")}
    lake = make_lake(s3_store, between.endpoint, **secret)
    between.rules = [Rule("PUT", "refuse", status=403, code="AccessDenied", message="for hunter2-s3cr3t")]
    with caplog.at_level(logging.INFO), pytest.raises(SluiceError) as caught:
        lake.put("x", b"")
    texts = f"{caught.value}{caught.value.fields()}{lake.client!r}{caplog.text}"
    assert "hunter2" not in texts


@pytest.mark.parametrize(("status", "code"), [(404, "NotFound"), (501, "NotImplemented"), (412, "PreconditionFailed")])
def test_unexpected_response_is_a_terminal_error(lake: ObjectLake, between: Proxy, status: int, code: str) -> None:
    between.rules = [Rule(".", "refuse", times=-1, status=status, code=code)]
    for call in (lambda: lake.put("x", b""), lambda: list(lake.list("")), lambda: list(lake.list_unfinished("x"))):
        with pytest.raises(Terminal, match=rf"the store answered {code}"):
            call()


def test_server_that_is_not_s3_is_reported(lake: ObjectLake, between: Proxy) -> None:
    between.rules = [Rule("GET", "refuse", times=-1, status=400, message="<html>sign in<br></html>")]
    with pytest.raises(Terminal, match=r"s3\.endpoint"):
        list(lake.list(""))


def test_requests_are_attempted_as_often_as_configured(
    s3_store: Store, between: Proxy, caplog: pytest.LogCaptureFixture
) -> None:
    """Botocore stops its own retries for all requests of a process after about 35 of them."""
    lake = make_lake(s3_store, between.endpoint, retries=4)
    lake.put("x", b"1")
    for _ in range(20):
        between.rules = [Rule("GET", "lose", times=4)]
        assert lake.get("x") == b"1"
    between.rules, between.requests = [Rule("GET", "refuse", times=-1)], []
    caplog.clear()
    with pytest.raises(LakeUnavailable):
        lake.get("x")
    assert len(between.requests) == 5
    assert [r.getMessage() for r in caplog.records] == [
        "a request to the lake's S3 failed 3 times (status 503); 2 more attempts"
    ], "one warning a request"


# -- uploads


def make_pattern(size: int) -> bytes:
    return (bytes(range(251)) * (size // 251 + 1))[:size]


@pytest.mark.parametrize("how", ["reset", "lose", "refuse"])
@pytest.mark.parametrize("at", ["uploads", "partNumber=2", "POST .*uploadId="])
def test_disturbed_upload_completes(lake: ObjectLake, between: Proxy, how: str, at: str) -> None:
    data = make_pattern(12 * MIB)
    between.rules = [Rule(at, how, times=2)]
    with lake.create("part") as file:
        file.write(data)
    assert between.rules[0].times == 0, "the fault was played"
    assert lake.get("part") == data
    assert list(lake.list("")) == ["_sluice/.probe.json", "part"]


def test_failed_upload_leaves_nothing(lake: ObjectLake, aside: ObjectLake, between: Proxy) -> None:
    between.rules = [Rule("partNumber=2", "refuse", times=-1)]
    with pytest.raises(LakeUnavailable), lake.create("staging/part") as file:
        file.write(bytes(12 * MIB))
    assert aside.get("staging/part") is None
    assert list(aside.list_unfinished("staging")) == []


def test_missing_final_response_is_looked_up_or_unknown(lake: ObjectLake, aside: ObjectLake, between: Proxy) -> None:
    data = make_pattern(6 * MIB)
    between.rules = [Rule("POST .*uploadId=", "lose", times=3)]
    with lake.create("a/part") as file:
        file.write(data)
    assert lake.get("a/part") == data
    between.rules = [Rule("POST .*uploadId=", "lose", times=3), Rule("HEAD", "refuse", times=-1)]
    with pytest.raises(Unknown, match="complete in the lake"), lake.create("b/part") as file:
        file.write(data)
    assert aside.get("b/part") == data


def test_a_small_object_is_one_request(lake: ObjectLake, between: Proxy) -> None:
    with lake.create("small") as file:
        file.write(b"x" * MIB)
    assert len(between.requests) == 1


def test_discarded_upload_fails_and_stays_invisible(lake: ObjectLake, between: Proxy) -> None:
    ended = pytest.raises(LakeUnavailable, match="ended by somebody else")
    with ended, lake.create("staging/7/part") as file:
        file.write(bytes(15 * MIB))
        (unfinished,) = lake.list_unfinished("staging")
        assert unfinished[0].startswith("staging/7/part#")
        for _ in range(2):
            lake.discard(unfinished[0])
        between.rules = [Rule("uploadId=", "refuse", times=-1, status=404, code="NoSuchUpload")]  # moto says 500
    assert list(lake.list_unfinished("staging")) == []
    assert lake.get("staging/7/part") is None


def test_memory_is_bounded_with_many_open_uploads(
    lake: ObjectLake, s3_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 40 concurrent files of 6 MiB with a bound of 16 MiB, the excess is buffered on disk."""
    sizes = {"buffer_bytes": 16 * MIB, "part_bytes": 8 * MIB}
    bounded = open_store(lake.uri, s3_store.settings.model_copy(update=sizes))
    tracemalloc.start()
    with pytest.raises(KeyboardInterrupt), ExitStack() as uploads:  # noqa: PT012 - the block is the test
        files = [uploads.enter_context(bounded.create(f"x/{n}")) for n in range(40)]
        for _ in range(6):
            for file in files:
                file.write(bytes(MIB))
        _, peak = tracemalloc.get_traced_memory()
        raise KeyboardInterrupt
    tracemalloc.stop()
    assert peak < 32 * MIB
    assert list(bounded.list("x")) == []
    monkeypatch.setattr("tempfile.TemporaryFile", partial(open, "/dev/full", "w+b"))
    with bounded.create("y") as first, bounded.create("z") as second:
        for file in (first, second):
            file.write(bytes(7 * MIB))  # the memory is free again: nothing goes to the disk


@pytest.mark.parametrize(("size", "at"), [(3, "^PUT"), (7, "partNumber=1")])
def test_disturbed_upload_from_disk_completes(lake: ObjectLake, between: Proxy, size: int, at: str) -> None:
    on_disk = open_store(lake.uri, lake.client.settings.model_copy(update={"buffer_bytes": 1}))
    between.rules = [Rule(at, how) for how in ("lose", "refuse", "reset")][: 1 + lake.client.settings.retries // 2]
    with on_disk.create("x") as file:
        file.write(make_pattern(size * MIB))
    assert lake.get("x") == make_pattern(size * MIB)


def test_full_buffer_disk_error_names_tmpdir(
    lake: ObjectLake, s3_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error comes for a few bytes as well, which a buffer would have kept until the upload."""
    monkeypatch.setattr("tempfile.TemporaryFile", partial(open, "/dev/full", "w+b"))
    sizes = {"buffer_bytes": MIB, "part_bytes": 8 * MIB}
    bounded = open_store(lake.uri, s3_store.settings.model_copy(update=sizes))
    with bounded.create("y") as first:
        first.write(bytes(MIB))
        with pytest.raises(LakeFull) as refused, bounded.create("x") as file:
            file.write(b"a few")
    assert "TMPDIR" in (refused.value.remedy or "")
    assert bounded.size("x") is None


def test_part_size_grows_so_that_any_object_fits_ten_thousand_parts() -> None:
    sizes = [s3.choose_part_size(8 * MIB, sent) for sent in range(10_000)]
    assert sizes[0] == sizes[999] == 8 * MIB
    assert sizes[1000] == 16 * MIB
    assert sum(sizes) > 5 << 40, "5 TiB, S3's limit of one object"
    assert max(sizes) < 5 << 30, "5 GiB, S3's limit of one part"


def test_encryption_and_tags_are_set_on_every_object(lake: ObjectLake, s3_store: Store) -> None:
    options = {"sse": "AES256", "tags": {"team": "orders + more"}, "part_bytes": 5 * MIB}
    lake = open_store(lake.uri, s3_store.settings.model_copy(update=options))
    lake.put("put", b"")
    lake.put_if_absent("absent", b"")
    for name, size in (("small", 1), ("large", 6 * MIB)):
        with lake.create(name) as file:
            file.write(bytes(size))
        lake.show(name, f"shown-{name}")
    client = s3_store.open_client()
    for path in ("put", "absent", "small", "large", "shown-small", "shown-large"):
        address = {"Bucket": s3_store.bucket, "Key": find_key(lake, path)}
        assert client.head_object(**address)["ServerSideEncryption"] == "AES256"
        assert client.get_object_tagging(**address)["TagSet"] == [{"Key": "team", "Value": "orders + more"}], path


def find_key(lake: ObjectLake, path: str) -> str:
    return lake.locate(path).removeprefix(f"{lake.client.home.root}/")


class OnS3(World):
    """A feed's ledger and lake, on S3."""

    def __init__(self, lake: ObjectLake) -> None:
        self.lake = lake  # type: ignore[assignment]
        self.liveness = MemoryLiveness()
        self.ledger = self.reopen_ledger()
        self.ledger.append(lambda s: OriginEntry(items=(OriginItem(key=KEY, offset=0, committed=None, why="test"),)))


def test_repair_ends_abandoned_uploads_only(lake: ObjectLake, s3_store: Store) -> None:
    world, client = OnS3(lake), s3_store.open_client()
    live, given_up = world.plan(0, 10), world.plan(10, 20)
    abandon(world.ledger, given_up, "a test")
    staging = paths.staging_root("orders")
    created = [f"{staging}/{live}/a/data/x", f"{staging}/{given_up}/a/data/x", "data/orders/x"]
    for path in created:
        address = {"Bucket": s3_store.bucket, "Key": find_key(lake, path)}
        upload = client.create_multipart_upload(**address)["UploadId"]
        client.upload_part(**address, UploadId=upload, PartNumber=1, Body=bytes(5 * MIB))
    (repair,) = [f for f in world.repair() if f.kind is RepairKind.UNFINISHED]
    assert [name.partition("#")[0] for name in repair.items] == [created[1]]
    remaining = [
        name.partition("#")[0] for root in ("_sluice/orders", "data/orders") for name, _ in lake.list_unfinished(root)
    ]
    assert remaining == [created[0], created[2]], "the first one's owner lives; the second one began just now"


# -- reading and copying


def test_truncated_response_is_requested_again(lake: ObjectLake, between: Proxy) -> None:
    data = make_pattern(3 * MIB)
    lake.put("x", data)
    between.rules = [Rule("GET", "cut", times=2)]
    assert lake.get("x") == data
    between.rules = [Rule("GET", "cut", times=2)]
    assert lake.get("nothing") is None
    between.rules = [Rule("GET", "cut", times=1), Rule("GET", "reset", times=1)]
    with lake.open("x") as file:
        between.rules += [Rule("GET", "cut", times=2)]
        assert file.read() == data


def test_nested_calls_keep_their_connections(s3_store: Store, between: Proxy, caplog: pytest.LogCaptureFixture) -> None:
    """The client that all feeds share reuses its connections and logs no warning about a full pool."""
    lake, arrived = make_lake(s3_store, between.endpoint, read_timeout_ms=60_000), threading.Barrier(AT_ONCE * AT_ONCE)
    lake.put("x", b"x")
    between.rules = [Rule("GET", "slow", times=-1, then=lambda: arrived.wait(60) and None)]

    def get_some(_: int) -> list[bytes]:
        return map_parallel(lambda _: lake.get("x"), range(AT_ONCE), 0)

    assert map_parallel(get_some, range(AT_ONCE), 0) == [[b"x"] * AT_ONCE] * AT_ONCE
    assert "Connection pool is full" not in caplog.text


def test_footer_is_one_request_and_sequential_reads_are_few(lake: ObjectLake, between: Proxy) -> None:
    lake.put("x", make_pattern(20 * MIB))
    between.requests.clear()
    with lake.open("x") as file:
        file.seek(-1000, io.SEEK_END)
        file.read()
        assert len(between.requests) == 1
        file.seek(0)
        while file.read(100_000):
            pass
    assert len(between.requests) < 12


def test_object_replaced_while_read_is_detected(lake: ObjectLake) -> None:
    lake.put("x", make_pattern(2 * MIB))
    with lake.open("x") as file:
        lake.put("x", bytes(2 * MIB))
        with pytest.raises(LakeUnavailable, match="was replaced or removed while it was read"):
            file.read()


def test_listing_is_requested_page_by_page_from_its_start_path(
    lake: ObjectLake, aside: ObjectLake, between: Proxy
) -> None:
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda n: aside.put(f"d/{n:05}", b""), range(1010)))
    listed = lake.list("d")
    assert next(listed) == "d/00000"
    # A set: of a slow server, a request may be repeated.
    assert len({*between.requests}) == 1, "the second page was not asked for"
    assert len(list(listed)) == 1009
    between.requests.clear()
    assert list(lake.list("d", after="d/01007")) == ["d/01008", "d/01009"]
    assert len({*between.requests}) == 1


@pytest.mark.parametrize("how", ["lose", "refuse", "reset"])
def test_disturbed_copy_is_made_once(lake: ObjectLake, between: Proxy, how: str) -> None:
    lake.put("staging/p", b"rows")
    between.rules = [Rule("PUT .*data/p", how, times=2)]
    lake.show("staging/p", "data/p")
    assert lake.get("data/p") == b"rows"


def test_show_replaces_an_empty_target_object(lake: ObjectLake) -> None:
    lake.put("staging/p", b"rows")
    lake.put("data/p", b"")
    lake.show("staging/p", "data/p")
    assert lake.get("data/p") == b"rows"


def test_object_too_large_for_one_copy_is_copied_by_ranges(lake: ObjectLake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3, "COPIED_AT_ONCE", 6 * MIB)
    monkeypatch.setattr(s3, "COPY_RANGE", 5 * MIB)
    data = make_pattern(12 * MIB)
    lake.put("staging/p", data)
    lake.show("staging/p", "data/p")
    lake.show("staging/p", "data/p")
    assert lake.get("data/p") == data


def test_copy_by_ranges_with_a_lost_final_response_succeeds(
    lake: ObjectLake, between: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(s3, "COPIED_AT_ONCE", 6 * MIB)
    monkeypatch.setattr(s3, "COPY_RANGE", 5 * MIB)
    data = make_pattern(12 * MIB)
    lake.put("staging/p", data)
    last = "POST .*data/p.*uploadId"  # some stores do not know an upload any more once it is complete
    between.rules = [Rule(last, "lose"), Rule(last, "refuse", status=404, code="NoSuchUpload")]
    lake.show("staging/p", "data/p")
    assert lake.get("data/p") == data


def test_failed_copy_by_ranges_leaves_nothing(
    lake: ObjectLake, aside: ObjectLake, between: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(s3, "COPIED_AT_ONCE", 6 * MIB)
    monkeypatch.setattr(s3, "COPY_RANGE", 5 * MIB)
    lake.put("staging/p", make_pattern(12 * MIB))
    between.rules = [Rule("partNumber=2", "refuse", times=-1)]
    with pytest.raises(LakeUnavailable):
        lake.show("staging/p", "data/p")
    assert aside.get("data/p") is None
    assert list(aside.list_unfinished("data")) == []
