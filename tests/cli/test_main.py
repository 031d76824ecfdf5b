"""Exit codes, errors and start of the `sluice` command."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from sluice import __version__
from sluice.cli import main as main_module
from sluice.pipelines.errors import GroupHeld, KafkaUnavailable, WindowHeld, choose_exit_code
from sluice.pipelines.feed.load import load_feed
from sluice.pipelines.ledger import Ledger
from sluice.pipelines.ledger.entries import SchemaEntry
from sluice.resources.lake.local_lake import LocalLake
from sluice.resources.project import Project
from tests.cli.conftest import FEED, Sluice

COMMANDS = [
    *(["plan"], ["run"], ["status"], ["audit"], ["explain"], ["peek"], ["produce"], ["ui"], ["demo"]),
    *(["feeds", name] for name in ("list", "check")),
    *(["kafka", name] for name in ("start", "stop", "status")),
]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_command_has_help_with_an_example_and_the_common_options(command: list[str], sluice: Sluice) -> None:
    result = sluice(*command, "--help")
    assert result.code == 0
    assert f"$ sluice {' '.join(command)}" in result.out
    for option in ("--json", "--debug", "--project"):
        assert option in result.out


@pytest.mark.parametrize("group", ["contract", "feeds", "groups", "kafka", "offsets", "quarantine", "schema", "table"])
def test_help_of_each_command_group_has_examples(group: str, sluice: Sluice) -> None:
    shown_help = sluice(group, "--help")
    assert (shown_help.code, f"  $ sluice {group} " in shown_help.out) == (0, True)


@pytest.mark.parametrize(
    ("command", "arguments"),
    [("plan", "FEED"), ("run", "[FEED...]"), ("groups watch", "[GROUP]"), ("completion", "bash|zsh|fish")],
)
def test_usage_names_arguments_as_typed(command: str, arguments: str, sluice: Sluice) -> None:
    output = sluice(*command.split(), "--help").out
    assert output.startswith(f"Usage: sluice {command} [OPTIONS] {arguments}\n")


def test_grouped_options_are_fields_of_their_dataclass() -> None:
    from sluice.cli.app.invocation import build_arguments
    from sluice.cli.inspect.plan import plan

    options = build_arguments(plan, {"window": ["2026-11-20T14"], "replace": True})["options"]
    assert (options.windows.window, options.windows.start, options.replace) == (["2026-11-20T14"], None, True)
    with pytest.raises(TypeError, match="no option other"):
        build_arguments(plan, {"other": 1})


EACH = [["compact"], ["quarantine", "list"], ["audit"]]


@pytest.mark.parametrize("command", EACH, ids=" ".join)
def test_command_is_carried_out_for_each_feed(command: list[str], sluice: Sluice, project: Path) -> None:
    (project / "feeds" / "payments.yaml").write_text(FEED.replace("topics: orders", "topics: payments"))
    (project / "feeds" / "broken.yaml").write_text("topics: []")
    every = ["*s"] if command == ["audit"] else ["--all"]
    answer = sluice(*command, *every, "--json")
    assert [json.loads(line)["feed"] for line in answer.out.splitlines()] == ["orders", "payments"]
    broken = "broken.yaml" in answer.err
    assert (answer.code == 0, broken) == ((True, False) if command == ["audit"] else (False, True))
    nothing = sluice(*command)
    assert (nothing.code, "no feed" in nothing.err) == (2, True)
    one = sluice(*command, "payments", "--json")
    assert (one.code, one.document["feed"]) == (0, "payments")


@pytest.mark.parametrize("command", [["run", "orders"], ["check", "orders"], ["wait", "orders", "--timeout", "0s"]])
def test_open_window_has_a_separate_exit_code(command: list[str], sluice: Sluice, project: Path) -> None:
    """Exit code 75 is neither wrong usage nor a refusal: schedulers retry. No request goes to Kafka."""
    window = ["2099-11-20T14"] if command[0] == "check" else ["--window", "2099-11-20T14"]
    answer = sluice(*command, *window, "--json")
    assert (answer.code, answer.document["exit_code"]) == (75, 75)
    assert "75 not yet" in sluice("--help").out.replace("\n", " ")


def test_worst_exit_code_wins_and_not_yet_has_lowest_priority() -> None:
    waiting, failed, refused = WindowHeld("held"), KafkaUnavailable("away"), GroupHeld("busy")
    assert [choose_exit_code(e) for e in ((), [waiting], [waiting, failed], [refused, waiting, failed])] == [
        0,
        75,
        1,
        3,
    ]


def test_missing_command_shows_help_and_is_a_usage_error(sluice: Sluice) -> None:
    for arguments in ((), ("kafka",)):
        result = sluice(*arguments)
        assert result.code == 2
        assert result.out.startswith("Usage: sluice")
        assert result.err == ""


@pytest.mark.parametrize(
    "arguments",
    [["nothing"], ["plan"], ["plan", "orders", "--nope"], ["peek", "orders:0:0", "-n", "x"], ["plan", "a", "b"]],
)
def test_wrong_usage_is_reported_as_one_error_without_traceback(
    arguments: list[str], sluice: Sluice, project: Path
) -> None:
    result = sluice(*arguments)
    assert (result.code, result.out) == (2, "")
    assert result.err.startswith("error: ")
    assert "--help" in result.err
    assert "Traceback" not in result.err


@pytest.mark.parametrize(
    ("typed", "advice"),
    [
        ("run orders --dry-run", "preview it with: sluice plan FEED"),
        ("plan orders --dry-run", "sluice plan changes nothing"),
        ("table sync orders --dry-run", "sluice table status FEED"),
        ("run --feed orders", "write sluice run [FEED...], without --feed"),
        ("check orders --window 2026-11-20T14", "write sluice check FEED [WINDOW], without --window"),
        ("files orders 2026-11-20T14", "a window is an option: --window 2026-11-20T14"),
        ("run orders 2026-11-20T14", "write it as --window 2026-11-20T14"),
        ("explain orders:0:1", "write sluice explain FEED T:P:OFFSET"),
        ("completion", "write sluice completion bash|zsh|fish"),
        ("--json status", "write it behind a command: sluice COMMAND --json"),
        ("kafka --json start", "write it behind a command: sluice kafka COMMAND --json"),
        ("run feeds/orders.yaml", "did you mean `orders`?"),
        ("docs nosuch", "list all pages: sluice docs"),
        ("acls orders --principal ingest", "write --principal User:ingest"),
        ("offsets before orders yesterday", "write it with its zone, such as 2026-11-20T14:00:00Z"),
    ],
)
def test_usage_error_suggests_the_correct_command(typed: str, advice: str, sluice: Sluice, project: Path) -> None:
    answer = sluice(*typed.split())
    assert answer.code == 2
    assert advice in answer.err.partition("→")[2]
    assert "windows-per-run" not in answer.err
    assert "\\t" not in answer.err


def test_error_with_json_option_is_one_json_document(sluice: Sluice, project: Path) -> None:
    result = sluice("plan", "orders", "--json", "--nope")
    assert result.code == 2
    assert result.document["error"] == "UsageError"
    assert set(result.document) >= {"error", "message", "remedy"}


def test_error_outside_a_project_names_sluice_init(
    sluice: Sluice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SLUICE_PROJECT", raising=False)
    monkeypatch.chdir(tmp_path)
    result = sluice("status", "--json")
    assert result.code == 2
    assert "feeds/" in result.document["message"]
    assert "sluice init begins a project" in result.document["remedy"]


@pytest.mark.parametrize("file", ["fleet.yaml", "notify.yaml"])
def test_docs_page_named_by_an_error_describes_the_file(file: str, sluice: Sluice, project: Path) -> None:
    (project / file).write_text("unknown: 1\nalso_unknown: 2\n")
    error = sluice("feeds", "check").err
    assert f"{file}:1:1: unknown: is unknown" in error
    page = error.partition("sluice docs ")[2].split()[0]
    assert file in sluice("docs", page).out


@pytest.mark.parametrize("home", ["~/dagster", "dagster"])
def test_dagster_home_is_expanded_to_an_absolute_path(
    home: str, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(project))
    monkeypatch.setenv("DAGSTER_HOME", home)
    assert Project(project).dagster_home == project / "dagster"


def test_unknown_feed_error_lists_the_feeds(sluice: Sluice, project: Path) -> None:
    result = sluice("plan", "order")
    assert result.code == 2
    assert "orders" in result.err


def test_invalid_feed_file_is_reported_and_does_not_stop_other_feeds(sluice: Sluice, project: Path) -> None:
    (project / "feeds" / "bad.yaml").write_text(FEED.replace("earliest", "sometime") + "kafca: 1\n")
    broken = sluice("plan", "bad")
    assert broken.code == 2
    for word in ("bad.yaml", "start", "kafca", "→"):
        assert word in broken.err
    assert sluice("plan", "orders").code == 1  # its Kafka does not answer: it got that far
    check = sluice("feeds", "check", "--json")
    assert check.code == 2
    assert "bad.yaml" in check.document["message"]
    listed = sluice("feeds", "list", "--json")
    assert listed.code == 2
    assert [f["feed"] for f in listed.document["feeds"]] == ["orders"]
    assert [Path(b["file"]).name for b in listed.document["broken"]] == ["bad.yaml"]
    status = sluice("status", "--json")
    assert status.code == 2
    assert "bad.yaml" in status.document["broken"][0]["message"]
    for command in (("feeds", "list"), ("status",)):
        assert "→ fix them; sluice docs feeds lists every key" in sluice(*command).out


def test_feeds_check_warns_about_columns_named_like_folder_keys(sluice: Sluice, project: Path) -> None:
    path = project / "feeds" / "orders.yaml"
    path.write_text(FEED + "format: json\nschema: {id: int64, Date: date, minute: int32}\n")
    assert "folders" not in sluice("feeds", "check").out
    feed = load_feed(path, {})
    columns = feed.columns.texts() if feed.columns else None
    ledger = Ledger(LocalLake(Path(feed.lake)), "orders", lambda: 0)
    ledger.append(lambda s: SchemaEntry(shape=feed.shape.name, columns=columns))
    result = sluice("feeds", "check")
    assert result.code == 0
    assert "orders: 1 column named like a key of this feed's folders (Date)" in " ".join(result.out.split())


@pytest.mark.parametrize("command", [["plan", "orders"], ["produce", "orders", "--bootstrap", "127.0.0.1:9"]])
def test_an_unreachable_broker_is_named(command: list[str], sluice: Sluice, project: Path) -> None:
    result = sluice(*command, "--json")
    assert result.code == 1
    assert result.document["error"] == "KafkaUnavailable"
    assert "127.0.0.1:9" in result.document["message"]
    assert "sluice kafka start" in result.document["remedy"]


def test_sample_events_go_only_to_local_or_named_kafka(sluice: Sluice, project: Path) -> None:
    refused = sluice("produce", "orders", "-n", "500", "--json")
    assert (refused.code, refused.document["error"]) == (3, "NotLocal")
    assert "127.0.0.1:9" in refused.document["message"]
    command = "sluice produce orders --records 500 --bootstrap 127.0.0.1:9;"
    assert f"500 sample events there anyway: {command}" in refused.document["remedy"]
    other = sluice("produce", "orders", "--bootstrap", "127.0.0.1:10", "--json")
    assert (other.code, other.document["error"]) == (2, "UsageError")


def test_status_reports_feed_problem_when_kafka_does_not_answer(sluice: Sluice, project: Path) -> None:
    result = sluice("status", "--json")
    assert result.code == 1
    (feed,) = result.document["feeds"]
    assert feed["error"]["error"] == "KafkaUnavailable"
    assert (feed["feed"], feed["lag"], feed["partitions"]) == ("orders", None, [])


def test_audit_and_explain_need_no_kafka(sluice: Sluice, project: Path) -> None:
    audit = sluice("audit", "orders", "--json")
    assert (audit.code, audit.document["reconciled"], audit.document["partitions"]) == (0, True, [])
    explained = sluice("explain", "orders", "orders:0:5", "--json")
    assert (explained.code, explained.document["class"]) == (0, "no partition of this feed")


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["run", "orders", "--offsets", "orders:0:1-2", "--only", "orders:0"], "--only"),
        (["run", "orders", "--offsets", "orders:0"], "START-END"),
        (["plan", "orders", "--only", "orders"], "TOPIC:PARTITION"),
        (["explain", "orders", "orders:0"], "OFFSET"),
        (["produce", "orders", "--bad-share", "200%"], "share"),
        (["produce", "orders", "--aborted", "1%"], "--transactional"),
        (["produce", "orders", "--spread", "long"], "30s"),
        (["peek", "orders:0"], "OFFSET"),
    ],
)
def test_invalid_argument_error_names_the_expected_form(
    arguments: list[str], word: str, sluice: Sluice, project: Path
) -> None:
    result = sluice(*arguments)
    assert result.code == 2
    assert word in result.err


def test_peek_lists_invalid_feeds_if_no_feed_reads_the_topic(sluice: Sluice, project: Path) -> None:
    (project / "feeds" / "payments.yaml").write_text(FEED.replace("orders", "payments") + "windows: {length: 1h}\n")
    result = sluice("peek", "payments:0:0")
    assert result.code == 2
    assert "these feed files are invalid: payments.yaml" in result.err
    assert "sluice feeds check" in result.err
    assert "windows" in sluice("feeds", "check").err
    assert "payments.yaml" in sluice("peek", "payments:0:0", "--feed", "payments").err
    assert "KafkaUnavailable" in sluice("peek", "orders:0:0", "--json").out


def test_peek_finds_the_feed_one_of_whose_patterns_matches(sluice: Sluice, project: Path) -> None:
    other = FEED.replace("127.0.0.1:9", "127.0.0.1:10").replace("orders", "{include: ['pay.*', 'refund.*']}")
    (project / "feeds" / "another.yaml").write_text(other.replace("start", "group: other\nstart"))
    assert "127.0.0.1:10:" in sluice("peek", "payments:0:0").err


def test_peek_requires_feed_option_if_feeds_use_two_clusters(sluice: Sluice, project: Path) -> None:
    other = FEED.replace("127.0.0.1:9", "127.0.0.1:10").replace("start", "group: other\nstart")
    (project / "feeds" / "another.yaml").write_text(other)
    answer = sluice("peek", "orders:0:0")
    assert (answer.code, "another (127.0.0.1:10), orders (127.0.0.1:9)" in answer.err) == (2, True)
    assert "--feed NAME" in answer.err
    assert "127.0.0.1:9:" in sluice("peek", "orders:0:0", "--feed", "orders").err


def test_refusal_exits_with_3_and_unexpected_error_with_1(
    sluice: Sluice, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = typer.Typer()

    @app.command()
    def refuse() -> None:
        raise GroupHeld("held by x", remedy="stop x")

    @app.command()
    def surprise() -> None:
        raise KeyError("odd")

    @app.command()
    def write() -> None:
        raise PermissionError(errno.EROFS, "Read-only file system", "/feeds/a.yaml")

    monkeypatch.setattr(main_module, "build_app", lambda *names: app)
    written = sluice("write")
    assert (written.code, written.err.splitlines()[0]) == (1, "error: Read-only file system: /feeds/a.yaml")
    assert "may read it and write there, and run the command again" in written.err
    refused = sluice("refuse")
    assert (refused.code, refused.err) == (3, "refused: held by x\n  → stop x\n")
    odd = sluice("surprise")
    assert odd.code == 1
    assert "--debug" in odd.err
    assert "whole" not in odd.err, "nobody knows how the data is"
    assert "Traceback" not in odd.err
    traced = main_module.main(["surprise", "--debug"])
    assert traced == 2  # this app has no --debug; the real commands have


def test_error_for_unreadable_run_history_names_the_folder(sluice: Sluice, project: Path) -> None:
    (project / ".sluice" / "dagster" / "history" / "runs.db").mkdir(parents=True)
    answer = sluice("unstick")
    assert (answer.code, "Dagster's database does not answer" in answer.err) == (1, True)
    assert f"check that {project / '.sluice' / 'dagster'} may be written to" in answer.err


def test_end_of_input_at_a_prompt_exits_with_2(project: Path) -> None:
    keyboard, screen = os.openpty()
    (project / "feeds" / "orders.yaml").unlink()
    command = [str(Path(sys.executable).with_name("sluice")), "init"]
    with subprocess.Popen(command, cwd=project, stdin=screen, stdout=subprocess.PIPE, stderr=screen) as process:
        os.close(screen)
        output = b""
        while b"which Kafka?" not in output and b"Abort" not in output:
            output += os.read(keyboard, 4096)
            os.write(keyboard, b"\x04")
        assert b"which Kafka?" in output
    os.close(keyboard)
    assert process.returncode == 2


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_full_disk_under_stdout_is_an_error_without_traceback(options: list[str], project: Path) -> None:
    command = [str(Path(sys.executable).with_name("sluice")), "feeds", "list", *options]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, cwd=project, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, "No space left on device" in done.stderr) == (1, True)
    assert "Traceback" not in done.stderr


def test_import_of_cli_main_loads_no_heavy_library() -> None:
    loaded = _list_modules("sluice.cli.main")
    assert not loaded & {"dagster", "pyspark", "numba", "pyarrow", "kafka", "duckdb", "pandas", "boto3", "pydantic"}


def test_status_and_feed_modules_load_no_heavy_library() -> None:
    loaded = _list_modules(
        "sluice.resources.open_ports, sluice.assets.specs.feed_files, sluice.cli.daily.status, "
        "sluice.pipelines.batch.survey"
    )
    assert not loaded & {"dagster", "pyspark", "numba", "scipy", "duckdb", "pandas", "boto3"}


def test_help_and_usage_errors_need_no_arrow_and_no_ledger() -> None:
    every = ", ".join(
        f"sluice.cli.{folder}" for folder in ("daily.run", "daily.status", "inspect.wait", "maintain.erase")
    )
    heavy = {"pyarrow", "numpy", "kafka", "sluice.pipelines.ledger", "sluice.pipelines.feed.sections"}
    assert not _list_modules(f"{every}; from sluice.cli.app.menu import build_app; build_app()") & heavy


def _list_modules(modules: str) -> set[str]:
    code = f"import sys, {modules}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


@pytest.mark.parametrize(
    ("number", "code", "says"), [(signal.SIGINT, 130, "interrupted\n"), (signal.SIGTERM, 143, "terminated\n")]
)
def test_signal_ends_the_command_with_one_line(number: signal.Signals, code: int, says: str, project: Path) -> None:
    (project / "feeds" / "orders.yaml").write_text(FEED.replace("300", "60000"))
    script = "import sys; from sluice.cli.entry import main; print('up', flush=True); sys.exit(main())"
    with subprocess.Popen(
        [sys.executable, "-c", script, "plan", "orders"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        _wait_for_kafka_thread(process.pid)
        process.send_signal(number)
        _, err = process.communicate()
    assert (process.returncode, err) == (code, says)


def _wait_for_kafka_thread(pid: int) -> None:
    """Wait until the process has a second thread, which sends requests to Kafka."""
    while len(os.listdir(f"/proc/{pid}/task")) < 2:
        os.sched_yield()


def test_version_is_shown(sluice: Sluice) -> None:
    result = sluice("--version")
    assert (result.code, result.out.startswith(f"sluice {__version__} (Python 3.")) == (0, True)


def test_json_log_is_one_line_and_unknown_format_is_a_usage_error(project: Path) -> None:
    command = [str(Path(sys.executable).with_name("sluice")), "status", "nope", "--log-format"]
    done = subprocess.run([*command, "json"], cwd=project, capture_output=True, text=True, check=False)
    (line,) = map(json.loads, done.stderr.splitlines())
    assert (done.returncode, line["level"], line["error"]) == (2, "error", "FeedError")
    assert line["message"] == "no feed `nope`"
    wrong = subprocess.run([*command, "xml"], cwd=project, capture_output=True, text=True, check=False)
    assert (wrong.returncode, wrong.stderr.splitlines()[0]) == (2, "error: unknown log format 'xml'")


def test_missing_feed_error_suggests_similar_names(project: Path, sluice: Sluice) -> None:
    assert "did you mean `orders`?" in sluice("status", "ordres").err
    assert "feeds here: orders" in sluice("status", "nope").err
    for number in range(20):
        (project / "feeds" / f"clicks_{number}.yaml").write_text(FEED.replace("topics: orders", f"topics: c{number}"))
    assert "sluice feeds list shows the 21 feeds here" in sluice("status", "nope").err


def test_audit_before_the_first_landing_reports_nothing_landed(project: Path, sluice: Sluice) -> None:
    result = sluice("audit", "orders")
    assert result.code == 0
    assert "nothing has landed" in result.out
    assert "frontier" not in result.out, "no table without a row"


def test_invalid_values_are_explained_in_terms_of_the_command(project: Path, sluice: Sluice) -> None:
    missing = "error: airflow is not installed\n  → pip install 'kafka-sluice[airflow]'"
    assert sluice("demo", "--airflow").err.startswith(missing)
    assert sluice("demo", "--table", "foo").err.startswith("error: Invalid value for '--table': 'foo' is not one of")
    assert "or how long ago: 90d" in sluice("expire", "orders", "--before", "yesterday").err
    assert "sluice republish orders --topic TOPIC begins one" in sluice("republish", "orders", "--resume", "zzz").err


_ALIVE = """
import sys
sys.modules["dagster"] = None
from sluice.cli.app.invocation import Session
from sluice.cli.terminal.output import CommandOutput
from sluice.resources.liveness import new_owner
session, owner = Session(CommandOutput(), None, False), new_owner("airflow:land_orders.land:1")
with session.open_ports(session.feed("orders")) as ports, ports.liveness.send_heartbeats(owner):
    print(ports.liveness.judge([owner])[owner.token].life)
"""


def test_active_run_is_judged_alive_without_dagster(project: Path) -> None:
    """As with Airflow: `status`, `compact` and others check if the owners of live batches are alive."""
    done = subprocess.run([sys.executable, "-c", _ALIVE], cwd=project, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "alive", done.stderr


_REPAIR = """
import sys
sys.modules["dagster"] = None
from sluice.cli.main import main
sys.exit(main(["repair", "orders"]))
"""


def test_repair_works_without_dagster(project: Path) -> None:
    done = subprocess.run([sys.executable, "-c", _REPAIR], cwd=project, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "nothing to repair" in done.stdout
