"""Requests to a store through obstore, the Rust library object_store. A subclass names the store and its credentials.

Each object is written by one request, so that nothing unfinished can remain: a file waits in bounded memory or on disk.
Each process makes its clients once and shares them among its threads.
"""

from __future__ import annotations

import os
import random
import re
import time
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache
from http.client import HTTPException
from typing import Any, ClassVar, TypeVar
from urllib.request import Request

import obstore
from obstore import exceptions as refusals
from pydantic import SecretStr

from sluice.pipelines.errors import LakeFull, LakeUnavailable, NotAuthorized, SetupError, SluiceError, Terminal
from sluice.pipelines.ports import Stat
from sluice.resources import web
from sluice.resources.lake.store_client import (
    Block,
    Head,
    NotThere,
    OutOfRange,
    Signal,
    StoreClient,
    Taken,
    compute_lead,
    find_writer,
    parse_date,
)
from sluice.resources.lake.streams import Upload

WRITE_ID = "sluice_write"
"""The key in an object's own metadata for the id of the write that made it: Azure takes identifiers alone."""
SLOWEST = 1 << 20
"""Bytes a second: a request may take its time-out, and as long as its body takes at this speed."""
_BACKOFF: Any = {"init_backoff": timedelta(seconds=0.5), "max_backoff": timedelta(seconds=20), "base": 2}

