"""A store that speaks S3, on this machine: moto's server, for the demo and for tests. Nothing in it outlives it.

Promises: it listens on loopback only, is a process of its own, and ends with its parent process, also when that is
killed: its standard input closes. Of several conditional writes at once exactly one wins, which moto alone leaves open.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from threading import Lock, Thread
from types import TracebackType
from typing import Any
from urllib.request import urlopen

from sluice.pipelines.errors import SetupError
from sluice.pipelines.feed.stores import S3Settings, place
from sluice.resources.lake.s3 import S3Client

HOST, REGION, BUCKET = "127.0.0.1", "us-east-1", "lake"


class LocalS3:
    """The server, with one empty bucket, while the block lasts. Raises SetupError when it does not start."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self.endpoint = ""

    def __enter__(self) -> LocalS3:
        try:
            self._start()
        except BaseException:
            self._end()
            raise
        return self

    def _start(self) -> None:
        command = [sys.executable, "-m", __name__]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
        port = (self._process.stdout.readline() if self._process.stdout else "").strip()
        if not port.isdigit():
            raise SetupError(
                f"moto's S3 server does not start: {self._end()}", remedy="install it: pip install 'moto[s3,server]'"
            )
        self.endpoint = f"http://{HOST}:{port}"
        S3Client(place(self.lake), self.settings).call("create_bucket", "")

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._end()

    @property
    def settings(self) -> S3Settings:
        """How to reach it. It takes any keys."""
        options = {"endpoint": self.endpoint, "region": REGION, "access_key_id": "local", "secret_access_key": "local"}
        return S3Settings.model_validate(options)

    def requests(self) -> Counter[str]:
        """How many requests of each kind it has had."""
        with urlopen(f"{self.endpoint}{COUNTED}") as answer:
            return Counter(json.load(answer))

    @property
    def lake(self) -> str:
        return f"s3://{BUCKET}"

    def _end(self) -> str:
        """End the process; its last words."""
        if self._process is None:
            return ""
        if self._process.stdin:
            self._process.stdin.close()
            self._process.stdin = None
        _, output = self._process.communicate()
        return output.strip().rpartition("\n")[2]


# -- the process

COUNTED = "/-/requests"
Respond = Callable[..., Any]


class _Front:
    """Before moto: conditional writes in single file, since it looks and writes in two steps; each request counted."""

    def __init__(self, application: Respond) -> None:
        self._application, self._alone, self._counting = application, Lock(), Lock()
        self._counts: Counter[str] = Counter()

    def __call__(self, environ: Mapping[str, Any], start: Respond) -> Iterable[bytes]:
        if environ["PATH_INFO"] == COUNTED:
            body = json.dumps(self._counts).encode()
            start("200 OK", [("Content-Type", "application/json"), ("Content-Length", str(len(body)))])
            return [body]
        name = _request_kind(environ)
        with self._counting:
            self._counts[name] += 1
        alone: AbstractContextManager[Any] = self._alone if name == "PUT if absent" else nullcontext()
        with alone:
            chunks: Iterable[bytes] = self._application(environ, start)
            return chunks


def _request_kind(environ: Mapping[str, Any]) -> str:
    """Returns the kind of request, as in S3's price list but finer."""
    method, query = environ["REQUEST_METHOD"], environ.get("QUERY_STRING", "")
    match method:
        case "GET" if "list-type=" in query:
            return "LIST"
        case "GET" if "uploads" in query or "uploadId=" in query:
            return "LIST uploads"
        case "PUT" if "HTTP_X_AMZ_COPY_SOURCE" in environ:
            return "COPY"
        case "PUT" if "partNumber=" in query:
            return "PUT part"
        case "PUT" if "HTTP_IF_NONE_MATCH" in environ:
            return "PUT if absent"
        case "POST":
            return "POST complete" if "uploadId=" in query else "POST begin"
        case _:
            return str(method)


def _serve() -> None:
    from moto.moto_server.werkzeug_app import create_backend_app
    from werkzeug.serving import WSGIRequestHandler, make_server

    class Quiet(WSGIRequestHandler):
        protocol_version = "HTTP/1.1"  # connections stay

        def log(self, *_: Any, **__: Any) -> None: ...

    server = make_server(HOST, 0, _Front(create_backend_app("s3")), threaded=True, request_handler=Quiet)
    Thread(target=server.serve_forever, daemon=True).start()
    print(server.server_port, flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    _serve()
