"""The content of packs, and the Spark settings by which executors find one."""

from __future__ import annotations

import json
import os
import pickle
import re
import subprocess
import sys
import tarfile
from pathlib import Path, PurePosixPath
from types import SimpleNamespace

import pytest

from sluice.cli.main import main
from sluice.pipelines.errors import SetupError
from sluice.pipelines.feed.sections import SparkSettings
from sluice.resources.lake import open_store
from sluice.resources.spark import executors, pack_archive
from tests.clouds import CLOUDS, CloudStore


@pytest.mark.cluster
def test_pack_runs_with_a_bare_python(tmp_path: Path) -> None:
    pack = pack_archive.pack()
    with tarfile.open(pack.path) as archive:
        names = archive.getnames()
        archive.extractall(tmp_path, filter="data")
    assert not [
        n for n in names if n.startswith(("sluice/cli", "sluice/assets", "sluice/testing", "pyspark", "dagster"))
    ]
    assert not [n for n in names if n.endswith("-0.1.0.dist-info/RECORD") or "/tests/" in n]
    ask = "import sluice.pipelines.records.compiled.library as loops; print(loops.find_library() is not None)"
    bare = {"PYTHONPATH": str(tmp_path), "HOME": str(tmp_path), "PATH": os.environ["PATH"]}
    answer = subprocess.run([sys.executable, "-S", "-c", ask], env=bare, capture_output=True, text=True, check=True)
    assert answer.stdout == "True\n", "the pack has the compiled loops"


def test_remains_of_a_killed_packing_process_are_removed(tmp_path: Path) -> None:
    (tmp_path / "making-abc" / "stage").mkdir(parents=True)
    for number in range(5):
        pack = tmp_path / f"sluice-pack-{number}.tar.gz"
        pack.touch()
        os.utime(pack, (number, number))
    pack_archive._forget(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == [f"sluice-pack-{number}.tar.gz" for number in (2, 3, 4)]


def test_recent_packs_are_kept_for_running_applications(tmp_path: Path) -> None:
    for number in range(5):
        (tmp_path / f"sluice-pack-{number}.tar.gz").touch()
    pack_archive._forget(tmp_path)
    assert len(list(tmp_path.iterdir())) == 5


def test_pack_is_kept_while_a_process_uses_the_pack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pack_archive, "_own_packs", {})
    packs = [tmp_path / f"sluice-pack-{number}.tar.gz" for number in range(5)]
    for number, pack in enumerate(packs):
        pack.touch()
        os.utime(pack, (number, number))
    pack_archive._mark_in_use(packs[0])
    pack_archive._forget(tmp_path)
    assert [pack.exists() for pack in packs] == [True, False, True, True, True]
    pack_archive._own_packs[packs[0]].close()  # as at the end of the process
    pack_archive._forget(tmp_path)
    assert not packs[0].exists()


_ASK = """
import pickle, sys
lake = pickle.load(open(sys.argv[1], "rb"))
assert lake.put_if_absent("entry", b"ours") and not lake.put_if_absent("entry", b"theirs")
with lake.create("staged") as file:
    file.write(b"rows")
lake.show("staged", "data/part")
print(lake.open("data/part").read(), obstore.__file__.startswith(sys.argv[2]))
"""


