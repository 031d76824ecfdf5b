"""Schema registries: of Glue (`resources.glue`), and over Confluent's REST API (Confluent's own, Apicurio's ccompat,
Karapace, Redpanda).

Promises of the latter: nothing is sent to another address than the feed's (no redirects), so neither is a password;
each request has a time limit, however slowly the answer comes; an answer's size, and the number and depth of
references, are bounded. What failed is tried three times where that may help, what took too long twice. No error holds
a secret, or the text of a schema.
"""

from __future__ import annotations

import base64
import http.client
import json
import re
import ssl
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import quote, urlsplit
from urllib.request import Request

from sluice.pipelines.errors import Failed, Refused, RegistryForbidden, SetupError
from sluice.pipelines.feed.feed import Feed
from sluice.pipelines.feed.kafka_section import RegistrySettings
from sluice.pipelines.feed.load import SchemaAsked
from sluice.pipelines.records.avro.reader_schema import AvroReader
from sluice.pipelines.records.protobuf.reader_schema import ProtobufReader
from sluice.pipelines.records.rows.value_reader import Reader, UnusableSchema
from sluice.pipelines.records.rows.wire_format import AVRO, RegisteredSchema, WireFormat, build_unavailable_error
from sluice.pipelines.records.shape import READERS
from sluice.pipelines.util.units import sanitize
from sluice.resources import web
from sluice.resources.registry import client_of

MOST_ANSWER = 4 << 20
"""Bytes of an answer."""
MOST_REFERENCES = 256
MOST_DEPTH = 16
"""Of references behind references."""
TRIES, LATE_TRIES = 3, 2
"""How often a request is sent: at all, and when no answer came in time."""
_AGAIN = (429, 500, 502, 503, 504)
_PAUSE = 0.3
_SENT = "application/vnd.schemaregistry.v1+json"
_ACCEPT = "application/vnd.schemaregistry.v1+json, application/json"


_NUMBERED = re.compile(r"(contentId|globalId)-([0-9]+)")
"""The names of schemas by Apicurio's two kinds of numbers."""
_SEARCHES = {"v3": ("versions", "artifactType"), "v2": ("artifacts", "type")}
"""The versions of Apicurio's own API; what each calls the results of a search, and their types."""
_Key = tuple[str, ...]
"""What names a schema that others refer to: its subject and version, behind its group where there is one."""


def find_registered(request: SchemaAsked) -> RegisteredSchema:
    """The schema that the registry has for a feed: the newest version of the subject, or the one that the feed pins.

    Raises Failed where there is none, or it is of another format; RegistryUnavailable, NotAuthorized.
    """
    schema = client_of(request.registry).version(request.subject, request.registry.version)
    if schema is None:
        version = f"version {request.registry.version} of " if request.registry.version else ""
        raise Failed(
            f"the schema registry {request.registry.url} has no {version}subject {request.subject}",
            remedy="name another: registry: {subject: …}",
        )
    if schema.type != READERS[request.format].registered:
        raise Failed(
            f"subject {request.subject}, version {schema.version}, is {schema.type}, and not {request.format}",
            remedy="name another subject, or version",
        )
    return schema


def file_of(schema: RegisteredSchema, request: SchemaAsked) -> str:
    """Returns a registered schema as one file. Raises UnusableSchema."""
    return READERS[request.format].as_file(schema)


def find_written(request: SchemaAsked, number: int) -> tuple[SchemaAsked, RegisteredSchema]:
    """Returns the request in the format of the schema that records name by this number, and the schema: that of the
    request's subject where it has the same format, as `schema pull` takes it, and otherwise the records' own.

    Raises Failed for an unknown number, RegistryUnavailable, NotAuthorized.
    """
    written = client_of(request.registry).schema(number)
    if written is None:
        what = f"the schema registry {request.registry.url} has no schema {number}, which most records name"
        raise Failed(what, remedy="give the registry of the records' producers, or --raw")
    formats = {form.registered: name for name, form in READERS.items()}
    if written.type not in formats:
        raise Failed(f"schema {number} is of type {sanitize(written.type)}", remedy="land it with --raw")
    request = replace(request, format=formats[written.type])
    try:
        return request, find_registered(request)
    except Failed:
        return request, written


