"""Emulators of Azure's and Google's stores on loopback, as `make lakes` installs them: Azurite, and fake-gcs-server.

Each has a front in a process of its own (deltalake keeps the GIL while it waits). Both emulators ignore the name that a
listing starts from: the front drops the names before it. object_store speaks Google's XML API, of which
fake-gcs-server knows reads and listings only: the front translates writes and copies to the JSON API, conditions
included. Each emulator's data ends with it.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import http.client
import json
import os
import re
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from email.utils import formatdate
from html import unescape
from http.server import ThreadingHTTPServer
from pathlib import Path
from threading import Lock
from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlencode
from urllib.request import Request, urlopen

import pytest
from pydantic import SecretStr

from sluice.pipelines.feed.stores import AzureSettings, GcsSettings, StoreSettings, place
from tests.resources.lake.s3_faults import Handler

BUILT = Path(__file__).parents[1] / "build" / "lakes"
AZURITE = BUILT / "node_modules" / ".bin" / "azurite-blob"
FAKE_GCS = BUILT / "bin" / "fake-gcs-server"
ACCOUNT = "devstoreaccount1"
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
"""Azurite's well-known key, the same in every installation."""
BUCKET = "lake"
LAKES = os.environ.get("SLUICE_TEST_LAKES", "").split(",")
CLOUDS = [kind for kind in ("azure", "google") if kind in LAKES]
"""The emulators of `make lakes` that slow tests run against."""


DELETES = r"^(DELETE|POST .*comp=batch)"
"""Azure's are batches of one."""
RETENTION: Mapping[str, dict[str, Any]] = {
    "az": {
        "status": 409,
        "code": "BlobImmutableDueToPolicy",
        "message": "This operation is not permitted because the blob is immutable due to a policy.",
    },
    "gs": {
        "status": 403,
        "code": "AccessDenied",
        "message": "Object 'lake/x' is subject to bucket's retention policy and cannot be deleted, overwritten or",
    },
}
"""Refusals of removals, as the services send them."""


@dataclass(frozen=True)
class CloudStore:
    """A bucket, and the settings that reach it."""

    scheme: str
    settings: StoreSettings

    def make_address(self) -> str:
        """Returns the address of a lake with a unique prefix."""
        return f"{self.scheme}://{BUCKET}/{secrets.token_hex(6)}"

    @property
    def section(self) -> str:
        return {"az": "azure", "gs": "gcs"}[self.scheme]

    def build_feed_settings(self) -> dict[str, str]:
        """Returns the values of `lake` and of the store's section in a feed file, as YAML."""
        access = {"endpoint": self.settings.endpoint, "retries": self.settings.retries}
        secret = {name: value.get_secret_value() for name, value in self.settings if isinstance(value, SecretStr)}
        access |= secret | ({"account": ACCOUNT} if self.scheme == "az" else {})
        return {"lake": self.make_address(), self.section: json.dumps(access)}

    def with_token(self, letters: str, seconds: float = 3600, scope: str = "c") -> CloudStore:
        """Returns Azure's store with a SAS token that grants only these letters' permissions."""
        return CloudStore(self.scheme, self.settings.model_copy(update=_by_token(sign_token(letters, seconds, scope))))

    @property
    def environment(self) -> dict[str, str]:
        """Variables by which `sluice demo` reaches it."""
        endpoint = self.settings.endpoint or ""
        if self.scheme == "gs":
            return {"STORAGE_EMULATOR_HOST": endpoint}
        names = ("AZURE_STORAGE_ENDPOINT", "AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_ACCOUNT_KEY")
        return dict(zip(names, (endpoint, ACCOUNT, KEY), strict=True))

    @property
    def pyiceberg_access(self) -> dict[str, str]:
        """Properties by which PyIceberg's own files on Google's store, PyArrow's, reach it."""
        token = {"gcs.oauth2.token": "emulator", "gcs.oauth2.token-expires-at": "4102444800000"}
        return token | {"gcs.service.host": self.settings.endpoint or ""}

    @property
    def delta_access(self) -> dict[str, str]:
        """Options by which deltalake and Polars reach it."""
        endpoint = self.settings.endpoint
        if self.scheme == "az":
            access = {"azure_storage_account_name": ACCOUNT, "azure_storage_account_key": KEY}
            return access | {"azure_storage_endpoint": f"{endpoint}/{ACCOUNT}", "allow_http": "true"}
        key = {"gcs_base_url": endpoint, "disable_oauth": True, **dict.fromkeys(("client_email", "private_key"), "")}
        return {"google_service_account_key": json.dumps(key | {"private_key_id": ""}), "allow_http": "true"}

    def pass_through(self, endpoint: str) -> CloudStore:
        """Returns the same store behind a proxy."""
        return CloudStore(self.scheme, self.settings.model_copy(update={"endpoint": endpoint}))


