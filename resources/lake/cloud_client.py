"""One bucket of Google Cloud Storage or one container of Azure, through obstore.

Guarantees: a permanent failure is raised at once, with its remedy. A transient one is retried up to `retries` times,
and is then LakeUnavailable. No error contains a secret. Each process makes its clients once and shares them among its
threads; nothing is opened before the first request.
"""

from __future__ import annotations

import json
import os
import random
import re
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from functools import lru_cache
from http.client import HTTPException
from typing import Any, TypeVar
from urllib.request import Request

import obstore
from obstore import exceptions as refusals
from obstore.store import AzureStore, GCSStore
from pydantic import SecretStr

from sluice.pipelines.errors import LakeFull, LakeUnavailable, NotAuthorized, SetupError, SluiceError, Terminal
from sluice.pipelines.feed.stores import AzureSettings, GcsSettings, Place, StoreSettings, place
from sluice.resources import web
from sluice.resources.lake.streams import Block, NotThere, OutOfRange, Taken

WRITE_ID = "sluice_write"
"""The key in an object's own metadata for the id of the write that made it: Azure takes identifiers alone."""
SLOWEST = 1 << 20
"""Bytes a second: a request may take its time-out, and as long as its body takes at this speed."""
_BACKOFF: Any = {"init_backoff": timedelta(seconds=0.5), "max_backoff": timedelta(seconds=20), "base": 2}

Answer = TypeVar("Answer")
_AZURE = "https://{}.blob.core.windows.net"
_ADDRESSES = {"gs": "https://storage.googleapis.com", "az": _AZURE, "abfss": _AZURE}
_STATUS = re.compile(r"status code: (\d{3})|\(code: (\d{3})\)")
_CODE = re.compile(r"<Code>([A-Za-z0-9]+)</Code>|\"reason\": ?\"(\w+)\"")
_DETAIL = re.compile(
    r"<(?:Message|Details)>([^<\n]{1,300})|\"message\": ?\"([^\"]{1,300})\""
    r"|Bulk delete request failed for key .{1,1100}?: ([^:\n]{1,300}) \(code"
)
_IS_KEPT = re.compile(r"immutable due to|cannot be deleted, overwritten|under active .{1,20} hold")
_BROKEN = "response body"
_KIND = re.compile(r"kind: (Timeout|Interrupted|Unknown|Decode)\b")


