"""The S3 store of the tests: moto's server, or the bucket that the variables SLUICE_TEST_S3_… name.

`SLUICE_TEST_S3_ENDPOINT`, `_BUCKET`, `_REGION`, `_PREFIX`; boto3 finds the credentials. Every lake has a unique
prefix and is never deleted: its objects expire by the lifecycle rules of the bucket's owner.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import boto3

from sluice.pipelines.feed.stores import S3Settings
from sluice.resources.local.local_s3 import LocalS3
from tests.shared_servers import SharedServers


@dataclass(frozen=True)
class Store:
    """A bucket and the settings to reach it. `local`: it is moto's, and accepts any keys."""

    bucket: str
    settings: S3Settings
    local: bool

    def make_address(self) -> str:
        """Returns the address of a lake with a unique prefix."""
        return f"s3://{self.bucket}/{os.environ.get('SLUICE_TEST_S3_PREFIX', 'sluice-test')}/{secrets.token_hex(6)}"

    def build_feed_settings(self) -> dict[str, str]:
        """Returns the values of `lake` and `s3` in a feed file, as YAML."""
        inside = ", ".join(f"{k}: '{v}'" for k, v in self.access.items())
        return {"lake": self.make_address(), "s3": f"{{{inside}, retries: {self.settings.retries}}}"}

    @property
    def environment(self) -> dict[str, str]:
        """Variables by which boto3 reaches moto's server."""
        keys = dict.fromkeys(("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"), "local")
        region, endpoint = self.settings.region or "", self.settings.endpoint or ""
        return keys | {"AWS_DEFAULT_REGION": region, "AWS_ENDPOINT_URL_S3": endpoint}

    def open_client(self) -> Any:
        """Returns a boto3 client for the bucket."""
        keys = dict.fromkeys(("aws_access_key_id", "aws_secret_access_key"), "local") if self.local else {}
        s = self.settings
        return boto3.client("s3", endpoint_url=s.endpoint, region_name=s.region, **keys)  # type: ignore[call-overload]

    @property
    def access(self) -> dict[str, str]:
        """The settings that are set, by their names in S3Settings."""
        s = self.settings
        values = {"endpoint": s.endpoint, "region": s.region}
        if s.access_key_id and s.secret_access_key:
            values |= {
                "access_key_id": s.access_key_id.get_secret_value(),
                "secret_access_key": s.secret_access_key.get_secret_value(),
            }
        return {name: value for name, value in values.items() if value}


@contextmanager
def open_store() -> Iterator[Store]:
    variables = {name: os.environ.get(f"SLUICE_TEST_S3_{name}") for name in ("ENDPOINT", "BUCKET", "REGION")}
    if bucket := variables["BUCKET"]:
        settings = {k.lower(): v for k, v in variables.items() if v and k != "BUCKET"}
        yield Store(bucket, S3Settings.model_validate(settings), local=False)
        return
    with LocalS3() as server:
        yield _build_local_store(server.endpoint)


def _build_local_store(endpoint: str) -> Store:
    server = LocalS3()
    server.endpoint = endpoint
    return Store(server.lake.removeprefix("s3://"), server.settings.model_copy(update={"retries": 3}), local=True)


def share_store(servers: SharedServers) -> Store:
    """Return the store of all workers."""
    address = servers.folder / "s3"

    @contextmanager
    def run() -> Iterator[Store]:
        with open_store() as store:
            if store.local:
                address.write_text(store.settings.endpoint or "")
            yield store
            address.unlink(missing_ok=True)

    def attach() -> Store | None:
        return _build_local_store(address.read_text()) if address.exists() else None

    return servers.start("s3", run, attach)
