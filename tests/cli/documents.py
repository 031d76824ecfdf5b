"""The JSON documents of all commands: their shapes, as the serializer reads them from the types of results."""

from __future__ import annotations

import ast
import inspect
import json
import types
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass
from enum import Enum
from pathlib import Path, PurePath
from typing import Annotated, Any, Union, get_args, get_origin

from sluice.assets.instance.storage import RunLog
from sluice.cli.daily import run_view
from sluice.cli.inspect import doctor, plan, table, wait
from sluice.cli.kafka import groups
from sluice.cli.maintain import expire, repair, unstick
from sluice.cli.rules import contract, feeds, quarantine
from sluice.cli.shared import rewrite_summary
from sluice.pipelines.audit import audit, explain_offset, strict_audit
from sluice.pipelines.contract.catalogue import ExpectationOutcome
from sluice.pipelines.errors import SluiceError
from sluice.pipelines.feed.rights import Right
from sluice.pipelines.maintenance import expiry
from sluice.pipelines.model.kafka import PartitionState
from sluice.pipelines.model.receipts import Drift, Met
from sluice.pipelines.operating import (
    acceptance,
    check_window,
    describe_group,
    event_hours,
    feed_status,
    group_offsets,
    migrate_offsets,
    move_offsets,
    move_topic,
    project_page,
    propose_feed,
    record_search,
    rename_feed,
    republish,
)
from sluice.pipelines.planning.windows import OpenWindows
from sluice.pipelines.publishing.published_files import File
from sluice.pipelines.quarantine.limit import Fault
from sluice.pipelines.quarantine.listing import Listing
from sluice.pipelines.republishing import coordinates, lanes, republish_audit
from sluice.pipelines.util.documents import Mark, list_marks, read_hints, to_document, to_json
from sluice.resources.local import events, local_kafka
from sluice.resources.spark import pack_archive

GOLDEN = Path(__file__).with_name("documents.json")
RECORD_GOLDEN = "SLUICE_RECORD_DOCUMENTS"
"""With this in the environment, the test writes the golden file."""


@dataclass(frozen=True)
class Document:
    """A document of a command: a result, and the keys that the command adds to it."""

    command: str
    result: Any = None
    keys: Mapping[str, Any] = field(default_factory=dict)


RECORD = {
    "topic": str,
    "partition": int,
    "offset": int,
    "timestamp": int | None,
    "timestamp_type": int,
    "key": str | None,
    "value": str | None,
    "headers": list[Any],
}
OF_ROW = {"stage": str, "reason": str, "expectation": str | None, "field": str | None, "detail": str, "batch": int}
OFFSETS = group_offsets.GroupOwner
TABLE = table.TableResult
REWRITTEN = {
    "feed": str,
    "dry_run": bool,
    "seconds": float,
    "batches": list[int],
    "windows": list[rewrite_summary.WindowSums],
    "busy": list[rewrite_summary.BusyWindow],
    "other_batches": tuple[Met, ...],
    "incomplete": list[str],
    "open_windows": OpenWindows | None,
}
SCHEMA = {"feed": str, "schema_file": str | Path | None, "columns": dict[str, str]}
VERSION = {"subject": str, "version": int, "id": int | str}
DIFFERENCE = {
    "feed": str,
    "changes": list[dict[str, str | None]],
    "expects": dict[str, list[str]],
    "refused": str | None,
}