def _by_token(token: str) -> dict[str, SecretStr | None]:
    return {"account_key": None, "sas_token": SecretStr(token)}


@contextmanager
def run_azurite() -> Iterator[CloudStore]:
    """Azurite with an empty container. Skips the test without it."""
    _require(AZURITE)
    port = _free_port()
    command = [str(AZURITE), "--blobHost", "127.0.0.1", "--blobPort", str(port), "--inMemoryPersistence", "--silent"]
    with (
        _run_server([*command, "--skipApiVersionCheck", "--disableTelemetry"], port),
        _run_front("azure", port) as endpoint,
    ):
        create_container(endpoint, BUCKET)
        settings = {"endpoint": endpoint, "account": ACCOUNT, "account_key": KEY, "retries": 3}
        yield CloudStore("az", AzureSettings.model_validate(settings))


@contextmanager
def run_google() -> Iterator[CloudStore]:
    """fake-gcs-server with an empty bucket, behind its front. Skips the test without it."""
    _require(FAKE_GCS)
    port = _free_port()
    host = ["-host", "127.0.0.1", "-port", str(port), "-public-host", f"127.0.0.1:{port}"]
    with (
        _run_server([str(FAKE_GCS), "-backend", "memory", "-scheme", "http", *host, "-log-level", "error"], port),
        _run_front("google", port) as endpoint,
    ):
        body = json.dumps({"name": BUCKET}).encode()
        urlopen(Request(f"http://127.0.0.1:{port}/storage/v1/b?project=p", body, {"Content-Type": "application/json"}))
        settings = {"endpoint": endpoint, "token": "emulator", "retries": 3}
        yield CloudStore("gs", GcsSettings.model_validate(settings))


def fetch_cloud(address: str, into: Path, below: str = "") -> Path:
    """Download the files below a path of the lake to a folder. `CloudStore.environment` has the endpoint."""
    import obstore
    from obstore.store import AzureStore, GCSStore

    home, root, get_variable = place(address), into / "lake", os.environ.get
    options: Any = {"allow_http": True}
    client: Any
    if home.scheme == "az":
        endpoint = f"{get_variable('AZURE_STORAGE_ENDPOINT')}/{ACCOUNT}"
        config: Any = {"account_name": ACCOUNT, "account_key": KEY, "endpoint": endpoint}
        client = AzureStore(home.bucket, config=config, client_options=options)
    else:
        config = {"base_url": get_variable("STORAGE_EMULATOR_HOST"), "bearer_token": "emulator"}
        client = GCSStore(home.bucket, config=config, client_options=options)
    for page in obstore.list(client, (home.prefix + below).rstrip("/")):
        for item in page:
            file = root / item["path"].removeprefix(home.prefix)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(bytes(obstore.get(client, item["path"]).bytes()))
    return root


def _require(program: Path) -> None:
    if not program.exists():
        pytest.skip(f"{program.name} is not installed: make lakes does it")


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@contextmanager
def _run_server(command: list[str], port: int, folder: Path | None = None) -> Iterator[None]:
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=folder)
    try:
        until = time.monotonic() + 60
        while True:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            assert process.poll() is None, f"{command[0]} does not start"
            assert time.monotonic() < until, f"{command[0]} does not answer"
            time.sleep(0.1)
        yield
    finally:
        process.terminate()
        process.wait(30)


def create_container(endpoint: str, name: str) -> None:
    date, version = formatdate(usegmt=True), "2021-08-06"
    signed = (
        f"PUT{chr(10) * 12}x-ms-date:{date}\nx-ms-version:{version}\n/{ACCOUNT}/{ACCOUNT}/{name}\nrestype:container"
    )
    signature = base64.b64encode(hmac.digest(base64.b64decode(KEY), signed.encode(), hashlib.sha256)).decode()
    headers = {"x-ms-date": date, "x-ms-version": version, "Authorization": f"SharedKey {ACCOUNT}:{signature}"}
    address = f"{endpoint}/{ACCOUNT}/{name}?restype=container"
    urlopen(Request(address, method="PUT", data=b"", headers=headers | {"Content-Type": ""}))


def sign_token(letters: str, seconds: float = 3600, scope: str = "c") -> str:
    """Returns a SAS token for the container (service SAS, version 2020-12-06), signed as Azure's documentation says."""
    end = (datetime.now(UTC) + timedelta(seconds=seconds)).strftime("%Y-%m-%dT%H:%M:%SZ")
    resource, version = f"/blob/{ACCOUNT}/{BUCKET}", "2020-12-06"
    parts = [letters, "", end, resource, "", "", "", version, scope, "", "", "", "", "", "", ""]
    signature = base64.b64encode(hmac.digest(base64.b64decode(KEY), "\n".join(parts).encode(), hashlib.sha256)).decode()
    return urlencode({"sp": letters, "se": end, "sv": version, "sr": scope, "sig": signature})


