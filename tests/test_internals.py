"""Only a few modules use internals of other packages; each is listed here with the internals that it may use.

A release of Dagster, kafka-python or PySpark may change its internals at any time; the lists name the affected modules.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import dagster as dg
import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("pipelines", "resources", "assets", "cli", "bench", "src/sluice")

INTERNALS = (
    *("dagster._", "dagster_shared"),
    *("kafka.net", "kafka.protocol", "kafka.record", "kafka.future", "kafka.conn"),
    *("pyiceberg.table.update", "pyiceberg.io.pyarrow"),
)
"""The internal modules of other packages. `kafka`, `kafka.admin`, `kafka.errors` and `kafka.partitioner` are public."""

MAY_IMPORT = {
    # connections, and the bytes sent and received on them
    "resources/kafka/connection/connections.py": ("kafka.net", "kafka.future"),
    "resources/kafka/fetch/broker_sessions.py": ("kafka.future",),
    "resources/kafka/connection/zero_copy_transport.py": ("kafka.net",),
    "resources/kafka/connection/sasl.py": ("kafka.net.sasl",),
    # the class that kafka-python's documentation names for providers of tokens
    "resources/kafka/connection/oauth.py": ("kafka.net.sasl.oauth",),
    # requests and answers, one module for each conversation
    "resources/kafka/protocol/messages.py": ("kafka.protocol",),
    "resources/kafka/protocol/group_api.py": ("kafka.protocol",),
    "resources/kafka/protocol/admin_api.py": ("kafka.protocol",),
    # the snapshot of a code location, whose size is measured
    "bench/plain.py": ("dagster._core.remote_representation",),
    # the logs of simulated partitions, written as a producer would
    "src/sluice/testing/logs.py": ("kafka.record",),
    # commits that replace files
    "resources/tables/iceberg.py": ("pyiceberg.table.update", "pyiceberg.io.pyarrow"),
}

MAY_REACH_INTO = {
    # the windows of a timetable's day: Airflow has no public way to ask for them
    "src/sluice/airflow/hooks.py": {"_align_to_prev", "_get_next", "_get_prev", "_timezone"},
    "assets/instance/storage.py": {"_conn_string"},
    "resources/kafka/connection/connections.py": {"_brokers", "_conns", "_coordinator_brokers", "_io_thread"},
    "resources/kafka/connection/zero_copy_transport.py": {"_close"},
    # connections of urllib3, and the pools of botocore's clients
    "resources/web.py": {"_create_connection", "_endpoint", "_pool_classes_by_scheme", "_sock"},
    "resources/spark/executors.py": {"_jsc"},
    # PySpark 3.5 has no `toArrow`
    "resources/spark/parts.py": {"_collect_as_arrow"},
    "resources/spark/spark_errors.py": {"_jsc"},
    "resources/spark/engine.py": {
        "_active_spark_context",
        "_activeSession",
        "_gateway",
        "_instantiatedSession",
        "_jsc",
        "_jvm",
    },
    # reads how PySpark launched the JVM that it trains
    "resources/spark/train_jvm.py": {"_gateway", "_jvm"},
    "src/sluice/testing/logs.py": {"_buffer"},
    # called by numba's own compiler of C callbacks
    "pipelines/records/compiled/build.py": {"_final_module", "_getvalue"},
    # a peer of the benchmark: dlt has no setting for its folder
    "bench/peer_dlt.py": {"_global_dir"},
}
"""Private attributes of others, by module."""

PUBLIC = {"_asdict", "_replace", "_fields", "_exit", "_value_"}
"""Names with an underscore that the standard library documents."""

MODULES = sorted(
    path.relative_to(ROOT)
    for folder in FOLDERS
    for path in (ROOT / folder).rglob("*.py")
    if not any(parent.is_symlink() for parent in path.parents if parent != ROOT and ROOT in parent.parents)
)


def find_imports(tree: ast.AST) -> Iterator[str]:
    """Yield the modules that a module imports, also inside functions."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names if alias.name.startswith("_"))


def find_own_names(tree: ast.AST) -> set[str]:
    """Returns the private names that a module defines, in its classes or at module level."""
    names = {n.name for n in ast.walk(tree) if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))}
    names |= {n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    fields = (n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store))
    owned = {
        n.attr
        for n in ast.walk(tree)
        if isinstance(n, ast.Attribute) and isinstance(n.value, ast.Name) and n.value.id in ("self", "cls")
    }
    return names | (set(fields) & owned)


def find_foreign_names(tree: ast.AST) -> Iterator[str]:
    """Yield the private attributes of other modules' objects that a module uses."""
    mine = find_own_names(tree) | PUBLIC
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute) or not node.attr.startswith("_") or node.attr.startswith("__"):
            continue
        if node.attr not in mine and not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")):
            yield node.attr


def is_below(module: str, prefix: str) -> bool:
    return module.startswith(prefix) if prefix.endswith("_") else f"{module}.".startswith(f"{prefix}.")