DOCUMENTS = [
    Document("(error)", SluiceError, {"exit_code": int}),
    Document("accept", acceptance.Accepted, {"applied": bool, "feed": str, "reason": str, "next": int}),
    Document("acls", None, {"feed": str, "principal": str, "rights": list[Right], "commands": dict[str, list[str]]}),
    Document("audit", audit.AuditReport, {"rounded": list[str], "strict": strict_audit.Strict | None}),
    Document("audit --republished", republish_audit.RepublishAudit),
    Document("check --event-hour", event_hours.EventHour),
    Document("check", check_window.WindowCheck),
    Document("compact", rewrite_summary.FileSums, REWRITTEN),
    Document("completion", None, {"shell": str, "script": str}),
    Document(
        "contract check",
        None,
        {
            "feed": str,
            "contract": str,
            "sample": contract.SampleResult,
            "expectations": list[ExpectationOutcome],
            "examples": dict[str, list[Any]],
            "not_tried": list[int],
            "quarantine": list[Fault],
            "published": bool,
            "refused": list[str],
        },
    ),
    Document(
        "contract init",
        None,
        {
            "feed": str,
            "file": Path,
            "sample": contract.SampleResult,
            "proposals": list[Any],
            "unfit": list[Fault],
            "suite": dict[str, Any],
        },
    ),
    Document("dbt sources", None, {"file": Path | None, "sources": list[Any], "untested": dict[str, list[str]]}),
    Document("demo", None, {"project": Path, "seconds": float, "steps": list[Any]}),
    Document("docs", None, {"pages": dict[str, str]}),
    Document("docs PAGE", None, {"page": str, "text": str}),
    Document("doctor", None, {"healthy": bool, "groups": list[doctor.CheckGroup]}),
    Document(
        "expire",
        expire.ExpiryResult,
        {
            "applied": bool,
            "entry": int | None,
            "removed_files": int,
            "removed_pages": int,
            "kept_files": int,
            "other_batches": tuple[Met, ...],
        },
    ),
    Document("hold", None, {"feed": str, "holds": tuple[expiry.Hold, ...]}),
    Document("expire without retention", None, {"feed": str, "applied": bool}),
    Document("expire --dry-run", expire.ExpiryResult, {"applied": bool}),
    Document("erase", record_search.Matches, {"feed": str, "applied": bool}),
    Document(
        "erase --yes",
        record_search.Matches,
        {
            "feed": str,
            "applied": bool,
            "entry": int | None,
            "batches": tuple[int, ...],
            "rewritten": int,
            "removed_reports": int,
            "other_batches": tuple[Met, ...],
        },
    ),
    Document(
        "explain",
        explain_offset.Explanation,
        {
            "record": dict[str, Any] | None,
            "republished": tuple[coordinates.SentRecord, ...],
            "earlier": list[dict[str, Any]],
        },
    ),
    Document("explain --where", record_search.Matches, {"feed": str, "records": list[dict[str, Any]]}),
    Document("feeds check", None, {"feeds": list[str], "schemas": dict[str, Any]}),
    Document("feeds list", None, {"feeds": list[Any], "broken": list[feeds.BrokenFile]}),
    Document("feeds move-topic", move_topic.TopicMove, {"files": list[Path], "applied": bool}),
    Document("feeds rename", rename_feed.Rename, {"applied": bool}),
    Document("feeds retire", None, {"feed": str, "retired": bool, "applied": bool}),
    Document("feeds schema", dict),
    Document(
        "files",
        None,
        {
            "feed": str,
            "windows": list[str],
            "kind": str,
            "rows": int,
            "bytes": int,
            "files": list[File],
            "holds": tuple[expiry.Hold, ...],
        },
    ),
    Document("groups describe", describe_group.GroupReport),
    Document(
        "groups list",
        None,
        {
            "bootstrap": str,
            "groups": list[groups.OwnedGroup],
            "not_there": list[groups.MissingGroup],
            "hidden": list[groups.MissingGroup],
        },
    ),
    Document("groups watch", describe_group.GroupEvent, {"group": str}),
    Document(
        "init",
        None,
        {
            "feed": str,
            "written": list[str | Path],
            "text": str,
            "topic": str,
            "partitions": int,
            "offsets": int,
            "format": str,
            "columns": Any,
            "extra": Any,
            "envelope": str,
            "key": tuple[str, ...],
            "split": Mapping[str, str],
            "rest": Mapping[str, int],
            "outputs": tuple[propose_feed.OutputProposal, ...],
            "sampled": int,
            "fit": int | None,
            "misfits": tuple[propose_feed.Misfit, ...],
        },
    ),
    Document("kafka grant", None, {"user": str, "rights": list[Right]}),
    Document("kafka renew", local_kafka.ClusterStatus),
    Document("kafka start", local_kafka.ClusterStatus, {"registry": str | None}),
    Document("kafka status", None, {"root": Path, "answering": bool, "brokers": list[Any]}),
    Document("metrics", None, {"figures": list[Any]}),
    Document("metrics --serve", None, {"address": str}),
    Document("offsets before", OFFSETS, {"time": int, "offsets": tuple[group_offsets.OffsetBefore, ...]}),
    Document("offsets diff", OFFSETS, {"with": str, "same": bool, "offsets": tuple[group_offsets.OffsetPair, ...]}),
    Document("offsets export", OFFSETS, {"file": Path | None, "offsets": list[dict[str, Any]]}),
    Document(
        "offsets migrate",
        None,
        {
            "feed": str,
            "group": str,
            "from": str,
            "to": str,
            "applied": bool,
            "moved": int,
            "offsets": tuple[migrate_offsets.OffsetMigration, ...],
            "problem": SluiceError | None,
        },
    ),
    Document(
        "offsets reset",
        OFFSETS,
        {
            "target": str,
            "applied": bool,
            "entry": int | None,
            "offsets": tuple[move_offsets.Move, ...],
            "problem": SluiceError | None,
        },
    ),
    Document("offsets show", OFFSETS, {"offsets": tuple[group_offsets.OffsetStanding, ...]}),
    Document("pack", pack_archive.Pack, {"path": Path, "python": str}),
    Document("peek", PartitionState, {"records": list[dict[str, Any]]}),
    Document("peek --follow", dict, RECORD),
    Document("plan", plan.PlanResult, {"open_windows": OpenWindows | None}),
    Document("plan --from", None, {"feed": str, "plans": list[plan.PlanResult], "open_windows": OpenWindows | None}),
    Document("produce", events.SentEvents, {"feed": str, "topics": list[str], "seed": int}),
    Document("prune", None, {"dry_run": bool, "before": str, "runs": list[RunLog], "bytes": int}),
    Document("quarantine list", Listing, {"feed": str, "staged": list[Listing]}),
    Document("quarantine replay", quarantine.ReplayResult),
    Document("quarantine show", None, {"feed": str, "records": list[dict[str, Any]]}),
    Document(
        "repair",
        None,
        {
            "dry_run": bool,
            "feeds": list[repair.RepairedFeed],
            "broken": list[SluiceError],
            "temporary": list[Path],
        },
    ),
    Document(
        "report",
        None,
        {
            "feed": str,
            "batch": int,
            "status": str,
            "rows": int,
            "quarantined": int,
            "quarantined_share": float,
            "dropped": int,
            "no_record": int,
            "bytes": int,
            "files": int,
            "milliseconds": int | None,
            "expectations": int,
            "broken": int,
            "outcomes": tuple[ExpectationOutcome, ...],
            "drift": tuple[Drift, ...],
            "path": str,
            "output": Path | None,
            "rebuilt": bool,
            "size": int,
        },
    ),
    Document("report --all", project_page.ProjectPage, {"output": Path | None, "size": int}),
    Document("report WINDOW", check_window.WindowCheck, {"path": str, "output": Path | None, "size": int}),
    Document("republish", lanes.Sent, {"applied": bool}),
    Document("republish --dry-run", republish.RepublishPreview, {"applied": bool}),
    Document(
        "run",
        None,
        {
            "feeds": list[run_view.FeedRuns],
            "failed": list[str],
            "left": list[str],
            "broken": list[SluiceError],
            "took": float,
            "exit_code": int,
        },
    ),
    Document("schema diff", None, DIFFERENCE | VERSION),
    Document("schema diff --file", None, DIFFERENCE | {"file": Path}),
    Document("schema pull", None, SCHEMA | VERSION),
    Document("schema show", None, SCHEMA | {"expects": list[str], "registry": str | None}),
    Document(
        "status",
        None,
        {
            "feeds": list[feed_status.FeedStatus],
            "broken": list[SluiceError],
            "ledgers_without_files": dict[str, list[str]],
        },
    ),
    Document("table check, table status", TABLE),
    Document("table check, table status of a split feed", table.OutputTables),
    Document("table rebuild", TABLE, {"applied": bool}),
    Document("table rebuild --dry-run", None, {"applied": bool, "tables": list[str]}),
    Document("table sync", TABLE, {"misread": list[str]}),
    Document("ui", None, {"address": str, "pids": dict[str, int], "broken": list[SluiceError]}),
    Document("unstick", unstick.Unstuck, {"dry_run": bool}),
    Document("wait", wait.WaitResult),
]