# -- before the emulators


class _Front(Handler):
    """Forwards requests unchanged, and drops from a listing the names before the one to start from."""

    begin = "startFrom"
    listed = re.compile(rb"<Blob><Name>(.*?)</Name>.*?</Blob>", re.DOTALL)

    def _is_dropped(self, name: str, begin: str) -> bool:
        return name < begin

    def _ask_upstream(self, body: bytes) -> tuple[int, dict[str, str], bytes]:
        status, headers, data = super()._ask_upstream(body)
        query = parse_qs(self.path.partition("?")[2])
        if self.command == "GET" and (begin := query.get(self.begin, [""])[0]):
            data = self.listed.sub(lambda m: b"" if self._is_dropped(unescape(m[1].decode()), begin) else m[0], data)
        return status, headers, data


class _GoogleFront(_Front):
    """Translates writes and copies to the JSON API as well."""

    begin = "start-after"
    listed = re.compile(rb"<Contents><Key>(.*?)</Key>.*?</Contents>", re.DOTALL)
    alone = Lock()

    def _is_dropped(self, name: str, begin: str) -> bool:
        return name <= begin

    def _ask_upstream(self, body: bytes) -> tuple[int, dict[str, str], bytes]:
        path, _, _ = self.path.partition("?")
        parts = re.fullmatch(r"/([^/]+)/(.+)", path)
        del self.headers["Host"]  # fake-gcs-server answers to its own name alone
        if self.command != "PUT" or parts is None or path.startswith(("/storage/", "/upload/")):
            status, headers, data = super()._ask_upstream(body)
            if status == 500 and b"no bucket named" in data:
                return 404, headers, b"<Error><Code>NoSuchBucket</Code><Message>nobody made it</Message></Error>"
            return status, headers, data
        bucket, key = parts[1], unquote(parts[2])
        generation = self.headers.get("x-goog-if-generation-match")
        condition = f"ifGenerationMatch={generation}" if generation else ""
        with self.alone:
            if source := self.headers.get("x-goog-copy-source"):
                return self._copy(source, bucket, key, condition)
            return self._write(bucket, key, condition, body)

    def _copy(self, source: str, bucket: str, key: str, condition: str) -> tuple[int, dict[str, str], bytes]:
        before, _, origin = unquote(source).strip("/").partition("/")
        to = f"rewriteTo/b/{bucket}/o/{quote(key, safe='')}?{condition}"
        return self._send_json(
            "POST", f"/storage/v1/b/{before}/o/{quote(origin, safe='')}/{to}", b"{}", "application/json"
        )

    def _write(self, bucket: str, key: str, condition: str, body: bytes) -> tuple[int, dict[str, str], bytes]:
        mark, own = "x-goog-meta-", {k.lower(): v for k, v in self.headers.items()}
        about = {"name": key, "metadata": {k.removeprefix(mark): v for k, v in own.items() if k.startswith(mark)}}
        cut = secrets.token_hex(16)
        text = f"--{cut}\r\nContent-Type: application/json\r\n\r\n{json.dumps(about)}\r\n--{cut}\r\n"
        text += "Content-Type: application/octet-stream\r\n\r\n"
        message = text.encode() + body + f"\r\n--{cut}--".encode()
        path = f"/upload/storage/v1/b/{bucket}/o?uploadType=multipart&{condition}"
        return self._send_json("POST", path, message, f"multipart/related; boundary={cut}")

    def _send_json(self, method: str, path: str, body: bytes, kind: str) -> tuple[int, dict[str, str], bytes]:
        connection = http.client.HTTPConnection(self.upstream, timeout=30)
        connection.request(method, path, body, {"Content-Type": kind})
        answer = connection.getresponse()
        data = answer.read()
        connection.close()
        if answer.status >= 300:
            return answer.status, {}, data
        about: Mapping[str, Any] = json.loads(data)
        about = about.get("resource", about)
        return 200, {"ETag": f'"{about["etag"].strip(chr(34))}"', "x-goog-generation": about["generation"]}, b""


@contextmanager
def _run_front(kind: str, upstream: int) -> Iterator[str]:
    port = _free_port()
    root = Path(__file__).parents[1]
    with _run_server([sys.executable, "-m", "tests.clouds", kind, str(upstream), str(port)], port, root):
        yield f"http://127.0.0.1:{port}"


def main(kind: str, upstream: str, port: str) -> None:
    handler = type("Front", (_GoogleFront if kind == "google" else _Front,), {"upstream": f"127.0.0.1:{upstream}"})
    server = ThreadingHTTPServer(("127.0.0.1", int(port)), handler)
    server.daemon_threads = True
    server.serve_forever()


if __name__ == "__main__":
    main(*sys.argv[1:])