@dataclass(frozen=True)
class Container:
    """Requests to one bucket or container. Picklable: a client is made where it is needed."""

    home: Place
    settings: StoreSettings

    @property
    def on_azure(self) -> bool:
        return isinstance(self.settings, AzureSettings)

    def make_client(self, size: int = 0) -> Any:
        """The client for requests with a body of that size."""
        seconds = self.settings.read_timeout_ms / 1000
        while size > (seconds - self.settings.read_timeout_ms / 1000) * SLOWEST and size > 8 << 20:
            seconds *= 2
        try:
            return _make_client(os.getpid(), self.home, self.settings, seconds)
        except (refusals.BaseError, ValueError) as error:
            failure = error
        raise self._translate(failure, "")

    def create(self, key: str, data: bytes, write: str) -> bool:
        """Create the object. Returns False if the key is taken, also by a write of this id. Raises LakeUnavailable."""
        taken = (refusals.AlreadyExistsError, refusals.PreconditionError)
        try:
            self._call(key, lambda: self._put(key, data, write, "create"), once=True, expected=taken)
            return True
        except taken as error:
            conflict = error
        owner = self.find_writer(key)
        if owner is None:  # a conflict of another kind, or the object is gone again
            raise self._translate(conflict, key)
        return owner == write

    def put(self, key: str, data: Any, write: str = "") -> None:
        self._call(key, lambda: self._put(key, data, write, "overwrite"))

    def _put(self, key: str, data: Any, write: str, mode: Any) -> None:
        attributes: Any = {WRITE_ID: write} if write else {}
        client, missing = self.make_client(len(data)), False
        try:
            obstore.put(client, key, data, attributes=attributes, mode=mode, use_multipart=False)
        except FileNotFoundError:
            missing = True
        if missing:  # a write needs nothing but the bucket
            raise self._explain_missing_bucket()

    def find_writer(self, key: str) -> str | None:
        """The id of the write that made the object; None if there is no object."""
        try:
            return str(self._read_head(key).attributes.get(WRITE_ID, ""))
        except NotThere:
            return None

    def read_meta(self, key: str) -> Any:
        """The object's `size`, `e_tag`, `version` and `last_modified`. Raises NotThere."""
        return self._read_head(key).meta

    def _read_head(self, key: str) -> Any:
        return self._call(key, lambda: obstore.get(self.make_client(), key, options={"head": True}))

    def fetch(self, key: str, span: str = "", etag: str = "") -> Block:
        """The object, or the `span` of it (as after `bytes=`), only if its content has that tag.

        Raises NotThere, Taken, OutOfRange.
        """
        if span.startswith("-"):
            meta = self.read_meta(key)
            begin = max(0, meta["size"] - int(span[1:]))
            if not meta["size"]:
                raise self._make_signal(OutOfRange, key)
            span, etag = f"{begin}-{meta['size'] - 1}", _tag(meta)
        options: Any = {}
        if span:
            first, _, last = span.partition("-")
            options["range"] = (int(first), int(last) + 1)
        if etag:
            match, _, version = etag.partition("#")
            options["if_match"] = match
            options |= {"version": version} if version else {}

        def fetch_whole() -> Block:
            answer = obstore.get(self.make_client(), key, options=options)
            return Block(answer.range[0], bytes(answer.bytes()), answer.meta["size"], _tag(answer.meta))

        return self._call(key, fetch_whole, once=True)

    def copy(self, origin: str, key: str) -> None:
        """Copy the object; does nothing if the key is taken. Raises NotThere without an origin."""
        taken = (refusals.AlreadyExistsError, refusals.PreconditionError)
        try:
            self._call(
                key, lambda: obstore.copy(self.make_client(), origin, key, overwrite=False), once=True, expected=taken
            )
            return
        except taken as error:
            conflict = error
        if self.find_writer(key) is None:
            raise self._translate(conflict, key)

    def remove(self, key: str) -> None:
        """Raises NotThere."""
        self._call(key, lambda: obstore.delete(self.make_client(), key), once=True)

    def try_replace(self, key: str) -> None:
        """Replace a version of the object that never existed. Raises Taken with the right to write: nothing changes."""
        never: Any = {"e_tag": '"0x0"', "version": "1"}
        self._call(key, lambda: obstore.put(self.make_client(), key, b"", mode=never, use_multipart=False))

    def read_headers(self, key: str) -> Mapping[str, str]:
        """Azure's own headers of the blob, by lower-case name; empty if no address of it can be signed here."""
        if not self.on_azure:
            return {}
        with suppress(refusals.BaseError, OSError, ValueError, HTTPException):  # their texts hold signatures
            address = obstore.sign(self.make_client(), "GET", key, timedelta(minutes=5))
            answer = web.send(Request(address), seconds=self.settings.connect_timeout_ms / 1000)
            return {name.lower(): value for name, value in answer.headers.items()} if answer.status == 200 else {}
        return {}

    def measure_skew(self) -> float | None:
        """Returns how many seconds this machine's clock is ahead of the store's; None if the store does not say.

        Any answer has a date, so the request needs no credentials.
        """
        address = self.settings.endpoint or _ADDRESSES[self.home.scheme]
        if "{}" in address:
            account = self.home.account or getattr(self.settings, "account", None)
            address = address.format(account or os.environ.get("AZURE_STORAGE_ACCOUNT_NAME", ""))
        with suppress(OSError, ValueError, TypeError, HTTPException):
            answer = web.send(Request(address), seconds=self.settings.connect_timeout_ms / 1000)
            return (datetime.now(UTC) - parsedate_to_datetime(answer.headers["Date"])).total_seconds()
        return None

    def list_below(self, folder: str, after: str = "") -> Any:
        """The objects below the folder, which is empty or ends in a slash. A listing that breaks off goes on after its
        last object; on Azure, whose order may be another one, it begins again."""
        pages, listed = None, set[str]()

        def read_page() -> Any:
            nonlocal pages
            if pages is None:
                offset = after or None
                pages = iter(obstore.list(self.make_client(), folder.rstrip("/"), offset=offset, chunk_size=1000))
            try:
                return next(pages, None)
            except Exception:
                pages = None
                raise

        while page := self._call(folder, read_page):
            for one in page:
                if one["path"] in listed:
                    continue
                if self.on_azure:
                    listed.add(one["path"])
                else:
                    after = one["path"]
                yield one

    def list_folders(self, folder: str) -> list[str]:
        answer = self._call(folder, lambda: obstore.list_with_delimiter(self.make_client(), folder.rstrip("/")))
        return sorted(f"{one}/".removeprefix(folder).rstrip("/") for one in answer["common_prefixes"])

    def _call(
        self,
        key: str,
        ask: Callable[[], Answer],
        *,
        once: bool = False,
        expected: tuple[type[Exception], ...] = (),
    ) -> Answer:
        """The answer. Raises errors that are `expected`, a Signal, or the error that the failure means.

        obstore tries again by itself unless a request is sent only `once`, or an answer broke off: then this does it.
        """
        for attempt in range(self.settings.retries + 1):
            try:
                return ask()
            except expected:
                raise
            except (refusals.BaseError, ValueError, OSError) as error:
                failure = error
            unanswered = _BROKEN in str(failure) or (once and _KIND.search(str(failure)))
            if not unanswered or attempt == self.settings.retries:
                raise self._translate(failure, key)  # outside of the handler: its text may hold a secret
            time.sleep(choose_pause(attempt))
        raise AssertionError

    def _explain_missing_bucket(self) -> SetupError:
        return SetupError(
            f"there is no bucket or container {self.home.bucket}",
            remedy="create it, or fix `lake` and the account or endpoint in the feed",
        )

    def _explain_token(self, where: str) -> NotAuthorized | None:
        end = self.settings.token_end if isinstance(self.settings, AzureSettings) else None
        if end is None or end > datetime.now(UTC):
            return None
        return NotAuthorized(
            f"the SAS token for {where} expired at {end:%Y-%m-%dT%H:%M:%SZ}",
            remedy="put a new one into azure.sas_token, then run again",
        )

    def _make_signal(self, kind: type[Terminal], key: str) -> Terminal:
        return kind(f"{self.home.root}/{key}: the store answered {kind.__name__}", remedy="check `lake` in the feed")

    def _translate(self, error: Exception, key: str) -> SluiceError:
        where = f"{self.home.root}/{key}" if key else self.home.root
        text, _, debug = str(error).partition("\n\nDebug source")
        match = _STATUS.search(text)
        status = int(match[1] or match[2]) if match else 0
        code = _find_first(_CODE, text)
        detail = self._mask(" ".join("".join(match) for match in _DETAIL.findall(text)))
        if code in _NO_BUCKET or (status == 404 and "list request" in text):
            return self._explain_missing_bucket()
        if isinstance(error, FileNotFoundError):
            return self._make_signal(NotThere, key)
        if isinstance(error, refusals.PreconditionError):
            return self._make_signal(Taken, key)
        if status == 416:
            return self._make_signal(OutOfRange, key)
        if isinstance(error, refusals.UnauthenticatedError) or status in (401, 403):
            _make_client.cache_clear()
            if error_of_token := self._explain_token(where):
                return error_of_token
        message = ": ".join(filter(None, [code or (f"status {status}" if status else ""), detail]))
        if 400 <= status < 500 and "TokenRequest" in debug:
            return NotAuthorized(f"no credentials for {where}: {message}", remedy=_CREDENTIALS)
        if status:
            return _translate_refusal(status, code, where, message)
        return self._explain_silence(where, text, debug)

    def _explain_silence(self, where: str, text: str, debug: str) -> SluiceError:
        detail = self._mask(text.rpartition(" - ")[2] or text)
        if "HttpError" in debug and "TokenRequest" not in debug:
            return LakeUnavailable(
                f"no answer for {where}: {detail}",
                remedy="run again; if it stays, check the endpoint in the feed and the network",
            )
        if any(word in debug for word in ("TokenRequest", "Credential", "MissingToken", "metadata")):
            return NotAuthorized(f"no credentials for {where}: {detail}", remedy=_CREDENTIALS)
        return SetupError(f"{where} cannot be asked for: {detail}", remedy=_SECTION)

    def _mask(self, text: str) -> str:
        """The message of the other side or a library, on one line, without anything secret."""
        for _, value in self.settings:
            if isinstance(value, SecretStr):
                text = text.replace(value.get_secret_value(), "**********")
        text = re.sub(r"(sig|se|token)=[^&\s]+", r"\1=**********", text)
        return "".join(c if c.isprintable() else " " for c in text).strip()[:300]


