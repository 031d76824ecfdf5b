"""Properties are never timed in any profile: a busy machine is no reason for a failure."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

TESTS = Path(__file__).parent
SLOW = """
import time
from hypothesis import given, strategies as st

@given(st.just(0))
def test_slow(number):
    time.sleep(0.3)
"""


@pytest.mark.parametrize("profile", ["untimed", "quick"])
def test_profiles_have_no_deadlines(profile: str) -> None:
    loaded = settings.get_profile(profile)
    assert loaded.deadline is None
    assert HealthCheck.too_slow in loaded.suppress_health_check


def test_this_run_has_no_deadlines() -> None:
    assert settings().deadline is None


def find_overrides() -> Iterator[tuple[Path, ast.keyword]]:
    """Yield the arguments of each call of `settings` in tests, which could set a deadline again."""
    for path in TESTS.rglob("*.py"):
        calls = (n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Call))
        settings_calls = (c for c in calls if isinstance(c.func, ast.Name) and c.func.id == "settings")
        yield from ((path, k) for c in settings_calls for k in c.keywords)


def test_no_property_sets_a_deadline() -> None:
    overrides = [*find_overrides()]
    assert len(overrides) > 40
    assert [path.name for path, k in overrides if k.arg == "deadline"] == []


def test_suppressed_health_checks_include_too_slow() -> None:
    for path, keyword in find_overrides():
        if keyword.arg == "suppress_health_check":
            text = ast.unparse(keyword.value)
            assert "too_slow" in text or text in ("[*HealthCheck]", "list(HealthCheck)"), (path.name, text)


@pytest.mark.slow
@pytest.mark.parametrize("profile", [(), ("--hypothesis-profile=quick",)], ids=["default", "quick"])
def test_property_with_examples_of_300_ms_passes(profile: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text((TESTS / "conftest.py").read_text())
    (tmp_path / "test_slow.py").write_text(SLOW)
    command = [sys.executable, "-m", "pytest", "-q", "-c", "/dev/null", f"--rootdir={tmp_path}", *profile]
    process = subprocess.run([*command, str(tmp_path)], cwd=TESTS.parent, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stdout
