"""Google Cloud Storage: conditional writes by `x-goog-if-generation-match: 0`, tags with the generation."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, ClassVar

from obstore.store import GCSStore

from sluice.pipelines.errors import SetupError
from sluice.pipelines.feed.stores import GcsSettings
from sluice.resources.lake.obstore_client import ObstoreClient, reveal

_READER, _USER = (f"(roles/storage.object{role}) on the bucket or the prefix" for role in ("Viewer", "User"))


@dataclass(frozen=True)
class GoogleClient(ObstoreClient):
    settings: GcsSettings
    GRANTS: ClassVar = {
        "list": f"storage.objects.list {_READER}",
        "read": f"storage.objects.get {_READER}",
        "write": f"storage.objects.create and storage.objects.delete {_USER}",
        "remove": f"storage.objects.delete {_USER}",
    }

    def connect(self, options: Any) -> GCSStore:
        s = self.settings
        config: Any = {"base_url": s.endpoint, "service_account": s.service_account, "bearer_token": s.token}
        config = reveal(config)
        return GCSStore(self.home.bucket, config=config, **options)

    @property
    def address(self) -> str:
        return self.settings.endpoint or "https://storage.googleapis.com"

    def build_delta_options(self) -> dict[str, str]:
        options, s = super().build_delta_options(), self.settings
        if s.endpoint:  # an emulator: deltalake takes no token
            key = {"gcs_base_url": s.endpoint, "disable_oauth": True, "client_email": "", "private_key": ""}
            return options | {"google_service_account_key": json.dumps(key | {"private_key_id": ""})}
        if s.token:
            raise SetupError(
                "deltalake takes no token of Google", remedy="set gcs.service_account, or leave gcs.token out"
            )
        return options | ({"google_service_account": s.service_account} if s.service_account else {})
