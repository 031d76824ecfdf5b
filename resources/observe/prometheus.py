"""Figures for Prometheus: as text, in a file for the node exporter, at a push gateway, or from a small web server.

The library is prometheus_client (the extra `metrics`). Names and help come from `model.figures`.
"""

from __future__ import annotations

import threading
from base64 import b64encode
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.request import Request

from sluice.pipelines.errors import Failed, UsageError
from sluice.pipelines.model.figures import FAMILIES, Figure, MetricKind
from sluice.pipelines.util import extras
from sluice.pipelines.util.grouping import group_by
from sluice.resources import web

PUSH_SECONDS = 30.0
USER, PASSWORD = "SLUICE_PUSH_USER", "SLUICE_PUSH_PASSWORD"


class Kept:
    """The newest figures: a scrape never waits for Kafka. Any thread may read them."""

    def __init__(self, figures: Iterable[Figure] = ()) -> None:
        self._figures = tuple(figures)

    def keep(self, figures: Iterable[Figure]) -> None:
        self._figures = tuple(figures)

    def collect(self) -> Iterator[Any]:
        """Yields the metric families; called by prometheus_client."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        families = group_by(self._figures, lambda one: one.name)
        for name, family in FAMILIES.items():
            if name in families:
                kind = CounterMetricFamily if family.kind is MetricKind.COUNTER else GaugeMetricFamily
                metric = kind(name, family.help, labels=family.labels)
                for one in families[name]:
                    metric.add_metric(one.labels, one.value)
                yield metric


def text(figures: Sequence[Figure]) -> str:
    """The figures in Prometheus' text format. Raises SetupError."""
    with extras.name_missing():
        from prometheus_client import generate_latest
    return generate_latest(_registry(Kept(figures))).decode()


def write(figures: Sequence[Figure], path: Path) -> None:
    """Replace the file by these figures: a reader sees the old or the new ones. Raises SetupError, UsageError."""
    with extras.name_missing():
        from prometheus_client import write_to_textfile
    try:
        write_to_textfile(str(path), _registry(Kept(figures)))
    except OSError as error:
        raise UsageError(
            f"{path} cannot be written: {error.strerror}", remedy="name a file in a folder that can"
        ) from None


@dataclass(frozen=True, slots=True)
class Gateway:
    """A push gateway, the job whose figures it keeps, and who logs in there, where it wants that."""

    address: str
    job: str
    user: str = ""
    password: str = field(default="", repr=False)

    @classmethod
    def at(cls, address: str, job: str, environ: Mapping[str, str]) -> Gateway:
        """The gateway at `http://host:9091`. Who logs in is in the environment: an address is in the list of processes
        and in the shell's history. Raises UsageError where it could hold a secret, and does not show it then."""
        if any(mark in address for mark in "@?#"):
            raise UsageError(
                "the push gateway's address may hold no user, no password and no ?query",
                remedy=f"write http://HOST:PORT, and set {USER} and {PASSWORD}",
            )
        return cls(address, job, environ.get(USER, ""), environ.get(PASSWORD, ""))


def push(figures: Sequence[Figure], gateway: Gateway) -> None:
    """Replace the job's figures at the push gateway. Raises SetupError, Failed."""
    with extras.name_missing():
        from prometheus_client import push_to_gateway
    login = b64encode(f"{gateway.user}:{gateway.password}".encode()).decode()

    def send(url: str, method: str, timeout: float, headers: Sequence[tuple[str, str]], data: bytes) -> Any:
        sent = dict(headers) | ({"Authorization": f"Basic {login}"} if gateway.user else {})

        def put() -> None:
            answer = web.send(Request(url, data, sent, method=method), seconds=timeout)
            if answer.status >= 300:
                raise OSError(f"HTTP {answer.status}")

        return put

    registry = _registry(Kept(figures))
    try:
        push_to_gateway(gateway.address, gateway.job, registry, timeout=PUSH_SECONDS, handler=send)
    except (OSError, ValueError, HTTPException) as error:
        raise Failed(
            f"the push gateway {gateway.address} did not take the figures: {error}",
            remedy=f"its address is http://HOST:PORT, and {USER} with {PASSWORD} log in; push again: nothing else "
            "depends on it",
        ) from None


@contextmanager
def serving(cache: Kept, host: str, port: int) -> Iterator[threading.Thread]:
    """A web server in a thread that answers any path with the newest figures, until the block ends. Raises SetupError,
    UsageError where the address is taken."""
    with extras.name_missing():
        from prometheus_client import start_http_server
    try:
        server, thread = start_http_server(port, host, _registry(cache))
    except OSError as error:
        raise UsageError(f"{host}:{port}: {error.strerror}", remedy="name a free one: --port 9478") from None
    try:
        yield thread
    finally:
        server.shutdown()
        server.server_close()


def _registry(cache: Kept) -> Any:
    from prometheus_client import CollectorRegistry

    registry = CollectorRegistry(auto_describe=False)
    registry.register(cache)  # it has a collector's interface
    return registry