def read_key_fields(request: SchemaAsked) -> tuple[str, ...]:
    """The fields of the topic's keys by their newest schema; empty without one, and for a key of one value."""
    schema = client_of(request.registry).version(re.sub("-value$", "-key", request.subject))
    format_ = next((name for name, form in READERS.items() if schema and form.registered == schema.type), None)
    if schema is None or format_ is None:
        return ()
    try:
        return tuple(f.name for f in reader_of(schema, replace(request, format=format_, message="")).columns.fields)
    except Failed:
        return ()


def pull_schema(request: SchemaAsked) -> tuple[RegisteredSchema, Reader]:
    """Write the registry's schema into the schema_file. Returns it, and its reader.

    If it makes no columns, it is written only if there is no file yet, for editing. Then, raises Failed.
    """
    newest, file = find_registered(request), request.schema_file
    try:
        reader = reader_of(newest, request)
    except Failed as error:
        try:
            if file.exists():
                raise Failed(error.message, remedy=f"{error.remedy}; {file} is unchanged") from None
            _write(newest, request)
        except UnusableSchema:  # it is not even one file
            raise error from None
        remedy = f"it is in {file}: remove these parts, then run sluice feeds check"
        raise Failed(error.message, remedy=remedy) from None
    _write(newest, request)
    return newest, reader


def _write(schema: RegisteredSchema, request: SchemaAsked) -> None:
    request.schema_file.parent.mkdir(parents=True, exist_ok=True)
    request.schema_file.write_text(file_of(schema, request) + "\n")


def reader_of(schema: RegisteredSchema, request: SchemaAsked) -> Reader:
    """Returns the reader of a registered schema, as one file. Raises Failed if the schema makes no columns."""
    reader_type = READERS[request.format]
    try:
        texts = reader_type.read(reader_type.as_file(schema), request.schema_file.parent, request.message)
        return reader_type.make(texts, WireFormat.CONFLUENT)
    except ValueError as error:
        what = error.text if isinstance(error, UnusableSchema) else sanitize(str(error))
        raise Failed(
            f"subject {schema.subject}, version {schema.version}, makes no columns: {what}",
            remedy="write a schema_file of your own, without what cannot be a column or part of a contract",
        ) from None


def number_of_own(feed: Feed, topics: Sequence[str]) -> int:
    """The number of the feed's own schema in its registry; 0 where values do not name it. It must be the newest version
    of a topic's subject, of these topics, or the version that the feed names. Nothing is registered.

    Raises Refused where it is none of these, RegistryUnavailable, NotAuthorized.
    """
    reader, registry = feed.reader, feed.registry
    if reader is None or registry is None or reader.wire is WireFormat.BARE:
        return 0
    looked: list[tuple[str, int | None]] = [
        (f"{registry.context}{topic}-value", None) for topic in dict.fromkeys(topics)
    ]
    looked += [(registry.subject, registry.version)] if registry.subject else []
    client = client_of(registry)
    for subject, version in looked:
        schema = client.version(subject, version)
        if schema and isinstance(schema.id, int) and _reads_alike(reader, schema):
            return schema.id
    subjects = ", ".join(subject for subject, _ in looked)
    raise Refused(
        f"the schema registry {registry.url} has the own schema of {feed.name} under none of the subjects {subjects}",
        remedy=f"register its schema_file as the newest version of {looked[0][0]}",
    )


def _reads_alike(reader: Reader, schema: RegisteredSchema) -> bool:
    reader_type = READERS[reader.format]
    if schema.type != reader_type.registered:
        return False
    try:
        if isinstance(reader, ProtobufReader):
            return reader.is_of(schema)
        other = reader_type.make((reader_type.as_file(schema),), reader.wire)
    except ValueError:
        return False
    if isinstance(reader, AvroReader) and isinstance(other, AvroReader):
        return reader.type == other.type  # however its texts name their references
    return reader.fingerprint == other.fingerprint


