"""AWS Glue's schema registry, through boto3, which finds credentials and addresses as it does anywhere.

A record names the version of a schema by its UUID. Promises: a request is retried if that may help, it has a
time-out,
and no error holds a secret or the text of a schema. A schema of Glue refers to no other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any

import boto3
from botocore import exceptions as boto
from botocore.config import Config

from sluice.pipelines.errors import Failed, RegistryForbidden, SluiceError
from sluice.pipelines.feed.kafka_section import RegistrySettings
from sluice.pipelines.records.rows.wire_format import AVRO, JSON, PROTOBUF, RegisteredSchema, build_unavailable_error
from sluice.resources.web import limit_client

TRIES = 3
_NOT_THERE = "EntityNotFoundException"
_MOST_SUBJECTS = 10_000
_REFUSED = frozenset(
    {
        *("AccessDeniedException", "AccessDenied", "UnrecognizedClientException", "InvalidSignatureException"),
        *("InvalidClientTokenId", "MissingAuthenticationToken", "ExpiredToken", "ExpiredTokenException"),
    }
)


@dataclass(frozen=True)
class GlueClient:
    """`ports.Registry`. Subjects are the names of schemas in the feed's registry. Picklable."""

    settings: RegistrySettings

    def schema(self, id: int | str) -> RegisteredSchema | None:
        with self._request_client() as ask:
            document = ask("get_schema_version", SchemaVersionId=str(id))
        return None if document is None else self._make_schema(document, id)

    def version(self, subject: str, version: int | None = None) -> RegisteredSchema | None:
        which: dict[str, Any] = {"VersionNumber": version} if version else {"LatestVersion": True}
        schema_id = {"RegistryName": self._place[1], "SchemaName": subject}
        with self._request_client() as ask:
            document = ask("get_schema_version", SchemaId=schema_id, SchemaVersionNumber=which)
        return None if document is None else self._make_schema(document, str(document.get("SchemaVersionId")), subject)

    def subjects(self) -> tuple[str, ...]:
        """The schemas of the registry, sorted; of very many, some."""
        names, more = list[str](), dict[str, str]()
        with self._request_client() as ask:
            while len(names) < _MOST_SUBJECTS:
                page = ask("list_schemas", RegistryId={"RegistryName": self._place[1]}, **more)
                if page is None:
                    raise Failed(
                        f"AWS Glue has no schema registry {self._place[1]} in {self._place[0]}",
                        remedy="check registry.url: glue://REGION/REGISTRY",
                    )
                names += [str(s.get("SchemaName")) for s in page.get("Schemas", [])]
                if not page.get("NextToken"):
                    break
                more = {"NextToken": page["NextToken"]}
        return tuple(sorted(names))

    @property
    def _place(self) -> tuple[str, str]:
        return self.settings.glue or ("", "")

    def _make_schema(self, document: dict[str, Any], id: int | str, subject: str = "") -> RegisteredSchema:
        text, type_ = document.get("SchemaDefinition"), document.get("DataFormat")
        if not isinstance(text, str) or type_ not in (AVRO, JSON, PROTOBUF):
            raise Failed(f"{self.settings.url} gave an answer without a schema", remedy="check registry.url")
        return RegisteredSchema(id, type_, (text,), subject, int(document.get("VersionNumber") or 0) if subject else 0)

    @contextmanager
    def _request_client(self) -> Iterator[Callable[..., dict[str, Any] | None]]:
        """Yields a function that returns Glue's answer to an operation, or None if the object does not exist. A
        client is made for the block: that takes far longer than a request."""
        try:
            session = boto3.session.Session()
            with closing(session.client("glue", region_name=self._place[0], config=self._config)) as glue:
                limit_client(glue, self.settings.timeout / 1000)

                def ask(operation: str, **parameters: Any) -> dict[str, Any] | None:
                    try:
                        answer: dict[str, Any] = getattr(glue, operation)(**parameters)
                    except boto.ClientError as error:
                        if _code(error) == _NOT_THERE:
                            return None
                        raise
                    return answer

                yield ask
        except boto.ClientError as error:
            raise self._meaning(_code(error)) from None
        except (boto.NoCredentialsError, boto.PartialCredentialsError, boto.CredentialRetrievalError):
            raise self._forbid("no credentials were found") from None
        except (boto.BotoCoreError, ValueError) as error:
            raise build_unavailable_error(self.settings.url, type(error).__name__) from None

    @property
    def _config(self) -> Config:
        seconds = self.settings.timeout / 1000
        return Config(connect_timeout=seconds, read_timeout=seconds, retries={"total_max_attempts": TRIES})

    def _meaning(self, code: str) -> SluiceError:
        if code in _REFUSED:
            return self._forbid(code)
        if code == "InvalidInputException":
            return Failed(f"{self.settings.url} gave {code}", remedy="check registry.subject and registry.version")
        return build_unavailable_error(self.settings.url, code)

    def _forbid(self, why: str) -> RegistryForbidden:
        return RegistryForbidden(
            f"the schema registry {self.settings.url} refused the login ({why})",
            remedy="give AWS's settings (environment, profile, role) the right glue:GetSchemaVersion; docs/formats.md",
        )


def _code(error: boto.ClientError) -> str:
    return str(error.response.get("Error", {}).get("Code", ""))
