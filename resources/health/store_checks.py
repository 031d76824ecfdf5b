"""Checks a lake in an object store, without writing: clock, rights, and settings of the bucket that keep old objects.

A right is checked by a request that needs it and cannot change anything: for an object that does not exist, or on
a condition that does not hold.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, NamedTuple, cast

from sluice.pipelines.errors import NotAuthorized, SluiceError
from sluice.pipelines.feed.stores import AzureSettings, StoreSettings
from sluice.pipelines.model.health import (
    Diagnosis,
    of_error,
    report_failure,
    report_ok,
    report_skipped,
    report_warning,
)
from sluice.resources.health import Check
from sluice.resources.lake import open_store
from sluice.resources.lake.object_lake import MAX_SKEW_S, PROBE_FOLDER, PROBE_NOTE, ObjectLake, describe_skew
from sluice.resources.lake.streams import NotThere, Signal

if TYPE_CHECKING:
    from sluice.resources.lake.cloud_client import Container
    from sluice.resources.lake.s3_client import Bucket

LEDGERS = "_sluice"
HASTY_MS = 5_000
_SOON = timedelta(days=7)
_KEEPS = "keeps replaced and removed objects until a lifecycle rule removes them"


class _Names(NamedTuple):
    """A right as each store names it; `letter` is that of a SAS token."""

    s3: str
    google: str = ""
    azure: str = ""
    letter: str = ""


_RIGHTS = {
    "list": _Names("s3:ListBucket on the bucket", "storage.objects.list", "Reader", "l"),
    "read": _Names("s3:GetObject below the prefix", "storage.objects.get", "Reader", "r"),
    "write": _Names(
        "s3:PutObject below the prefix", "storage.objects.create and storage.objects.delete", "Contributor", "w"
    ),
    "remove": _Names("s3:DeleteObject below the prefix", "storage.objects.delete", "Contributor", "d"),
    "end uploads": _Names("s3:AbortMultipartUpload below the prefix"),
    "list uploads": _Names("s3:ListBucketMultipartUploads on the bucket"),
}


def open_hastily(address: str, settings: StoreSettings) -> ObjectLake:
    """The lake, whose requests use short timeouts regardless of the feed's settings."""
    waits = {n: min(HASTY_MS, getattr(settings, n)) for n in ("connect_timeout_ms", "read_timeout_ms")}
    return cast(ObjectLake, open_store(address, settings.model_copy(update=waits | {"retries": 1})))


def check_store(lake: ObjectLake) -> Iterator[Diagnosis]:
    """Check the clock and the right to list; if it is there, the other rights and the bucket's settings."""
    on_s3 = lake.place.scheme == "s3"
    yield from _check_clock(_measure_s3_skew(lake) if on_s3 else cast("Container", lake.bucket).measure_skew())
    yield from _check_token(lake.settings)
    try:
        first = next(iter(lake.list(LEDGERS)), None)
    except NotAuthorized as error:
        yield _report_missing(lake, "list", error)
        return
    except SluiceError as error:
        yield of_error("listing", error)
        return
    summary = "the ledger can be listed" if first else "it can be listed, and nothing has landed yet"
    yield report_ok("listing", f"{lake.uri}: {summary}")
    yield from _check_rights(lake, _list_s3_attempts(lake) if on_s3 else _list_cloud_attempts(lake))
    yield from _check_versions_on_s3(lake) if on_s3 else _check_versions(lake)


def check_probe(lake: ObjectLake) -> Iterator[Diagnosis]:
    """Check for the note of the first writing process, which shows that the store passed the probe."""
    title = "conditional writes"
    try:
        is_tested = lake.is_tested()
    except SluiceError as error:
        yield report_skipped(title, f"not checked: {error.message}")
        return
    if is_tested:
        yield report_ok(title, f"the store keeps them: tested by a run, which left {PROBE_NOTE}")
    else:
        yield report_skipped(title, "only a write shows it; the first run tests them before it writes anything else")


IN_A_STORE: tuple[Check[ObjectLake], ...] = (
    Check("listing", check_store),
    Check("conditional writes", check_probe),
)


# -- rights

Attempts = Mapping[str, Callable[[str], object]]


def _check_rights(lake: ObjectLake, attempts: Attempts) -> Iterator[Diagnosis]:
    key = f"{lake.place.prefix}{PROBE_FOLDER}{secrets.token_hex(8)}"
    granted = []
    for right, attempt in attempts.items():
        try:
            attempt(key)
            granted.append(right)
        except Signal:  # the object does not exist
            granted.append(right)
        except NotAuthorized as error:
            yield _report_missing(lake, right, error)
        except SluiceError as error:
            yield report_skipped(f"right to {right}", f"the store does not show it: {error.message}")
    if granted:
        yield report_ok("rights", f"this user may {', '.join(granted)} below the lake")