@dataclass(frozen=True)
class RegistryClient:
    """`ports.Registry`. Opens a connection for each request: a registry is asked seldom. Picklable."""

    settings: RegistrySettings

    def schema(self, id: int | str) -> RegisteredSchema | None:
        if numbered := _NUMBERED.fullmatch(str(id)):
            return self._of_own_api(str(id), *numbered.groups())
        paths = [f"/schemas/ids/{id}{query}" for query in self._list_queries()] if isinstance(id, int) else []
        answers = (self._get(path) for path in paths or [f"/schemas/guids/{id}"])
        document = next((d for d in answers if d is not None), None)
        return None if document is None else self._make_schema(document, id)

    def _list_queries(self) -> tuple[str, ...]:
        """Returns the queries of a look-up by number, in order.

        A number means another schema in each context, which the subject names. Some registries give only schemas of
        exactly that subject; the second query gives others of its context, as by a strategy with the record's name.
        """
        subject, context = self.settings.subject, self.settings.context
        names = [subject, context] if subject else [""]
        return tuple(f"?subject={quote(name, safe='')}" if name else "" for name in dict.fromkeys(names))

    def version(self, subject: str, version: int | None = None) -> RegisteredSchema | None:
        document = self._get(_version_path(subject, version or "latest"))
        return None if document is None else self._make_schema(document, _number(document, "id"), subject)

    def register(self, subject: str, schema: str, type: str = AVRO) -> int:
        """Register a schema as the subject's newest version, unless it has it. Returns the schema's number."""
        path = f"/subjects/{quote(subject, safe='')}/versions"
        document = self._get(path, json.dumps({"schema": schema, "schemaType": type}).encode())
        if document is None:
            raise self._nonsense("HTTP 404")
        return _number(document, "id")

    def subjects(self) -> tuple[str, ...]:
        """The subjects that the registry shows us, sorted."""
        document = self._parse(self._send(f"{urlsplit(self.settings.url).path}/subjects"))
        if not isinstance(document, list):
            raise self._nonsense("no list of subjects")
        return tuple(sorted(str(s) for s in document))

    def _make_schema(self, document: Any, id: int | str, subject: str = "") -> RegisteredSchema:
        texts: dict[_Key, tuple[str, str]] = {}
        references = document.get("references") or []
        number = document.get("id", id)
        if references and self._own and isinstance(number, int):
            own = self._own_references(number, self._text(document), references)
            self._collect(own.references, texts, (), own)
        else:
            self._collect(references, texts, (), _Compatible(self))
        version = _number(document, "version") if subject else 0
        kind = document.get("schemaType")  # registries leave out the type of Avro schemas
        kind = kind if isinstance(kind, str) and kind.isalpha() and len(kind) < 20 else AVRO
        return _make_client(id, kind, texts, self._text(document), subject, version)

    def _collect(
        self, references: Any, texts: dict[_Key, tuple[str, str]], above: tuple[_Key, ...], api: _Compatible | _Apicurio
    ) -> None:
        """Collect the texts of all referenced schemas in `texts`, each after its own references."""
        if not isinstance(references, list):
            raise self._nonsense("references that are no list")
        for r in references:
            if not isinstance(r, dict):
                raise self._nonsense("a reference that is none")
            key = api.key(r)
            if key in above:
                raise self._refusal(f"{api.describe_key(key)}, refers to itself in a circle")
            if key in texts:
                continue
            if len(texts) >= MOST_REFERENCES or len(above) >= MOST_DEPTH:
                raise self._refusal(
                    f"a schema has more than {MOST_REFERENCES} references, or they are deeper than {MOST_DEPTH}"
                )
            behind = api.behind(key)
            if behind is None:
                raise self._refusal(f"a schema refers to {api.describe_key(key)}, which does not exist")
            text, inside = behind
            self._collect(inside, texts, (*above, key), api)
            texts[key] = str(r.get("name")), text

    @property
    def _own(self) -> str:
        """Returns the path of Apicurio's own API; empty for another registry."""
        return self.settings.apicurio

    def _of_own_api(self, id: str, kind: str, number: str) -> RegisteredSchema | None:
        """A schema by one of Apicurio's two kinds of numbers; None where there is none."""
        for api, (results, type_) in _SEARCHES.items():
            path = f"{self._own}/{api}"
            at, texts = f"{path}/ids/{kind}s/{number}", dict[_Key, tuple[str, str]]()
            text = self._send(at)
            if text is None:
                continue
            document = self._parse(self._send(f"{path}/search/{results}?{kind}={number}&limit=1"))
            versions = document.get(results) if isinstance(document, dict) else None
            if not versions:
                return None  # no version has this text now
            references = self._parse(self._send(f"{at}/references")) or []
            self._collect(references, texts, (), _Apicurio(self, path, references))
            return _make_client(id, str(versions[0].get(type_)), texts, text.decode("utf-8", "replace"))
        if all(self._send(f"{self._own}/{api}/system/info") is None for api in _SEARCHES):
            raise Failed(
                f"the schema registry {self.settings.url} has no {self._own}, which tells the schemas of headers",
                remedy=f"let {self._own}/v3 of the same address be reached, with a right to read",
            )
        return None

    def _own_references(self, id: int, text: str, references: Any) -> _Apicurio:
        """A schema's references with their groups, which the compatible API leaves out. Its number there is one of its
        content, unless the registry is set to global ones: the text decides."""
        for api in _SEARCHES:
            for kind in ("contentIds", "globalIds"):
                at = f"{self._own}/{api}/ids/{kind}/{id}"
                if self._send(at) == text.encode():
                    document = self._parse(self._send(f"{at}/references"))
                    if isinstance(document, list) and len(document) == len(references):
                        return _Apicurio(self, f"{self._own}/{api}", document)
        raise Failed(
            f"the schema registry {self.settings.url}: schema {id} refers to others, and which groups these are in,"
            " only Apicurio's own API tells, which does not have it",
            remedy=f"let {self._own}/v3 of the same address be reached, with a right to read",
        )

    def _text(self, document: Any) -> str:
        text = document.get("schema")
        if not isinstance(text, str):
            raise self._nonsense("an answer without a schema")
        return text

    # -- requests

    def _get(self, path: str, body: bytes | None = None) -> Any:
        """The JSON object at the path of the compatible API, to which a body is posted; None for 404."""
        document = self._parse(self._send(urlsplit(self.settings.url).path + path, body))
        if isinstance(document, list):
            raise self._nonsense("an answer that is no JSON object")
        return document

    def _send(self, path: str, body: bytes | None = None) -> bytes | None:
        """The bytes at the path; None for 404."""
        attempts, late = TRIES, 0
        while True:
            attempts -= 1
            try:
                status, answer = self._ask(path, body)
            except (OSError, http.client.HTTPException) as error:
                if isinstance(error, ssl.SSLCertVerificationError):
                    raise build_unavailable_error(
                        self.settings.url, f"its certificate is not trusted ({error.verify_message})"
                    ) from None
                late += isinstance(error, TimeoutError)
                if not attempts or late == LATE_TRIES:
                    raise build_unavailable_error(self.settings.url, _why(error)) from None
            else:
                if not attempts or status not in _AGAIN:
                    return self._answer(status, answer)
            time.sleep(_PAUSE)

    def _answer(self, status: int, body: bytes) -> bytes | None:
        if status == 404:
            return None
        if status in (401, 403):
            reason = "refused the login" if status == 401 else "gives no right to read schemas"
            raise RegistryForbidden(
                f"the schema registry {self.settings.url} {reason} (HTTP {status})",
                remedy="check registry.username and password, or registry.token",
            )
        if status == 429 or status >= 500:
            raise build_unavailable_error(self.settings.url, f"HTTP {status}")
        if status != 200:
            raise self._nonsense(f"HTTP {status}")
        if len(body) > MOST_ANSWER:
            raise self._refusal(f"an answer is larger than {MOST_ANSWER:,} bytes")
        return body

    def _parse(self, body: bytes | None) -> Any:
        if body is None:
            return None
        try:
            document = json.loads(body)
        except (ValueError, RecursionError):
            raise self._nonsense("an answer that is not JSON") from None
        if not isinstance(document, dict | list):
            raise self._nonsense("an answer that is no JSON object")
        return document

    def _ask(self, path: str, body: bytes | None) -> tuple[int, bytes]:
        url = urlsplit(self.settings.url)
        headers = {"Accept": _ACCEPT, **({"Content-Type": _SENT} if body else {}), **self._login()}
        answer = web.send(
            Request(f"{url.scheme}://{url.netloc}{path}", body, headers),
            seconds=self.settings.timeout / 1000,
            max_bytes=MOST_ANSWER,
            tls=self._context() if url.scheme == "https" else None,
            proxies={},
        )
        return answer.status, answer.body

    def _login(self) -> dict[str, str]:
        s = self.settings
        if s.token:
            token = s.token.get_secret_value()
            if not (token.isascii() and token.isprintable()):  # http.client's error would repeat it
                raise SetupError(
                    "registry.token has a line break, or another character that no header holds",
                    remedy="give the token alone: see the variable or file that it comes from",
                )
            return {"Authorization": f"Bearer {token}"}
        if s.username and s.password:
            pair = f"{s.username}:{s.password.get_secret_value()}".encode()
            return {"Authorization": f"Basic {base64.b64encode(pair).decode()}"}
        return {}

    def _context(self) -> ssl.SSLContext:
        s = self.settings
        try:
            context = ssl.create_default_context(cafile=s.ssl_cafile)
            if s.ssl_certfile:
                context.load_cert_chain(s.ssl_certfile, s.ssl_keyfile)
        except (OSError, ssl.SSLError) as error:
            raise SetupError(
                f"registry.ssl_… : a certificate cannot be loaded ({_why(error)})",
                remedy="check the files that it names",
            ) from None
        return context

    # -- errors

    def _nonsense(self, what: str) -> Failed:
        return Failed(
            f"the schema registry {self.settings.url} gave {what}",
            remedy="check registry.url: the address of Confluent's API, such as http://host:8080/apis/ccompat/v7",
        )

    def _refusal(self, what: str) -> Failed:
        return Failed(f"the schema registry {self.settings.url}: {what}", remedy="fix the schema in the registry")


