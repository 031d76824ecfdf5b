"""Azure Blob Storage: conditional writes by `If-None-Match: *`, SAS tokens, folders that change the order of keys."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from http.client import HTTPException
from typing import Any, ClassVar
from urllib.request import Request

import obstore
from obstore.exceptions import BaseError
from obstore.store import AzureStore

from sluice.pipelines.errors import NotAuthorized, SluiceError
from sluice.pipelines.feed.stores import AzureSettings
from sluice.pipelines.model.health import Diagnosis, report_failure, report_ok, report_warning
from sluice.resources import web
from sluice.resources.lake.obstore_client import ObstoreClient, reveal
from sluice.resources.lake.store_client import KEEPS

_SOON = timedelta(days=7)
_GRANT = "Storage Blob Data {} on the container, or the letter {} of a SAS token"


@dataclass(frozen=True)
class AzureClient(ObstoreClient):
    settings: AzureSettings
    LARGEST = 5000 << 20
    IN_ORDER = False
    GRANTS: ClassVar = {
        "list": _GRANT.format("Reader", "l"),
        "read": _GRANT.format("Reader", "r"),
        "write": _GRANT.format("Contributor", "w"),
        "remove": _GRANT.format("Contributor", "d"),
    }

    def connect(self, options: Any) -> AzureStore:
        config: Any = self._config
        return AzureStore(self.home.bucket, config=config, **options)

    @property
    def _config(self) -> dict[str, str]:
        s, account = self.settings, self.home.account or self.settings.account
        endpoint = f"{s.endpoint}/{account}" if s.endpoint and account else s.endpoint
        return reveal(
            {"account_name": account, "endpoint": endpoint, "account_key": s.account_key, "sas_key": s.sas_token}
        )

    @property
    def address(self) -> str:
        account = self.home.account or self.settings.account or os.environ.get("AZURE_STORAGE_ACCOUNT_NAME", "")
        return self.settings.endpoint or f"https://{account}.blob.core.windows.net"

    def explain_denial(self, where: str) -> NotAuthorized | None:
        end = self.settings.token_end
        if end is None or end > datetime.now(UTC):
            return None
        return NotAuthorized(
            f"the SAS token for {where} expired at {end:%Y-%m-%dT%H:%M:%SZ}",
            remedy="put a new one into azure.sas_token, then run again",
        )

    def check_credentials(self) -> Iterator[Diagnosis]:
        """The end, scope and letters of a SAS token, which show more than the store's refusals."""
        if self.settings.sas_token is None:
            return
        title, renew = "SAS token", "put a new one into azure.sas_token"
        fields, end = self.settings.token_fields, self.settings.token_end
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

    def check_retention(self, key: str) -> Iterator[Diagnosis]:
        """Check the headers of a blob. Google Cloud shows the same only with the bucket, to its administrators."""
        headers = self._read_headers(key)
        if "x-ms-immutability-policy-until-date" in headers or headers.get("x-ms-legal-hold") == "true":
            yield report_failure(
                "retention",
                "a retention policy or legal hold keeps objects from being replaced or removed",
                "give the lake a container without them",
            )
        if "x-ms-version-id" in headers:
            yield report_ok("versioning", f"the container {KEEPS}")

    def _read_headers(self, key: str) -> Mapping[str, str]:
        """Azure's own headers of the blob, by lower-case name; empty if no address of it can be signed here."""
        with suppress(BaseError, OSError, ValueError, HTTPException, SluiceError):  # their texts hold signatures
            address = obstore.sign(self.make_client(), "GET", key, timedelta(minutes=5))
            answer = web.send(Request(address), seconds=self.settings.connect_timeout_ms / 1000)
            return {name.lower(): value for name, value in answer.headers.items()} if answer.status == 200 else {}
        return {}

    def build_delta_options(self) -> dict[str, str]:
        names = {"account_name": "azure_storage_account_name", "account_key": "azure_storage_account_key",
                 "sas_key": "azure_storage_sas_key", "endpoint": "azure_storage_endpoint"}  # fmt: skip
        return super().build_delta_options() | {names[k]: v for k, v in self._config.items()}