ERROR = {
    **dict.fromkeys(("error", "message", "remedy"), "string"),
    "topic?": "string",
    "partition?": "integer",
    "start?": "integer",
    "end?": "integer",
    "breaches?": [{"*": "any"}],
    "file?": "string",
}
SIMPLE = {
    str: "string",
    int: "integer",
    float: "number",
    bool: "boolean",
    type(None): "null",
    Any: "any",
    object: "any",
}


class Shapes:
    """The shapes of types, as JSON. Objects are classes, and described in `types`."""

    def __init__(self) -> None:
        self.types: dict[str, Any] = {"Error": ERROR}
        self._classes: dict[str, type] = {}

    def build(self, document: Document) -> dict[str, Any]:
        shape = {} if document.result in (None, dict) else self._join_keys(self._list_keys(document.result))
        return shape | {key: self.describe(hint) for key, hint in document.keys.items()}

    def describe(self, hint: Any, marks: Iterable[Mark] = ()) -> Any:
        """Returns the shape of a value of this type."""
        if get_origin(hint) is Annotated:
            return self.describe(get_args(hint)[0], {*marks, *list_marks(hint)})
        origin, parts = get_origin(hint), get_args(hint)
        if origin in (Union, types.UnionType):
            shapes = [self.describe(part, marks) for part in parts]
            return (
                shapes[0] if len(shapes) == 1 else {"any of": [s for n, s in enumerate(shapes) if s not in shapes[:n]]}
            )
        if isinstance(hint, type) and issubclass(hint, SluiceError):
            return "Error"
        if origin is not None:
            if issubclass(origin, Mapping):
                return {"*": self.describe(parts[1], marks)}
            if issubclass(origin, tuple) and parts[-1] is not ...:
                return [self.describe(part, marks) for part in parts]
            return [self.describe(parts[0], marks), "..."] if parts else ["any", "..."]
        if marks and {Mark.TEXT, Mark.INSTANT} & set(marks) and hint is not type(None):
            return "string"
        if hint in SIMPLE:
            return SIMPLE[hint]
        if issubclass(hint, Enum):
            return "integer" if issubclass(hint, int) else "string"
        if issubclass(hint, PurePath):
            return "string"
        if hasattr(hint, "_fields") and Mark.FLAT not in marks:
            return [self.describe(h, marks) for _, h in read_hints(hint, import_checked(hint)) if h is not Any]
        return self._name(hint)

    def _name(self, of: type) -> str:
        """Describes a class once, and returns its name."""
        name = (
            of.__name__
            if self._classes.get(of.__name__, of) is of
            else f"{of.__module__.rpartition('.')[2]}.{of.__name__}"
        )
        if name not in self.types:
            assert is_dataclass(of) or hasattr(of, "_fields") or of.__module__.endswith("ledger.entries"), (
                f"{of} is in a document"
            )
            self._classes[name], self.types[name] = of, {}
            self.types[name] = self._join_keys(self._list_keys(of))
        return name

    def _list_keys(self, of: Any) -> Iterable[tuple[str, Any]]:
        if issubclass(of, SluiceError):
            yield from ERROR.items()
            return
        for name, hint in read_hints(of, import_checked(of)):
            own = getattr(hint, "__metadata__", ())
            if Mark.INTERNAL in own:
                continue
            if Mark.FLAT not in own:
                yield name.removesuffix("_"), self.describe(hint)
                continue
            yield from self._list_flat(get_args(hint)[0]).items()

    def _list_flat(self, hint: Any) -> dict[str, Any]:
        """Returns the keys of a flat value of one of several types; null without it, those of errors absent."""
        if get_origin(hint) not in (Union, types.UnionType):
            return self._join_keys(self._list_keys(hint))
        parts = [self._join_keys(self._list_keys(part)) for part in get_args(hint) if part is not type(None)]
        is_error, null = parts[0] == ERROR, ["null"] if len(parts) < len(get_args(hint)) else []
        keys = dict[str, Any]()
        for key in dict.fromkeys(k.removesuffix("?") for part in parts for k in part):
            shapes = [s for part in parts for s in (part.get(key), part.get(f"{key}?")) if s is not None]
            optional = is_error or len(shapes) < len(parts)
            keys[f"{key}?" if optional else key] = unite(*shapes, *([] if is_error else null))
        return keys

    def _join_keys(self, pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
        """Joins the shapes of a key that several parts have. The null of an absent part replaces no value."""
        keys = dict[str, Any]()
        for key, shape in pairs:
            parts = shape["any of"] if isinstance(shape, dict) and "any of" in shape else [shape]
            others = [s for s in parts if s != "null"]
            keys[key] = unite(keys[key], *others) if key in keys and len(others) < len(parts) else shape
        return keys


def unite(*shapes: Any) -> Any:
    """Returns the shape of a value of one of these."""
    parts = [p for s in shapes for p in (s["any of"] if isinstance(s, dict) and "any of" in s else [s])]
    different = [p for n, p in enumerate(parts) if p not in parts[:n]]
    return different[0] if len(different) == 1 else {"any of": different}


def build_golden(shapes: Shapes) -> dict[str, Any]:
    """Returns the content of the golden file: the keys of each document, and of the types that these name."""
    documents = {d.command: shapes.build(d) for d in DOCUMENTS}

    def render_all(objects: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, str]]:
        return {name: {key: render(shape) for key, shape in keys.items()} for name, keys in sorted(objects.items())}

    return {"documents": render_all(documents), "types": render_all(shapes.types)}


