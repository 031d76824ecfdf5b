"""A store that speaks S3, on this machine: moto's server, for the demo and for tests. Nothing in it outlives it.

Promises: it listens on loopback only, is a process of its own, and ends with whoever started it, also when that one is
killed: its standard input closes. Of several conditional writes at once exactly one wins, which moto alone leaves open.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from threading import Lock, Thread
from types import TracebackType
from typing import Any

from sluice.pipelines.errors import SetupError
from sluice.pipelines.s3_settings import S3Settings
from sluice.resources.s3_client import Bucket

HOST, REGION, BUCKET = "127.0.0.1", "us-east-1", "lake"


class LocalS3:
    """The server, with one empty bucket, while the block lasts. Raises SetupError when it does not start."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self.endpoint = ""

    def __enter__(self) -> LocalS3:
        command = [sys.executable, "-m", __name__]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
        port = (self._process.stdout.readline() if self._process.stdout else "").strip()
        if not port.isdigit():
            raise SetupError(
                f"moto's S3 server does not start: {self._end()}", remedy="install it: pip install 'moto[s3,server]'"
            )
        self.endpoint = f"http://{HOST}:{port}"
        Bucket(BUCKET, self.settings).call("create_bucket", "")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._end()

    @property
    def settings(self) -> S3Settings:
        """How to reach it. It takes any keys."""
        said = {"endpoint": self.endpoint, "region": REGION, "access_key_id": "local", "secret_access_key": "local"}
        return S3Settings.model_validate(said)

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
        _, said = self._process.communicate()
        return said.strip().rpartition("\n")[2]


# -- the process

Respond = Callable[..., Any]


class _OneAtATime:
    """Conditional writes in single file: moto looks and writes in two steps."""

    def __init__(self, application: Respond) -> None:
        self._application, self._lock = application, Lock()

    def __call__(self, environ: Mapping[str, Any], start: Respond) -> Iterable[bytes]:
        conditional = "HTTP_IF_NONE_MATCH" in environ and environ["REQUEST_METHOD"] == "PUT"
        alone: AbstractContextManager[Any] = self._lock if conditional else nullcontext()
        with alone:
            found: Iterable[bytes] = self._application(environ, start)
            return found


def _serve() -> None:
    from moto.moto_server.werkzeug_app import create_backend_app
    from werkzeug.serving import WSGIRequestHandler, make_server

    class Quiet(WSGIRequestHandler):
        def log(self, *_: Any, **__: Any) -> None: ...

    server = make_server(HOST, 0, _OneAtATime(create_backend_app("s3")), threaded=True, request_handler=Quiet)
    Thread(target=server.serve_forever, daemon=True).start()
    print(server.server_port, flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    _serve()