@dataclass(frozen=True)
class _Compatible:
    """Schemas by subject and version, in Confluent's API."""

    client: RegistryClient

    def key(self, reference: dict[str, Any]) -> _Key:
        subject, context = str(reference.get("subject")), self.client.settings.context
        return subject if subject.startswith(":.") else f"{context}{subject}", str(reference.get("version"))

    def describe_key(self, key: _Key) -> str:
        return f"subject {key[0]!r}, version {key[1]}"

    def behind(self, key: _Key) -> tuple[str, Any] | None:
        """The text of a schema and its references; None where there is none."""
        document = self.client._get(_version_path(*key))
        return None if document is None else (self.client._text(document), document.get("references") or [])


@dataclass(frozen=True)
class _Apicurio:
    """Schemas by group, artifact and version, in Apicurio's own API at this path; and the references of one of them."""

    client: RegistryClient
    api: str
    references: list[Any]

    def key(self, reference: dict[str, Any]) -> _Key:
        names = (reference.get("groupId") or "default", reference.get("artifactId"), reference.get("version"))
        return tuple(map(str, names))

    def describe_key(self, key: _Key) -> str:
        return f"artifact {key[1]!r} of group {key[0]!r}, version {key[2]}"

    def behind(self, key: _Key) -> tuple[str, Any] | None:
        """The text of a schema and its references; None where there is none."""
        group, artifact, version = (quote(name, safe="") for name in key)
        at = f"{self.api}/groups/{group}/artifacts/{artifact}/versions/{version}"
        text = self.client._send(f"{at}/content" if self.api.endswith("v3") else at)
        if text is None:
            return None
        return text.decode("utf-8", "replace"), self.client._parse(self.client._send(f"{at}/references")) or []


def _make_client(
    id: int | str, type: str, texts: dict[_Key, tuple[str, str]], text: str, subject: str = "", version: int = 0
) -> RegisteredSchema:
    """A schema with the texts that it refers to, and their names."""
    before, names = tuple(t for _, t in texts.values()), tuple(name for name, _ in texts.values())
    return RegisteredSchema(id, type, (*before, text), subject, version, names)


def _version_path(subject: str, version: int | str) -> str:
    return f"/subjects/{quote(subject, safe='')}/versions/{quote(str(version), safe='')}"


def _number(document: Any, name: str) -> int:
    value = document.get(name)
    return value if isinstance(value, int) else 0


def _why(error: Exception) -> str:
    """Returns the failure's description, without addresses or headers."""
    if isinstance(error, TimeoutError):
        return "no answer in time"
    return getattr(error, "strerror", None) or type(error).__name__