def check_printed(result: object, more: Mapping[str, object]) -> None:
    """Raise AssertionError unless a printed document is one of those of the golden file, and has its shape."""
    document = to_document(result) | {name.removesuffix("_"): to_json(value) for name, value in more.items()}
    keys = {name.removesuffix("_") for name in more}
    shapes, tried = Shapes(), dict[str, list[str]]()
    for d in DOCUMENTS:
        if keys == {*d.keys} and (isinstance(result, d.result) if d.result else isinstance(result, Mapping)):
            shape = shapes.build(d)
            tried[d.command] = find_faults(json.loads(json.dumps(document, default=str)), shape, shapes.types)
    if isinstance(result, Mapping) and result and not more:
        return  # a JSON Schema, or a record
    assert tried, f"a document of {type(result).__name__} with {sorted(keys)} is not in the golden file"
    assert [] in tried.values(), tried


def render(shape: Any) -> str:
    """Returns a shape as text: `Range[]`, `integer | null`, `{*: string}`."""
    if isinstance(shape, str):
        return shape
    if isinstance(shape, list):
        if shape[-1] != "...":
            return f"[{', '.join(map(render, shape))}]"
        return f"({part})[]" if " | " in (part := render(shape[0])) else f"{part}[]"
    if "any of" in shape:
        return " | ".join(map(render, shape["any of"]))
    return "{" + ", ".join(f"{key}: {render(s)}" for key, s in shape.items()) + "}"


