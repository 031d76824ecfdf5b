"""A release is refused unless its tag is signed, has the code's version and has a section in the changelog."""

from __future__ import annotations

import importlib
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]
GITHUB = ROOT / ".github"


@pytest.fixture
def release(tmp_path: Path) -> Iterator[ModuleType]:
    """The script, for a checkout of version 1.2.3 without a tag."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "infra"))
        module = importlib.import_module("release")
        patch.setattr(module, "ROOT", tmp_path)
        (tmp_path / "pipelines/util").mkdir(parents=True)
        (tmp_path / "pipelines/util/extras.py").write_text('VERSION = "1.2.3"\n')
        (tmp_path / "CHANGELOG.md").write_text("## [Unreleased]\n\n- One.\n\n## [1.2.3] - 2026-11-27\n")
        for words in (["init", "-q"], ["add", "."], [*AUTHOR, "commit", "-qm", "Release 1.2.3"]):
            run_git(tmp_path, *words)
        yield module


AUTHOR = ["-c", "user.name=a", "-c", "user.email=a@example.com"]


def run_git(folder: Path, *words: str) -> None:
    subprocess.run(["git", "-C", folder, *words], check=True, capture_output=True)


def test_untagged_commit_is_checked_without_a_tag(release: ModuleType) -> None:
    assert release._find_tag() == ""
    assert release.check_version("") == "1.2.3, without a tag; 1 unreleased changes"


@pytest.mark.parametrize("kind", [[], ["-a", "-m", "1.2.3"]], ids=["lightweight", "annotated"])
def test_unsigned_tag_is_detected_and_refused(release: ModuleType, tmp_path: Path, kind: list[str]) -> None:
    run_git(tmp_path, *AUTHOR, "tag", *kind, "v1.2.3")
    assert release._find_tag() == "v1.2.3"
    with pytest.raises(release.StepFailed, match="no valid signature"):
        release.check_version(release._find_tag())


def test_tag_of_another_version_or_without_changelog_section_is_refused(release: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(release.StepFailed, match="but version"):
        release.check_version("v1.2.4")
    run_git(tmp_path, *AUTHOR, "tag", "v1.2.3")
    run_git(tmp_path, *AUTHOR, "commit", "--allow-empty", "-qm", "One more")
    with pytest.raises(release.StepFailed, match="no tag of this commit"):
        release.check_version("v1.2.3")
    (tmp_path / "CHANGELOG.md").write_text("## [Unreleased]\n")
    with pytest.raises(release.StepFailed, match="has no line"):
        release.check_version("v1.2.3")


def test_release_publishes_only_after_its_checks() -> None:
    workflows = {path.stem: yaml.safe_load(path.read_text()) for path in (GITHUB / "workflows").glob("*.yml")}
    # YAML takes the key `on` for true.
    assert [name for name, flow in workflows.items() if "tags" in (flow[True].get("push") or {})] == ["release"]
    jobs = workflows["release"]["jobs"]
    assert {name for name, job in jobs.items() if "needs" not in job} == {"check", "test"}
    assert jobs["image"]["needs"] == ["check", "test"]
    assert (jobs["publish"]["needs"], jobs["docs"]["needs"]) == ("image", "publish")
    assert {job["if"] for name, job in jobs.items() if name != "check"} == {"startsWith(github.ref, 'refs/tags/v')"}


def test_actions_are_pinned_to_commits() -> None:
    """A tag of another repository can be moved to other code, which would publish in our name."""
    uses = [
        line.partition("uses: ")[2]
        for path in (GITHUB / "workflows").glob("*.yml")
        for line in path.read_text().splitlines()
        if "uses: " in line and "uses: ./" not in line
    ]
    assert len(uses) > 15
    assert not [u for u in uses if not re.fullmatch(r"[a-z-]+/[a-z-]+@[0-9a-f]{40}  # v\d+\.\d+\.\d+", u)]


def test_labels_of_issue_templates_exist() -> None:
    labels = {label["name"] for label in yaml.safe_load((GITHUB / "labels.yml").read_text())}
    forms = [path.read_text().split("---")[1] for path in (GITHUB / "ISSUE_TEMPLATE").glob("*.md")]
    assert {yaml.safe_load(form)["labels"] for form in forms} <= labels
