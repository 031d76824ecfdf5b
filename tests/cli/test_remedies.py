"""Each command that a message of the product names can be typed: it exists, with these options and these arguments.

Messages are collected from the code: each text with `sluice …` in it, where values that are filled in stand for ☐. A
command ends at a semicolon, a bracket, a pipe or three spaces, or where prose begins. `make remedies` lists all.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer
from typer._click import exceptions

from sluice.cli.main import build_app

ROOT = Path(__file__).parents[2]
ROOMS = ("pipelines", "resources", "assets", "cli", "src/sluice")
VALUE = "☐"
_COMMAND = re.compile(rf"(?<![\w./-])sluice (?=[a-z{VALUE}])(.*?)(?=[`;()\n|&>]|   |\. |$)", re.DOTALL)
_PROSE = {"was", "number", "in"}
"""Words after `sluice` in texts that are no commands."""
SAMPLES = {
    "--window": "2026-11-20T14",
    "--from": "2026-11-20T14",
    "--to": "2026-11-20T15",
    "--offsets": "orders:0:10-20",
    "--begin": "committed",
    "--before": "2026-11-20",
    "--partition": "orders:0",
    "--batch": "7",
    "--abandon": "7",
    "--release": "7",
    "--to-offset": "7",
    "--port": "3100",
    "--records": "10",
}


FOLLOWED: dict[str, dict[str, str]] = {
    "integration/test_lives.py": {
        "accept cluster": "test_feed_moves_to_a_mirror_by_the_printed_remedy",
    },
    "faults/test_logs.py": {
        "accept corrupt": "test_batch_is_corrupt_on_every_disk",
        "accept lost": "test_records_deleted_between_runs",
        "accept recreated": "test_a_topic_recreated_between_runs",
        "accept truncated": "test_a_log_truncated_between_runs",
    },
    "integration/test_rename.py": {
        "feeds move-topic": "test_a_topic_moves_to_a_new_feed_and_back_without_loss_or_copies",
        "feeds retire --undo": "test_a_retired_feed_lands_nothing_stays_readable_and_continues",
    },
    "readers/test_moved_clocks.py": {
        "table rebuild": "test_broken_table_is_reported_and_its_remedy_works",
    },
    "integration/test_followed_remedies.py": {
        "accept damaged": "test_a_lost_file_of_which_kafka_has_a_part_is_given_up_and_that_part_lands",
        "audit --all": "test_a_lost_file_of_which_kafka_has_a_part_is_given_up_and_that_part_lands",
        "peek": "test_a_refused_batch_lists_its_records_and_lands_after_a_fix",
        "quarantine list": "test_a_refused_batch_lists_its_records_and_lands_after_a_fix",
        "run": "test_a_refused_batch_lists_its_records_and_lands_after_a_fix",
        "run --replace": "test_files_with_other_bits_are_not_taken_for_missing_ones",
        "accept gone": "test_a_topic_that_is_gone_or_is_another_feeds_leaves_by_the_printed_commands",
        "audit --all --hashes": "test_a_lost_file_of_a_former_life_is_given_up_by_the_printed_commands",
        "compact": "test_the_batch_of_a_killed_compaction_ends_by_the_printed_commands",
        "repair --abandon": "test_the_batch_of_a_killed_compaction_ends_by_the_printed_commands",
        "erase --where": "test_rows_that_another_client_deleted_from_a_table_are_erased_or_come_back",
        "feeds rename": "test_the_only_topic_of_a_feed_gets_the_other_name_by_the_printed_command",
        "hold": "test_windows_on_hold_expire_after_the_printed_release",
        "offsets export": "test_offsets_that_a_reset_would_pass_over_are_skipped_by_the_printed_command",
        "offsets reset --to-frontier": "test_offsets_that_a_reset_would_pass_over_are_skipped_by_the_printed_command",
        "republish --resume": "test_a_cut_republish_goes_on_by_the_printed_command",
        "run --skip-to": "test_offsets_that_a_reset_would_pass_over_are_skipped_by_the_printed_command",
        "table sync": "test_an_output_whose_catalog_is_lost_or_newer_than_the_lake_is_rebuilt",
        "contract init": "test_a_missing_contract_is_proposed_by_the_printed_command",
        "init": "test_a_folder_becomes_a_project_by_the_printed_commands",
        "produce --records --bootstrap": "test_sample_events_reach_another_kafka_by_the_printed_command",
        "prune": "test_logs_of_runs_are_removed_by_the_command_in_dagsters_settings",
        "republish --topic": "test_an_unknown_republish_is_begun_by_the_printed_command",
        "run --debug": "test_a_failure_among_several_feeds_is_repeated_with_its_traceback",
        "schema pull": "test_a_missing_schema_file_is_fetched_by_the_printed_command",
        "unstick": "test_a_killed_run_is_ended_by_the_printed_command",
    },
    "integration/test_migrating.py": {
        "offsets reset --to-offset": "test_an_invalid_offset_is_corrected_by_the_printed_command",
    },
    "cli/test_secured.py": {
        "kafka grant": "test_rights_are_missing_until_granted_and_certificates_are_renewed",
        "kafka start": "test_local_kafka_and_registry_start_by_the_printed_commands",
        "kafka start --registry": "test_local_kafka_and_registry_start_by_the_printed_commands",
    },
    "cli/test_end_to_end.py": {
        "demo": "test_the_demo_proves_its_figures",
        "ui": "test_ui_listens_on_loopback_and_shows_new_feeds",
        "ui --port": "test_ui_listens_on_loopback_and_shows_new_feeds",
    },
    "resources/spark/test_pack.py": {
        "pack --output": "test_a_missing_archive_is_made_by_the_printed_command",
        "pack --with --output": "test_an_archive_with_a_module_is_made_by_the_printed_command",
    },
    "drills/test_year.py": {
        "accept ledger --from-files": "test_a_year",
        "report --batch --json": "test_a_year",
    },
    "integration/test_surprises.py": {
        "accept group": "test_a_second_project_takes_the_group_over_by_the_named_command",
        "run --window": "test_named_command_completes_a_partial_hour_and_empty_hour_lands",
    },
    "integration/test_lost_entries.py": {
        "accept ledger": "test_every_lost_suffix_is_detected_and_the_feed_continues",
    },
    "pipelines/operating/test_accept.py": {
        "accept moved": "test_remedies_work_for_offsets_moved_back_and_ahead",
    },
    "integration/test_erasure.py": {
        "erase": "test_audit_names_the_command_that_finishes_an_erasure_and_repair_finishes_it",
        "hold --release": "test_windows_on_hold_are_neither_expired_nor_erased",
        "repair": "test_audit_names_the_command_that_finishes_an_erasure_and_repair_finishes_it",
    },
    "integration/test_protection.py": {
        "quarantine replay": "test_the_printed_remedy_lands_quarantined_records_again",
    },
    "integration/test_check.py": {
        "run --missing-files": "test_readers_stop_at_changed_file_and_the_printed_remedy_restores_it",
    },
    "pipelines/tables/test_changed_by_others.py": {
        "table sync --repair": "test_one_remedy_is_printed_and_works",
    },
    "cli/test_repair.py": {
        "unstick --run --force": "test_unstick_forces_only_a_named_run",
    },
}
"""By file, printed commands and the test that follows each to its end."""
VIEWS = {
    *("acls", "audit", "check", "contract check", "docs", "doctor", "explain", "feeds check", "feeds list", "files"),
    *("groups describe", "groups list", "kafka status", "metrics", "offsets", "offsets diff", "offsets show", "peek"),
    *("plan", "quarantine list", "quarantine show", "report", "schema diff", "schema show", "status", "table check"),
    *("table status", "wait"),
}
"""Commands that change no rows, offsets or files of a project: they are listed as views, followed or not."""


PARTS = {"accept --reason", "offsets reset", "table"}
"""Texts of which the values make a command above, or the reason of an act."""

PLACEHOLDERS = {
    "assets/checks/contract_checks.py FEED": "the text of an asset check",
    "assets/checks/feed_checks.py FEED": "the text of an asset check",
    "assets/factory.py FEED": "the text of an asset check",
    "assets/steps/table_step.py FEED": "the text of an asset check",
    "cli/app/usage.py FEED": "no feed was typed",
    "cli/daily/init.py NAME": "a new name",
    "cli/inspect/explain.py FEED": "no feed was typed",
    "cli/inspect/explain.py OFFSET": "no feed was typed",
    "cli/inspect/report.py FEED": "no feed was typed",
    "cli/main.py FEED": "a bug, which may have any cause",
    "cli/maintain/repair.py BATCH": "no feed was typed",
    "cli/maintain/repair.py FEED": "no feed was typed",
    "cli/maintain/unstick.py ID": "no run was typed",
    "pipelines/feed/sections.py FILE": "a new file",
    "pipelines/feed/sections.py MODULE": "a module of the user",
    "pipelines/republishing/republish_plan.py TOPIC": "a new request",
    "resources/registry/proposal.py NAME": "a new name",
}
"""By file and word, why a printed command has no real value there."""


@dataclass(frozen=True)
class Mention:
    """The text of a command in a message, and its place. `is_help`: in the help of a command, or as a file's author."""

    location: str
    text: str
    is_help: bool = False