def _list_s3_attempts(lake: ObjectLake) -> Attempts:
    bucket = cast("Bucket", lake.bucket)
    upload = {"UploadId": "none"}
    return {
        "read": bucket.fetch,
        "write": lambda key: bucket.call("upload_part", key, PartNumber=1, Body=b"", **upload),
        "remove": lambda key: bucket.call("delete_object", key, IfMatch='"none"'),
        "end uploads": lambda key: bucket.call("abort_multipart_upload", key, **upload),
        "list uploads": lambda key: bucket.call("list_multipart_uploads", "", Prefix=key, MaxUploads=1),
    }


def _list_cloud_attempts(lake: ObjectLake) -> Attempts:
    container = cast("Container", lake.bucket)
    return {"read": container.fetch, "write": container.try_replace, "remove": container.remove}


def _report_missing(lake: ObjectLake, right: str, error: NotAuthorized) -> Diagnosis:
    names = _RIGHTS[right]
    if "forbids" not in error.message:  # the credentials are wrong or expired
        return of_error("credentials", error)
    if lake.place.scheme == "s3":
        remedy = f"grant {names.s3}"
    elif lake.place.scheme == "gs":
        role = "storage.objectViewer" if names.azure == "Reader" else "storage.objectUser"
        remedy = f"grant {names.google} (roles/{role}) on the bucket or the prefix"
    else:
        remedy = f"grant Storage Blob Data {names.azure} on the container, or the letter {names.letter} of a SAS token"
    return report_failure(f"right to {right}", error.message, remedy)


def _check_token(settings: StoreSettings) -> Iterator[Diagnosis]:
    """The end, scope and letters of a SAS token, which show more than the store's refusals."""
    if not isinstance(settings, AzureSettings) or settings.sas_token is None:
        return
    title, renew = "SAS token", "put a new one into azure.sas_token"
    fields, end = settings.token_fields, settings.token_end
    missing = [letter for letter in "rwdl" if letter not in fields.get("sp", "rwdl")]
    if end and end <= datetime.now(UTC):
        yield report_failure(title, f"it expired at {fields['se']}", renew)
    elif fields.get("sr") == "b":
        yield report_failure(title, "it is for one blob", "create one for the container (sr=c)")
    elif missing:
        yield report_failure(
            title, f"it lacks {', '.join(missing)}", "create one with the letters rcwdl; readers need r and l alone"
        )
    elif end and end <= datetime.now(UTC) + _SOON:
        yield report_warning(title, f"it expires at {fields['se']}", renew)
    elif end:
        yield report_ok(title, f"it is valid until {fields['se']}")


# -- clock


def _check_clock(ahead: float | None) -> Iterator[Diagnosis]:
    if ahead is None:
        return
    if abs(ahead) > MAX_SKEW_S:
        yield report_failure("clock", f"{describe_skew(ahead)} of the store's", "set this machine's clock (NTP)")
    else:
        yield report_ok(
            "clock", "as the store's, to the second" if abs(ahead) < 2 else f"{describe_skew(ahead)} of the store's"
        )


def _measure_s3_skew(lake: ObjectLake) -> float | None:
    from sluice.resources.lake.s3_client import skew  # late: a local lake does without boto3

    with suppress(SluiceError):
        bucket = cast("Bucket", lake.bucket)
        return skew(bucket.call("list_objects_v2", "", Prefix=f"{lake.place.prefix}{LEDGERS}/", MaxKeys=1))
    return None


# -- old objects


def _check_versions_on_s3(lake: ObjectLake) -> Iterator[Diagnosis]:
    with suppress(SluiceError, Signal):  # no run needs the right to see it
        answer = cast("Bucket", lake.bucket).call("get_bucket_versioning", "")
        if answer.get("Status") == "Enabled":
            yield report_ok("versioning", f"the bucket {_KEEPS}")


def _check_versions(lake: ObjectLake) -> Iterator[Diagnosis]:
    """Azure shows versions and policies with each blob, Google Cloud only with the bucket, to its administrators."""
    headers: Mapping[str, str] = {}
    with suppress(SluiceError, NotThere):
        headers = cast("Container", lake.bucket).read_headers(lake.place.prefix + PROBE_NOTE)
    if "x-ms-immutability-policy-until-date" in headers or headers.get("x-ms-legal-hold") == "true":
        yield report_failure(
            "retention",
            "a retention policy or legal hold keeps objects from being replaced or removed",
            "give the lake a container without them",
        )
    if "x-ms-version-id" in headers:
        yield report_ok("versioning", f"the container {_KEEPS}")