def choose_pause(attempts: int) -> float:
    """Seconds until a store that gave no answer is asked again: longer each time, and never two at once."""
    return random.random() * min(2.0**attempts, 20.0)


@lru_cache(maxsize=32)
def _make_client(_process: int, home: Place, settings: StoreSettings, seconds: float) -> Any:
    options: Any = {
        "connect_timeout": timedelta(milliseconds=settings.connect_timeout_ms),
        "timeout": timedelta(seconds=seconds),
        "user_agent": "sluice",
        "allow_http": (settings.endpoint or "").startswith("http://"),
    }
    again: Any = {"max_retries": settings.retries, "backoff": _BACKOFF, "retry_timeout": timedelta(minutes=5)}
    if isinstance(settings, GcsSettings):
        return GCSStore(home.bucket, config=_of_gcs(settings), client_options=options, retry_config=again)
    if isinstance(settings, AzureSettings):
        config = _of_azure(home, settings)
        return AzureStore(home.bucket, config=config, client_options=options, retry_config=again)
    raise AssertionError


def build_delta_options(address: str, settings: StoreSettings) -> dict[str, str]:
    """The options by which deltalake, which uses the same Rust library, reaches the lake."""
    options: dict[str, Any] = {"timeout": f"{settings.read_timeout_ms}ms", "max_retries": str(settings.retries)}
    options |= {"connect_timeout": f"{settings.connect_timeout_ms}ms"}
    if (settings.endpoint or "").startswith("http://"):
        options["allow_http"] = "true"
    if isinstance(settings, AzureSettings):
        names = {"account_name": "azure_storage_account_name", "account_key": "azure_storage_account_key",
                 "sas_key": "azure_storage_sas_key", "endpoint": "azure_storage_endpoint"}  # fmt: skip
        return options | {names[k]: v for k, v in _of_azure(place(address), settings).items()}
    if isinstance(settings, GcsSettings) and settings.endpoint:  # an emulator: deltalake takes no token
        key = {"gcs_base_url": settings.endpoint, "disable_oauth": True, "client_email": "", "private_key": ""}
        return options | {"google_service_account_key": json.dumps(key | {"private_key_id": ""})}
    if isinstance(settings, GcsSettings) and settings.token:
        raise SetupError("deltalake takes no token of Google", remedy="set gcs.service_account, or leave gcs.token out")
    account = settings.service_account if isinstance(settings, GcsSettings) else None
    return options | ({"google_service_account": account} if account else {})