def list_mentions() -> Iterator[Mention]:
    for room in ROOMS:
        for path in sorted((ROOT / room).rglob("*.py")):
            if not any(p.is_symlink() for p in path.parents) or room != "src/sluice":
                yield from _read(path)


def _read(path: Path) -> Iterator[Mention]:
    tree = ast.parse(path.read_text())
    inside = {id(v) for n in ast.walk(tree) if isinstance(n, ast.JoinedStr) for v in n.values}
    docstrings = {id(n.value) for n in ast.walk(tree) if isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant)}
    groups = (n for n in ast.walk(tree) if isinstance(n, ast.Call) and getattr(n.func, "id", "") == "make_group")
    examples = {id(text) for group in groups for text in group.args}
    if "cli" not in path.parts:
        inside |= docstrings
    for node in ast.walk(tree):
        if id(node) in inside or not isinstance(node, ast.JoinedStr | ast.Constant):
            continue
        for command in _COMMAND.finditer(text := _to_text(node)):
            is_author = text[: command.start()].endswith(("# By `", "Written by `", "ended by `"))
            is_help = is_author or id(node) in docstrings | examples
            yield Mention(f"{path.relative_to(ROOT)}:{node.lineno}", command[1], is_help)


def _to_text(node: ast.expr) -> str:
    if isinstance(node, ast.JoinedStr):
        return "".join(v.value if isinstance(v, ast.Constant) else VALUE for v in node.values)
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