def import_checked(of: type) -> dict[str, Any]:
    """Returns the names that the modules of a class import for type checkers only."""
    names = dict[str, Any]()
    for module in {inspect.getmodule(c) for c in of.__mro__ if c.__module__.startswith("sluice")}:
        for node in ast.parse(inspect.getsource(module)).body if module else ():
            if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
                exec(compile(ast.Module(node.body, []), "", "exec"), names)
    return names


def find_faults(value: Any, shape: Any, classes: Mapping[str, Any], at: str = "$") -> list[str]:
    """Returns where a document differs from its shape."""
    if isinstance(shape, dict) and "any of" in shape:
        tried = [find_faults(value, s, classes, at) for s in shape["any of"]]
        return min(tried, key=len)
    if isinstance(shape, str) and shape in classes:
        return find_faults(value, classes[shape], classes, at)
    if isinstance(shape, dict) and isinstance(value, dict):
        if "*" in shape:
            return [f for k, v in value.items() for f in find_faults(v, shape["*"], classes, f"{at}.{k}")]
        by_key = {key.removesuffix("?"): s for key, s in shape.items()}
        missing = [f"{at}.{key} is missing" for key in shape if not key.endswith("?") and key not in value]
        unknown = [f"{at}.{key} is not documented" for key in value if key not in by_key]
        inner = (f for k, v in value.items() if k in by_key for f in find_faults(v, by_key[k], classes, f"{at}.{k}"))
        return [*missing, *unknown, *inner]
    if isinstance(shape, list) and isinstance(value, Sequence) and not isinstance(value, str):
        parts = [shape[0]] * len(value) if shape[-1] == "..." else shape
        return [
            f
            for n, (v, s) in enumerate(zip(value, parts, strict=True))
            for f in find_faults(v, s, classes, f"{at}[{n}]")
        ]
    if not isinstance(shape, str):
        return [f"{at} is {value!r}, not {shape}"]
    kinds: dict[str, Any] = {"string": str, "integer": int, "number": (int, float), "boolean": bool, "null": type(None)}
    fits = shape == "any" or (isinstance(value, kinds[shape]) and isinstance(value, bool) <= (shape == "boolean"))
    return [] if fits else [f"{at} is {value!r}, not {shape}"]