Answer = TypeVar("Answer")
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
class ObstoreClient(StoreClient):
    """Requests to one bucket or container."""

    IN_ORDER: ClassVar[bool] = True
    """Whether the store lists in the order of keys, also below folders of folders."""

    @abstractmethod
    def connect(self, options: Any) -> Any:
        """Make obstore's client with these options and the feed's settings."""

    @property
    @abstractmethod
    def address(self) -> str:
        """The store's own address over HTTP."""

    def explain_denial(self, where: str) -> NotAuthorized | None:
        """Returns the cause of a denied request that the credentials themselves tell; None if they do not."""
        return None

    def make_client(self, size: int = 0) -> Any:
        """The client for requests with a body of that size."""
        seconds = self.settings.read_timeout_ms / 1000
        while size > (seconds - self.settings.read_timeout_ms / 1000) * SLOWEST and size > 8 << 20:
            seconds *= 2
        try:
            return _connect(os.getpid(), self, seconds)
        except (refusals.BaseError, ValueError) as error:
            failure = error
        raise self._translate(failure, "")

    def create(self, key: str, data: bytes, write: str) -> bool:
        taken = (refusals.AlreadyExistsError, refusals.PreconditionError)
        try:
            self._call(key, lambda: self._put(key, data, write, "create"), once=True, expected=taken)
            return True
        except taken as error:
            conflict = error
        owner = find_writer(self, key)
        if owner is None:  # a conflict of another kind, or the object is gone again
            raise self._translate(conflict, key)
        return owner == write

    def put(self, key: str, data: Any, write: str) -> None:
        self._call(key, lambda: self._put(key, data, write, "overwrite"))

    def _put(self, key: str, data: Any, write: str, mode: Any) -> None:
        attributes: Any = {WRITE_ID: write}
        client, missing = self.make_client(len(data)), False
        try:
            obstore.put(client, key, data, attributes=attributes, mode=mode, use_multipart=False)
        except FileNotFoundError:
            missing = True
        if missing:  # a write needs nothing but the bucket
            raise self._explain_missing_bucket()

    def head(self, key: str) -> Head:
        answer = self._call(key, lambda: obstore.get(self.make_client(), key, options={"head": True}))
        meta, writer = answer.meta, str(answer.attributes.get(WRITE_ID, ""))
        return Head(int(meta["size"]), _tag(meta), writer, meta["last_modified"])

    def fetch(self, key: str, span: str = "", etag: str = "") -> Block:
        if span.startswith("-"):
            head = self.head(key)
            if not head.size:
                raise self._make_signal(OutOfRange, key)
            span, etag = f"{max(0, head.size - int(span[1:]))}-{head.size - 1}", head.tag
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

    def copy(self, origin: str, key: str, size: int) -> int:
        """Copy, and wait: Azure may answer before the copy is done, and shows an empty object until then. Does nothing
        if the key is taken."""
        taken = (refusals.AlreadyExistsError, refusals.PreconditionError)
        conflict = None
        try:
            self._call(
                key, lambda: obstore.copy(self.make_client(), origin, key, overwrite=False), once=True, expected=taken
            )
        except taken as error:
            conflict = error
        if conflict and find_writer(self, key) is None:
            raise self._translate(conflict, key)
        until = time.monotonic() + self.settings.read_timeout_ms / 1000
        while (copied := self._find_size(key)) == 0 < size and time.monotonic() < until:
            time.sleep(0.2)
        if copied == 0 < size:
            with suppress(SluiceError, NotThere):
                self.remove(key)
            raise LakeUnavailable(f"the store did not finish the copy to {key}", remedy="run again")
        return copied or 0

    def _find_size(self, key: str) -> int | None:
        with suppress(NotThere):
            return self.head(key).size
        return None

    def remove(self, key: str) -> None:
        self._call(key, lambda: obstore.delete(self.make_client(), key), once=True)

    def open_upload(self, key: str) -> Upload:
        return Upload(self, key)

    def list_below(self, folder: str, after: str = "") -> Iterator[Stat]:
        if self.IN_ORDER:
            return self._list(folder, after, after)
        within = after[: after.rfind("/") + 1] == folder  # keys of one folder are in order
        return iter(sorted(self._list(folder, after if within else "", after)))

    def _list(self, folder: str, begin: str, after: str) -> Iterator[Stat]:
        """Objects that the store lists behind `begin`. A listing that breaks off goes on after its last object; if the
        order is another one, it begins again."""
        pages, listed = None, set[str]()

        def read_page() -> Any:
            nonlocal pages
            if pages is None:
                offset = begin or None
                pages = iter(obstore.list(self.make_client(), folder.rstrip("/"), offset=offset, chunk_size=1000))
            try:
                return next(pages, None)
            except Exception:
                pages = None
                raise

        while page := self._call(folder, read_page):
            for one in page:
                key, size = one["path"], one["size"]
                if key in listed:
                    continue
                if self.IN_ORDER:
                    begin = key
                else:
                    listed.add(key)
                if not key.startswith(folder) or key <= after:
                    continue
                if size or self._find_size(key) is not None:  # an empty one may be another tool's folder
                    yield Stat(key, size, str(one["e_tag"] or "").strip('"'))

    def list_folders(self, folder: str) -> list[str]:
        answer = self._call(folder, lambda: obstore.list_with_delimiter(self.make_client(), folder.rstrip("/")))
        return sorted(f"{one}/".removeprefix(folder).rstrip("/") for one in answer["common_prefixes"])

    def measure_lead(self, folder: str) -> float | None:
        """Any answer has a date, so the request needs no credentials."""
        with suppress(OSError, ValueError, HTTPException):
            answer = web.send(Request(self.address), seconds=self.settings.connect_timeout_ms / 1000)
            if date := parse_date(answer.headers["Date"]):
                return compute_lead(date)
        return None

    def list_attempts(self) -> Mapping[str, Callable[[str], object]]:
        return {"read": self.fetch, "write": self._try_replace, "remove": self.remove}

    def _try_replace(self, key: str) -> None:
        """Replace a version of the object that never existed. Raises Taken with the right to write: nothing changes."""
        never: Any = {"e_tag": '"0x0"', "version": "1"}
        self._call(key, lambda: obstore.put(self.make_client(), key, b"", mode=never, use_multipart=False))

    def build_delta_options(self) -> dict[str, str]:
        """deltalake uses the same Rust library."""
        options = {"timeout": f"{self.settings.read_timeout_ms}ms", "max_retries": str(self.settings.retries)}
        options |= {"connect_timeout": f"{self.settings.connect_timeout_ms}ms"}
        return options | ({"allow_http": "true"} if (self.settings.endpoint or "").startswith("http://") else {})

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

    def _make_signal(self, kind: type[Signal], key: str) -> Signal:
        return kind(f"{self.home.root}/{key}: the store answered {kind.__name__}", remedy="check `lake` in the feed")

    def _translate(self, error: Exception, key: str) -> SluiceError:
        where = f"{self.home.root}/{key}" if key else self.home.root
        text, _, debug = str(error).partition("\n\nDebug source")
        match = _STATUS.search(text)
        status = int(match[1] or match[2]) if match else 0
        codes = _CODE.search(text)
        code = next(filter(None, codes.groups()), "") if codes else ""
        detail = self.mask(" ".join("".join(match) for match in _DETAIL.findall(text)))
        if code in _NO_BUCKET or (status == 404 and "list request" in text):
            return self._explain_missing_bucket()
        if isinstance(error, FileNotFoundError):
            return self._make_signal(NotThere, key)
        if isinstance(error, refusals.PreconditionError):
            return self._make_signal(Taken, key)
        if status == 416:
            return self._make_signal(OutOfRange, key)
        if isinstance(error, refusals.UnauthenticatedError) or status in (401, 403):
            _connect.cache_clear()
            if denial := self.explain_denial(where):
                return denial
        message = ": ".join(filter(None, [code or (f"status {status}" if status else ""), detail]))
        if 400 <= status < 500 and "TokenRequest" in debug:
            return NotAuthorized(f"no credentials for {where}: {message}", remedy=_CREDENTIALS)
        if status:
            return _translate_refusal(status, code, where, message)
        return self._explain_silence(where, text, debug)

    def _explain_silence(self, where: str, text: str, debug: str) -> SluiceError:
        detail = self.mask(text.rpartition(" - ")[2] or text)
        if "HttpError" in debug and "TokenRequest" not in debug:
            return LakeUnavailable(
                f"no answer for {where}: {detail}",
                remedy="run again; if it stays, check the endpoint in the feed and the network",
            )
        if any(word in debug for word in ("TokenRequest", "Credential", "MissingToken", "metadata")):
            return NotAuthorized(f"no credentials for {where}: {detail}", remedy=_CREDENTIALS)
        return SetupError(f"{where} cannot be asked for: {detail}", remedy=_SECTION)

    def mask(self, text: str) -> str:
        return super().mask(re.sub(r"(sig|se|token)=[^&\s]+", r"\1=**********", text))