@cache
def build_command() -> Any:
    return typer.main.get_command(build_app())


def split(text: str) -> list[str]:
    """Returns the words; a quoted one stays whole, and marks of the sentence go. Of an option at the end, the value is
    another text."""
    text = re.sub(r"…|(?<=\s)[A-Z]+(?=\s|$)|(?<=--reason) [a-z]+$", VALUE, text)
    text = re.sub(rf"(?<=[a-z]){VALUE}|(--[a-z-]+)\s*$", rf"\1 {VALUE}", text)
    return [w.strip('"').rstrip(".,:?!'") for w in re.findall(r'"[^"]*"|\S+', text) if w.strip('"').rstrip(".,:?!'")]


def find_words(words: list[str]) -> tuple[Any, list[str], Any]:
    """Returns the command that the first words name, the others, and the context of its group."""
    command, context = build_command(), None
    while hasattr(command, "commands") and words and words[0] in command.commands:
        context = command.context_class(command, info_name=words[0], parent=context)
        command, words = command.commands[words[0]], words[1:]
    return command, words, context


def fill(words: list[str], drop: int) -> list[str]:
    """Returns the words with samples for values. Bit n of `drop` leaves the n-th value out: it may be empty."""
    out, number = list[str](), 0
    for word in words:
        if VALUE not in word:
            out.append(word)
            continue
        number += 1
        if not drop >> (number - 1) & 1:
            before = out[-1] if out else ""
            out.append(
                SAMPLES.get(before, word.replace(VALUE, "1" if "-" in word.strip("-") or ":" in word else "orders"))
            )
    return out


def parse(words: list[str]) -> str:
    """Returns the reason why the command line does not take the words; empty if it does."""
    command, rest, context = find_words(words)
    if "--help" in rest:
        return ""
    if hasattr(command, "commands"):
        return "" if not rest or rest[0] == VALUE else f"no command {rest[0]}"
    reason = ""
    for drop in range(1 << min(sum(VALUE in w for w in rest), 5)):
        try:
            command.make_context("sluice", fill(rest, drop), parent=context)
        except exceptions.UsageError as error:
            if isinstance(error, exceptions.MissingParameter) and not rest:
                return ""  # a command by its name
            reason = reason or f"{command.name}: {error.format_message()}"
        else:
            return ""
    return reason


