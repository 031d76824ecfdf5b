"""A separate broker behind a proxy, for tests that cut connections, deny access or restart it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import pytest

from sluice.resources.local.local_kafka import LocalKafka
from tests.resources.kafka.proxy import Proxy


@dataclass(frozen=True)
class Behind:
    """A cluster with an authorizer that every client, once bootstrapped, reaches only through the proxy."""

    cluster: LocalKafka
    proxy: Proxy
    root: Path


@pytest.fixture(scope="module")
def behind(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Behind]:
    root = tmp_path_factory.mktemp("behind") / "kafka"

    def get_broker() -> tuple[str, int]:
        host, port = LocalKafka.attach(root).bootstrap.rsplit(":", 1)
        return host, int(port)

    with closing(Proxy(root.parent, get_broker)) as proxy:
        settings = {
            "advertised.listeners": f"PLAINTEXT://127.0.0.1:{proxy.port}",
            "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
            "allow.everyone.if.no.acl.found": "true",
        }
        with LocalKafka(root, keep=False, settings=settings) as cluster:
            yield Behind(cluster, proxy, root)