def choose_pause(attempts: int) -> float:
    """Seconds until a store that gave no answer is asked again: longer each time, and never two at once."""
    return random.random() * min(2.0**attempts, 20.0)


@lru_cache(maxsize=32)
def _connect(_process: int, client: ObstoreClient, seconds: float) -> Any:
    settings = client.settings
    options = {
        "connect_timeout": timedelta(milliseconds=settings.connect_timeout_ms),
        "timeout": timedelta(seconds=seconds),
        "user_agent": "sluice",
        "allow_http": (settings.endpoint or "").startswith("http://"),
    }
    again = {"max_retries": settings.retries, "backoff": _BACKOFF, "retry_timeout": timedelta(minutes=5)}
    return client.connect({"client_options": options, "retry_config": again})


def reveal(config: Mapping[str, Any]) -> dict[str, str]:
    """Returns the options that have values, secrets in plain text."""
    values = {k: v.get_secret_value() if isinstance(v, SecretStr) else v for k, v in config.items()}
    return {k: v for k, v in values.items() if v is not None}


def _tag(meta: Any) -> str:
    """The tag of exactly this content: the ETag, and on Google's store the generation."""
    return f"{meta['e_tag'] or ''}#{meta['version']}" if meta.get("version") else str(meta["e_tag"] or "")


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
