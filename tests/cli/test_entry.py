"""Start and end of the command: interrupts at any moment, and output without a reader."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest
from kafka import KafkaProducer

from sluice.pipelines.model.receipts import ENGINE
from sluice.resources.local.local_kafka import LocalKafka
from sluice.resources.spark import jvm
from tests.cli.conftest import FEED

INTERRUPTED = """
import signal, sys

waited = [sys.argv.pop()]

def hook(event, given):
    if event == "import" and given[0] in waited:
        waited.clear()
        signal.raise_signal(signal.SIGINT)

from sluice.cli.entry import main
sys.addaudithook(hook)
sys.exit(main())
"""


def run(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", script, *arguments], capture_output=True, text=True, check=False)


def _expect_interruption(*arguments: str) -> None:
    """Interrupt the command when it first imports the module that the last argument names."""
    done = run(INTERRUPTED, *arguments)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")


EARLY = ["sluice.cli.main", "typer", "rich.console", "sluice.cli.daily.run_view", "sluice.cli.app.completers"]
LATER = ["sluice.assets.execution", "dagster", "sqlalchemy", "kafka.admin"]


@pytest.mark.parametrize("module", [*EARLY, *LATER])
def test_interrupt_during_an_import_exits_with_130_and_one_line(module: str, project: Path) -> None:
    _expect_interruption("run", "orders", module)


@pytest.mark.kafka
@pytest.mark.spark
@pytest.mark.slow
@pytest.mark.usefixtures("default_engine")
@pytest.mark.parametrize("module", ["dagster._core.execution.api", "py4j.java_gateway"])
def test_interrupt_while_dagster_and_spark_start_exits_with_130(
    module: str, project: Path, kafka: LocalKafka, fresh_topic: Callable[..., str]
) -> None:
    topic = fresh_topic()
    feed = FEED.replace("127.0.0.1:9\n", f"{kafka.bootstrap}\n").replace("topics: orders", f"topics: {topic}")
    (project / "feeds" / "orders.yaml").write_text(feed)
    with closing(KafkaProducer(bootstrap_servers=kafka.bootstrap)) as producer:
        producer.send(topic, b"one").get(30)
    _expect_interruption("run", "orders", module)


def test_refused_run_leaves_no_jvm(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It starts Spark before it reads the feed, and ends while the JVM starts."""
    assert jvm.prepare()
    monkeypatch.delenv(ENGINE, raising=False)
    (project / "feeds" / "orders.yaml").write_text(FEED.replace("start: earliest", "start: never"))
    done = run("import sys; from sluice.cli.entry import main; sys.exit(main())", "run", "orders")
    assert done.returncode == 2, done.stderr
    assert not any("pyspark-shell" in command for command in list_commands(project))


def list_commands(folder: Path) -> Iterator[str]:
    """The command lines of processes in the folder."""
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if path.joinpath("cwd").readlink() == folder:
                yield path.joinpath("cmdline").read_text()


SWALLOWED = """
import signal, threading, weakref
from sluice.cli.terminal import process

class Thing: pass

process.handle_signals()
thing = Thing()
watch = weakref.ref(thing, lambda _: signal.raise_signal(signal.SIGINT))
try:
    del thing
    threading.Event().wait()
except KeyboardInterrupt:
    print("raised after all")
"""


def test_interrupt_swallowed_by_a_callback_is_raised_again() -> None:
    done = run(SWALLOWED)
    assert (done.stdout, done.stderr) == ("raised after all\n", "")


MADE_ERROR = """
import signal, sys, typer
from sluice.cli import entry, main

app = typer.Typer()

@app.command()
def load() -> None:
    try:
        signal.raise_signal(signal.SIGINT)
    except KeyboardInterrupt:
        raise ImportError("cannot load module more than once") from None

main.build_app = lambda *names: app
sys.exit(entry.main())
"""


@pytest.mark.parametrize("becomes", ["ImportError", "SystemError", "BaseException"])
def test_interrupt_converted_to_an_error_still_exits_with_130(becomes: str) -> None:
    done = run(MADE_ERROR.replace("ImportError", becomes))
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")