def explain(mention: Mention) -> str:
    """Returns why the command cannot be typed. Behind it may be prose, which has no options."""
    words = split(mention.text)
    if not words or words[0] in _PROSE or words[0] == VALUE:
        return ""
    reason = ""
    for end in range(len(words), 0, -1):
        if any(w.startswith("-") and len(w) > 1 for w in words[end:]):
            break
        if not (refusal := parse(words[:end])):
            return ""
        reason = reason or refusal
    return reason or "no command"


def get_shape(mention: Mention) -> str:
    """Returns the command's name, the event that it accepts, and its options."""
    words = split(mention.text)
    rest = find_words(words)[1]
    event = [w for w in rest[1:2] if words[:1] == ["accept"] and VALUE not in w and not w.startswith("-")]
    options = [w for w in dict.fromkeys(rest) if w.startswith("--")]
    return " ".join([*words[: len(words) - len(rest)], *event, *options])


@pytest.fixture(scope="module")
def mentions() -> list[Mention]:
    return [m for m in list_mentions() if (words := split(m.text)) and words[0] not in (*_PROSE, VALUE)]


def test_each_printed_command_can_be_typed(mentions: list[Mention]) -> None:
    assert len(mentions) > 400
    wrong = [f"{m.location}: sluice {m.text.strip()}: {reason}" for m in mentions if (reason := explain(m))]
    assert wrong == []


def test_printed_commands_have_real_values(mentions: list[Mention]) -> None:
    pairs = [(m, word) for m in mentions if not m.is_help for word in re.findall(r"\b(?:[A-Z]{2,}|N)\b", m.text)]
    names = {f"{m.location.partition(':')[0]} {word}" for m, word in pairs}
    assert names == {*PLACEHOLDERS}


def test_printed_commands_for_several_feeds_name_one(mentions: list[Mention]) -> None:
    commands = [split(m.text) for m in mentions if m.text.split()[0] in ("audit", "compact", "expire", "run")]
    assert [c for c in commands if c[1:] and c[1].startswith("-") and "--all" not in c] == []


@pytest.mark.parametrize(
    "text",
    [
        "statu orders",
        "run orders --widnow 2026-11-20T14",
        "repair --abandon seven",
        "accept orders lost --ofsets ☐",
    ],
)
def test_wrong_commands_are_detected(text: str) -> None:
    assert explain(Mention("", text))


def test_followed_commands_are_printed_and_their_tests_exist(mentions: list[Mention]) -> None:
    printed: dict[str, list[Mention]] = {}
    for m in mentions:
        printed.setdefault(get_shape(m), []).append(m)
    followed = {command: (file, name) for file, tests in FOLLOWED.items() for command, name in tests.items()}
    for command, (file, name) in followed.items():
        assert f"def {name}(" in (ROOT / "tests" / file).read_text(), name
        assert any(is_of(shape, command) for shape in printed), f"sluice {command} is not printed"
    forgotten = []
    for shape, of in sorted(printed.items()):
        test = next(("::".join(followed[c]) for c in followed if is_of(shape, c)), "")
        location = next((m.location for m in of if not m.is_help), of[0].location)
        is_view = name_command(shape) in VIEWS or "--help" in shape or shape in PARTS
        kind = "help" if all(m.is_help for m in of) else "view" if is_view else "parsed"
        print(f"sluice {shape:58} {len(of):3}  {location:48} {test or kind}")
        if kind == "parsed" and not test:
            forgotten.append(f"sluice {shape} ({location})")
    assert forgotten == [], "a test must follow each, and be listed in FOLLOWED; VIEWS has commands that only show"


def name_command(shape: str) -> str:
    """Returns the command of a shape: its words without event and options."""
    words = [w for w in shape.split() if not w.startswith("--")]
    return words[0] if words[0] == "accept" else " ".join(words)


def is_of(shape: str, command: str) -> bool:
    """Returns whether the shape is the command, with any values of the same act."""
    ignored = {"--reason", "--yes", "--begin", "--only", "--offsets", "--adopt", "--dry-run"}
    return {*shape.split()} - ignored == {*command.split()}