def _of_gcs(s: GcsSettings) -> Any:
    return _reveal({"base_url": s.endpoint, "service_account": s.service_account, "bearer_token": s.token})


def _of_azure(home: Place, s: AzureSettings) -> Any:
    account = home.account or s.account
    endpoint = f"{s.endpoint}/{account}" if s.endpoint and account else s.endpoint
    return _reveal(
        {"account_name": account, "endpoint": endpoint, "account_key": s.account_key, "sas_key": s.sas_token}
    )


def _reveal(config: Mapping[str, Any]) -> dict[str, str]:
    values = {k: v.get_secret_value() if isinstance(v, SecretStr) else v for k, v in config.items()}
    return {k: v for k, v in values.items() if v is not None}


def _tag(meta: Any) -> str:
    """The tag of exactly this content: the ETag, and on Google's store the generation."""
    return f"{meta['e_tag'] or ''}#{meta['version']}" if meta.get("version") else str(meta["e_tag"] or "")


def _find_first(pattern: re.Pattern[str], text: str) -> str:
    match = pattern.search(text)
    return next((group for group in match.groups() if group), "") if match else ""


def measure_skew(meta: Any) -> float:
    """Returns how many seconds this machine's clock is ahead of the store's, by an object just written."""
    return float((datetime.now(UTC) - meta["last_modified"]).total_seconds())


