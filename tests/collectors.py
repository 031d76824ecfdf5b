"""A stand-in for OpenTelemetry's collector and OpenLineage's server that keeps the requests of runs."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

SECRET = "correct-horse-battery"


def build_environment(address: str) -> dict[str, str]:
    """Returns the environment of a run that sends its spans and lineage events to the address."""
    return {
        "OTEL_EXPORTER_OTLP_ENDPOINT": address,
        "OTEL_EXPORTER_OTLP_HEADERS": f"authorization={SECRET}",
        "OPENLINEAGE_URL": address,
        "OPENLINEAGE_API_KEY": SECRET,
        "OPENLINEAGE_NAMESPACE": "shop",
    }


@dataclass
class Listener:
    """Bodies received over HTTP, each with its path."""

    address: str = ""
    bodies: list[tuple[str, bytes]] = field(default_factory=list)

    def list_spans(self) -> list[Any]:
        spans = []
        for body in (b for path, b in self.bodies if path == "/v1/traces"):
            request = ExportTraceServiceRequest.FromString(body)
            for resource in request.resource_spans:
                about = {a.key: a.value.string_value for a in resource.resource.attributes}
                assert about["service.name"] == "sluice"
                spans += [s for scope in resource.scope_spans for s in scope.spans]
        return spans

    def list_events(self) -> list[dict[str, Any]]:
        return [json.loads(body) for path, body in self.bodies if path == "/api/v1/lineage"]

    def has_received(self, secret: bytes) -> bool:
        return any(secret in body for _, body in self.bodies)


@contextmanager
def run_listener() -> Iterator[Listener]:
    listener = Listener()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            packed = self.headers.get("Content-Encoding") == "gzip"
            listener.bodies.append((self.path, gzip.decompress(body) if packed else body))
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, daemon=True).start()
    listener.address = f"http://127.0.0.1:{server.server_port}"
    try:
        yield listener
    finally:
        server.shutdown()
        server.server_close()