@pytest.mark.parametrize("kind", CLOUDS)
def test_pack_writes_to_a_lake_in_a_store(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    store: CloudStore = request.getfixturevalue(f"{kind}_store")
    with tarfile.open(pack_archive.pack().path) as archive:
        archive.extractall(tmp_path, filter="data")
    (tmp_path / "lake").write_bytes(pickle.dumps(open_store(store.make_address(), store.settings)))
    bare = {"PYTHONPATH": str(tmp_path), "HOME": str(tmp_path), "PATH": os.environ["PATH"]}
    command = [sys.executable, "-S", "-c", f"import obstore\n{_ASK}", str(tmp_path / "lake"), str(tmp_path)]
    answer = subprocess.run(command, env=bare, capture_output=True, text=True, check=True)
    assert answer.stdout == "b'rows' True\n"


@pytest.mark.parametrize(
    ("names", "packed"),
    [
        (("libarrow_python.so",), "libarrow_python.so"),
        (("libarrow_python.so", "libarrow_python.so.2600", "libarrow_python.so.2600.1.0"), "libarrow_python.so.2600"),
    ],
)
def test_a_pack_has_one_libarrow_python(names: tuple[str, ...], packed: str, tmp_path: Path) -> None:
    """The library has the name that others load; in pyarrow 18 it has no number."""
    (tmp_path / "pyarrow").mkdir()
    files = [PurePosixPath("pyarrow", name) for name in names]
    for file in files:
        (tmp_path / file).touch()
    pyarrow = SimpleNamespace(files=files, locate_file=lambda name: tmp_path / name)
    assert [file.path for file in pack_archive._theirs(pyarrow)] == [f"pyarrow/{packed}"]


def test_protoc_runs_with_packages_on_pythonpath_only(tmp_path: Path) -> None:
    """As on an executor with only a pack: tasks compile new Protobuf schemas there."""
    assert {"protobuf", "grpcio-tools"} <= {*pack_archive._distributions()}
    theirs = (pack_archive._theirs(d) for d in pack_archive._distributions().values())
    for file in (*pack_archive._ours(), *(file for files in theirs for file in files)):
        (tmp_path / file.path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file.path).symlink_to(file.source)
    ask = (
        "from sluice.pipelines.records.protobuf.compiling import compile_schema\n"
        """text = 'syntax="proto3"; import "google/protobuf/timestamp.proto"; message A { string a = 1; }'\n"""
        "print([f.name for f in compile_schema([text], []).file])"
    )
    bare = {"PYTHONPATH": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1", "HOME": str(tmp_path)}
    outside = Path(
        sys.base_prefix, "bin", pack_archive.python()
    )  # not that of this environment, which has the packages
    process = subprocess.run([outside, "-S", "-c", ask], env=bare, capture_output=True, text=True, check=False)
    assert "schema.proto" in process.stdout, process.stderr


@pytest.mark.cluster
def test_pack_is_created_once(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pack_archive.pack()
    assert main(["pack", "--json", "--output", str(tmp_path / "p.tar.gz")]) == 0
    document = json.loads(capfd.readouterr().out)
    assert (document["created"], document["path"]) == (False, str(tmp_path / "p.tar.gz"))
    assert document["bytes"] == (tmp_path / "p.tar.gz").stat().st_size
    assert "kafka-python 3.0.12" in document["distributions"]


@pytest.mark.cluster
def test_a_missing_archive_is_made_by_the_printed_command(tmp_path: Path) -> None:
    settings = SparkSettings(master="yarn", environment=str(tmp_path / "p.tar.gz"))
    with pytest.raises(SetupError) as missing:
        executors.conf(settings, {})
    (command,) = re.findall(r"sluice (pack [^;]+)", missing.value.remedy)
    assert main(command.split()) == 0
    assert executors.conf(settings, {})["spark.archives"] == f"{settings.environment}#sluice-env"
    assert import_packed(tmp_path / "p.tar.gz", "sluice.pipelines.landing.task") == "sluice.pipelines.landing.task\n"


@pytest.mark.cluster
def test_an_archive_with_a_module_is_made_by_the_printed_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "alone.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    archive = tmp_path / "own.tar.gz"
    with pytest.raises(ValueError, match="has modules") as refused:
        SparkSettings(master="yarn", environment=str(archive), modules=("alone",))
    (command,) = re.findall(r"sluice (pack --with MODULE --output FILE)", str(refused.value))
    assert main(command.replace("MODULE", "alone").replace("FILE", str(archive)).split()) == 0
    assert executors.archive(SparkSettings(master="yarn", environment=str(archive))) == str(archive)
    assert import_packed(archive, "alone") == "alone\n"


def import_packed(archive: Path, module: str) -> str:
    """Returns the name of a module that a Python without other packages imports from the archive."""
    folder = archive.with_suffix(".folder")
    with tarfile.open(archive) as opened:
        opened.extractall(folder, filter="data")
    bare = {"PYTHONPATH": str(folder), "HOME": str(folder), "PATH": os.environ["PATH"]}
    ask = f"import importlib; print(importlib.import_module({module!r}).__name__)"
    return subprocess.run(
        [sys.executable, "-S", "-c", ask], env=bare, capture_output=True, text=True, check=True
    ).stdout


def test_pack_digest_depends_on_releases_and_files(tmp_path: Path) -> None:
    distributions, ours = pack_archive._distributions(), pack_archive._ours()
    (tmp_path / "changed.py").write_text("x = 1")
    digests = {
        pack_archive._digest(distributions, ours),
        pack_archive._digest({k: v for k, v in distributions.items() if k != "six"}, ours),
        pack_archive._digest(
            distributions, [*ours, pack_archive._PackedFile("sluice/changed.py", tmp_path / "changed.py")]
        ),
    }
    assert len(digests) == 3


def test_pack_file_name_must_end_in_tar_gz(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pack", "--output", "pack.zip"]) == 2
    assert "ends in .tar.gz" in capsys.readouterr().err


def test_archives_and_paths_of_the_feed_are_kept() -> None:
    settings = SparkSettings(master="yarn", environment="hdfs:///sluice/pack.tar.gz")
    conf = {"spark.archives": "/my.zip#mine", "spark.executorEnv.PYTHONPATH": "./mine"}
    assert executors.conf(settings, conf) == {
        "spark.archives": "/my.zip#mine,hdfs:///sluice/pack.tar.gz#sluice-env",
        "spark.executorEnv.PYTHONPATH": "./sluice-env:./mine",
    }


def test_nothing_is_sent_when_sluice_is_installed_on_hosts() -> None:
    assert executors.conf(SparkSettings(master="yarn", environment="installed"), {}) == {}


def test_missing_archive_is_reported(tmp_path: Path) -> None:
    settings = SparkSettings(master="yarn", environment=str(tmp_path / "p.tar.gz"))
    with pytest.raises(SetupError) as e:
        executors.conf(settings, {})
    assert e.value.remedy.startswith(f"make it: sluice pack --output {tmp_path}")


def test_executors_run_the_configured_python() -> None:
    assert executors.python(SparkSettings(python="/opt/python/bin/python3")) == "/opt/python/bin/python3"
    assert pack_archive.python() == f"python3.{sys.version_info[1]}"


def test_user_module_is_packed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Covers a folder on the path, an installed distribution with its requirements, and a missing module."""
    (tmp_path / "company" / "__pycache__").mkdir(parents=True)
    for name in ("__init__.py", "tokens.py", "scopes.json", "__pycache__/tokens.pyc"):
        (tmp_path / "company" / name).write_text("")
    (tmp_path / "alone.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    module = pack_archive._Module.of("company")
    assert sorted(f.path for f in module.files) == ["company/__init__.py", "company/scopes.json", "company/tokens.py"]
    assert [f.path for f in pack_archive._Module.of("alone").files] == ["alone.py"]
    installed = pack_archive._Module.of("typer")
    assert (installed.roots, installed.files) == (("typer",), ())
    assert "rich" in pack_archive._distributions((*pack_archive._ROOTS, *installed.roots))
    with pytest.raises(SetupError, match="no module nowhere"):
        pack_archive.pack(modules=["nowhere.tokens"])


def test_modules_need_a_packed_environment() -> None:
    with pytest.raises(ValueError, match="leave `environment` out"):
        SparkSettings(environment="installed", modules=("company.tokens",))