@pytest.mark.parametrize("path", MODULES, ids=str)
def test_only_listed_modules_use_internals(path: Path) -> None:
    tree = ast.parse((ROOT / path).read_text())
    name = path.as_posix()
    used = {m for m in find_imports(tree) if any(is_below(m, i) for i in INTERNALS)}
    strange = {m for m in used if not any(is_below(m, i) for i in MAY_IMPORT.get(name, ()))}
    strange |= {f".{attribute}" for attribute in find_foreign_names(tree)} - {
        f".{a}" for a in MAY_REACH_INTO.get(name, ())
    }
    assert not strange, (
        f"{name} uses internals of another package: {', '.join(sorted(strange))}. Look for a public way, or put it"
        " into a module that is named in tests/test_internals.py"
    )


def test_listed_modules_still_use_internals() -> None:
    for name, prefixes in MAY_IMPORT.items():
        imports = set(find_imports(ast.parse((ROOT / name).read_text())))
        unused = [p for p in prefixes if not any(is_below(m, p) for m in imports)]
        assert not unused, f"{name} uses {', '.join(unused)} no more: take it out of MAY_IMPORT"
    for name, attributes in MAY_REACH_INTO.items():
        unused = sorted(attributes - set(find_foreign_names(ast.parse((ROOT / name).read_text()))))
        assert not unused, f"{name} uses {', '.join(unused)} no more: take it out of MAY_REACH_INTO"


NAMES_OF_DAGSTER = {
    # imported: `internals.PRIVATE`
    *("DefinitionsLoadContext", "InMemoryJob", "execute_run_iterator", "ScriptDirectory"),
    # methods and attributes of its storages
    *("_conn_string", "_event_to_row", "_has_asset_key_col_on_connection", "_store_asset_event"),
    *("_store_runless_asset_check_evaluation", "_update_asset_check_evaluation"),
    # classes of stored values, built by their names
    *("AssetCheckEvaluationTargetMaterializationData", "AssetMaterializationPlannedData", "EventLogRecord"),
    *("ExternalPipelineOrigin", "ExternalRepositoryOrigin", "LoadableTargetOrigin"),
    "ManagedGrpcPythonEnvRepositoryLocationOrigin",
    # replaced in its modules and objects
    *("serialize_value", "capture_logs"),
}
"""All private names of Dagster that Sluice uses, however it does. This list only becomes shorter."""


def find_names_of_dagster(tree: ast.Module) -> Iterator[str]:
    """Yield the private names of Dagster in a module: attributes of its objects, also in strings, classes of stored
    values, and names that are replaced in its modules and objects."""
    from dagster._core.storage.event_log import SqliteEventLogStorage
    from dagster._core.storage.runs import SqliteRunStorage

    attributes = {n for kind in (SqliteEventLogStorage, SqliteRunStorage, dg.DagsterInstance) for n in dir(kind)}
    mine, nodes = find_own_names(tree), [*ast.walk(tree)]
    texts = {n.value for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str)}
    yield from (t for t in texts - mine if t.startswith("_") and not t.startswith("__") and t in attributes)
    yield from (name for text in texts for name in re.findall(r'"__class__": "(\w+)"', text))
    yield from find_foreign_names(tree)
    for node in nodes:
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "build_stored":
            yield from (str(a.value) for a in node.args if isinstance(a, ast.Constant))
        elif isinstance(node, ast.Dict):
            pairs = zip(node.keys, node.values, strict=True)
            kinds = (v for k, v in pairs if isinstance(k, ast.Constant) and k.value == "__class__")
            yield from (str(v.value) for v in kinds if isinstance(v, ast.Constant))
        elif isinstance(node, ast.Assign):
            foreign = (t for t in node.targets if isinstance(t, ast.Attribute) and t.attr not in mine)
            yield from (t.attr for t in foreign if ast.unparse(t.value) != "sys")


def test_private_names_of_dagster_are_listed() -> None:
    """Also those in strings, those that are replaced, and those by which stored values are built."""
    from sluice.assets.instance import internals

    folder = ROOT / "assets"
    elsewhere = {n for p in folder.rglob("*.py") for n in find_foreign_names(ast.parse(p.read_text()))}
    inside = {n for p in (folder / "instance").glob("*.py") for n in find_names_of_dagster(ast.parse(p.read_text()))}
    assert elsewhere | inside | {*internals.PRIVATE} == NAMES_OF_DAGSTER
    page = (ROOT / "docs/developers/design/dagster-home.md").read_text()
    assert f"{len(NAMES_OF_DAGSTER)} private names of Dagster" in page


def test_private_names_of_dagster_exist_and_do_not_increase() -> None:
    """A name that a new Dagster lacks costs a picture in its UI: find its successor, or take it out."""
    from dagster._core.definitions.repository_definition import SINGLETON_REPOSITORY_NAME
    from dagster._core.definitions.source_asset import SYSTEM_METADATA_KEY_SOURCE_ASSET_OBSERVATION

    from sluice.assets.instance import internals

    assert [n for n in internals.PRIVATE if internals.find_private(n) is None] == []
    assert internals._OBSERVATION == SYSTEM_METADATA_KEY_SOURCE_ASSET_OBSERVATION
    assert internals._REPOSITORY == SINGLETON_REPOSITORY_NAME