# -- meaning of failures

_NO_BUCKET = {"ContainerNotFound", "NoSuchBucket", "ContainerBeingDeleted", "FilesystemNotFound"}
_KEPT = {"retentionPolicyNotMet", "objectUnderActiveHold", "BlobImmutableDueToPolicy", "RetentionPolicyNotMet",
         "ObjectUnderActiveHold", "BlobImmutableDueToLegalHold"}  # fmt: skip
_LATER = {"ServerBusy", "OperationTimedOut", "InternalError", "SlowDown", "rateLimitExceeded", "backendError",
          "PendingCopyOperation"}  # fmt: skip
_FULL = {"AccountLimitExceeded", "InsufficientStorage", "quotaExceeded"}
_SECTION = "check the section of the lake's store, or its variables, such as AZURE_STORAGE_ACCOUNT_NAME"
_CREDENTIALS = (
    "name account_key, sas_token, service_account or token in the feed's section, or set up the environment "
    "(GOOGLE_APPLICATION_CREDENTIALS, AZURE_STORAGE_ACCOUNT_KEY, a managed or workload identity)"
)


def _translate_refusal(status: int, code: str, where: str, message: str) -> SluiceError:
    """The error for a refusal, by status and the store's own code."""
    if code in _KEPT or _IS_KEPT.search(message):
        return SetupError(
            f"a retention policy keeps {where} from being replaced or removed ({message})",
            remedy="give the lake a bucket or container without retention or legal holds",
        )
    if code in _FULL or status == 507:
        return LakeFull(f"no room in the lake for {where} ({message})", remedy="free space or raise the quota")
    if code in _LATER or status in (408, 409, 429) or status >= 500:
        return LakeUnavailable(
            f"the store is busy or unavailable for {where} ({message})",
            remedy="run again; if it stays, raise the store's retries or ask its operators",
        )
    if status == 401 or code in ("AuthenticationFailed", "InvalidAuthenticationInfo"):
        return NotAuthorized(
            f"the store refused the credentials for {where}: wrong or expired ({message})",
            remedy="renew them, check this machine's clock, then run again",
        )
    if status == 403:
        return NotAuthorized(
            f"the store forbids {where} ({message})",
            remedy="grant the right to list, read, create, replace and remove objects below the prefix: on Google "
            "Cloud roles/storage.objectUser, on Azure Storage Blob Data Contributor",
        )
    return Terminal(f"the lake refused {where} ({message})", remedy="look the code up where the store is documented")