AT_EXIT = """
import atexit, signal, sys
from sluice.cli import entry, main

main.main = lambda: atexit.register(signal.raise_signal, signal.SIGINT) and 0
sys.exit(entry.main())
"""


def test_interrupt_at_exit_prints_nothing() -> None:
    done = run(AT_EXIT)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_background_process_keeps_sigint_ignored() -> None:
    script = (
        "import signal; signal.signal(2, signal.SIG_IGN); "
        "from sluice.cli.terminal import process; process.handle_signals(); "
    )
    assert run(script + "signal.raise_signal(2); print('goes on')").stdout == "goes on\n"


WAITING = "import sys; from sluice.cli.entry import main; sys.stdin.readline(); sys.exit(main())"


@pytest.mark.parametrize(
    "arguments", [["feeds", "list"], ["feeds", "list", "--json"], ["--help"], ["status", "--json"]]
)
@pytest.mark.parametrize("merged", [False, True], ids=["stdout", "stderr too"])
def test_closed_pipe_ends_the_command_quietly(arguments: list[str], merged: bool, project: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", WAITING, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT if merged else subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stdout is not None
        process.stdout.close()
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
        assert process.stderr is None or process.stderr.read() == ""
    assert process.returncode == 1


@pytest.mark.parametrize("arguments", ["feeds list", "feeds list --json", "--help"])
def test_closed_output_is_not_an_error(arguments: str, project: Path) -> None:
    script = "from sluice.cli.entry import main; raise SystemExit(main())"
    done = subprocess.run(
        f"'{sys.executable}' -c '{script}' {arguments} >&-", shell=True, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


FREEZES = """
import gc
from sluice.cli.terminal.process import fast_imports

before = gc.get_freeze_count()
with fast_imports():
    import json.tool
exempt = gc.get_freeze_count()
with fast_imports():
    import json.tool
    garbage = [[] for _ in range(1000)]
print(exempt > before, gc.get_freeze_count() - exempt, gc.isenabled())
"""


def test_only_imports_that_load_modules_freeze_gc_objects() -> None:
    """`sluice metrics --serve` imports at each scrape; each time 100 kB of garbage were kept."""
    done = run(FREEZES)
    assert (done.stdout, done.stderr) == ("True 0 True\n", "")


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_symbols_are_escaped_if_output_encoding_lacks_them(encoding: str, project: Path) -> None:
    """A symbol that the terminal cannot encode made a run that had committed exit with 1."""
    command = [str(Path(sys.executable).with_name("sluice")), "feeds", "check"]
    environment = {**os.environ, "PYTHONIOENCODING": encoding, "PYTHONUTF8": "0"}
    done = subprocess.run(command, cwd=project, env=environment, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    assert rb"\u2713" in done.stdout


LIMITED = """
import resource, sys
from sluice.cli.entry import main

resource.setrlimit(resource.RLIMIT_AS, (int(sys.argv.pop()) << 20,) * 2)
sys.exit(main())
"""


@pytest.mark.parametrize("mebibytes", [300, 500, 1000])
def test_doctor_refuses_a_small_address_space(mebibytes: int, project: Path) -> None:
    """With so little, some libraries abort, and others wait for a thread that cannot begin."""
    done = run(LIMITED, "doctor", str(mebibytes))
    text = f"this process may use {mebibytes / 1024:.1f} GiB of addresses (ulimit -v), and needs 1 GiB to begin"
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"error: {text}\n")
    assert "ulimit -v unlimited" in done.stderr


def test_doctor_names_an_address_space_in_which_java_may_not_start(project: Path) -> None:
    done = run(LIMITED, "doctor", "--json", "2048")
    (machine, *_) = json.loads(done.stdout)["groups"]
    assert machine["checks"][0] == {
        "title": "addresses",
        "health": "warning",
        "found": "this process may use 2.0 GiB of addresses (ulimit -v); Java and Spark may not start",
        "remedy": "ulimit -v unlimited",
    }
