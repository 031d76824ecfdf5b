"""A release is refused unless a trusted key signed its tag, and tag, code and changelog have one version.

Workflows cannot be run here: these tests read them.
"""

from __future__ import annotations

import importlib
import os
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
        for words in (["init", "-qb", "main"], ["add", "."], [*AUTHOR, "commit", "-qm", "Release 1.2.3"]):
            run_git(tmp_path, *words)
        yield module


AUTHOR = ["-c", "user.name=a", "-c", "user.email=a@example.com"]


def run_git(folder: Path, *words: str) -> None:
    subprocess.run(["git", "-C", folder, *words], check=True, capture_output=True)


def test_untagged_commit_is_checked_without_a_tag(release: ModuleType) -> None:
    assert release._find_tag() == ""
    assert release.check_version("", "main") == "1.2.3, without a tag; 1 unreleased changes"


@pytest.mark.parametrize("kind", [[], ["-a", "-m", "1.2.3"]], ids=["lightweight", "annotated"])
def test_unsigned_tag_is_detected_and_refused(release: ModuleType, tmp_path: Path, kind: list[str]) -> None:
    publish_key(tmp_path, Signer(tmp_path / "maintainer"))
    run_git(tmp_path, *AUTHOR, "tag", *kind, "v1.2.3")
    assert release._find_tag() == "v1.2.3"
    with pytest.raises(release.StepFailed, match="no valid signature"):
        release.check_version(release._find_tag(), "main")


class Signer:
    """A person with a new key, in a folder of its own."""

    def __init__(self, home: Path) -> None:
        home.mkdir(mode=0o700)
        self.env = os.environ | {"GNUPGHOME": str(home)}
        self.run_gpg("--quick-generate-key", f"{home.name} <{home.name}@example.com>", "ed25519", "sign")
        self.key = self.run_gpg("--armor", "--export")

    def run_gpg(self, *words: str) -> bytes:
        command = ["gpg", "--batch", "--quiet", "--passphrase", "", "--pinentry-mode", "loopback", *words]
        return subprocess.run(command, check=True, capture_output=True, env=self.env).stdout

    def tag(self, folder: Path) -> None:
        command = [
            "git",
            "-C",
            folder,
            *AUTHOR,
            "tag",
            "--force",
            "--local-user",
            "maintainer",
            "-m",
            "1.2.3",
            "v1.2.3",
        ]
        subprocess.run(command, check=True, capture_output=True, env=self.env)


def publish_key(folder: Path, signer: Signer) -> None:
    (folder / "infra/keys").mkdir(parents=True, exist_ok=True)
    (folder / "infra/keys/maintainer.asc").write_bytes(signer.key)
    run_git(folder, "add", "infra")
    run_git(folder, *AUTHOR, "commit", "-qm", "Trust a key")


@pytest.fixture
def signer(tmp_path: Path) -> Iterator[Signer]:
    person = Signer(tmp_path / "maintainer")
    yield person
    subprocess.run(["gpgconf", "--kill", "all"], check=True, env=person.env)


def test_tag_signed_by_a_key_of_the_default_branch_is_released(
    release: ModuleType, tmp_path: Path, signer: Signer
) -> None:
    publish_key(tmp_path, signer)
    signer.tag(tmp_path)
    assert release.check_version("v1.2.3", "main") == "1.2.3, signed"


def test_key_of_the_tagged_commit_is_not_trusted(release: ModuleType, tmp_path: Path, signer: Signer) -> None:
    """Otherwise a key comes along with the tag."""
    run_git(tmp_path, "branch", "trusted")
    publish_key(tmp_path, signer)
    signer.tag(tmp_path)
    with pytest.raises(release.StepFailed, match=r"v1\.2\.3 is no commit of trusted: merge it first"):
        release.check_version("v1.2.3", "trusted")
    with pytest.raises(release.StepFailed, match=r"trusted has no infra/keys/\*\.asc, .* a maintainer adds a key"):
        release.check_signature("v1.2.3", "trusted")


def test_key_that_the_branch_lacks_is_not_trusted(release: ModuleType, tmp_path: Path, signer: Signer) -> None:
    publish_key(tmp_path, signer)
    signer.tag(tmp_path)
    run_git(tmp_path, *AUTHOR, "rm", "-q", "infra/keys/maintainer.asc")
    (tmp_path / "infra/keys").mkdir(parents=True)
    (tmp_path / "infra/keys/README.md").write_text("No key yet.")
    run_git(tmp_path, "add", "infra")
    run_git(tmp_path, *AUTHOR, "commit", "-qm", "Remove a lost key")
    with pytest.raises(release.StepFailed, match=r"main has no infra/keys/\*\.asc"):
        release.check_signature("v1.2.3", "main")
    (tmp_path / "infra/keys/other.asc").write_text("no key")
    run_git(tmp_path, "add", "infra")
    run_git(tmp_path, *AUTHOR, "commit", "-qm", "Add a file that is no key")
    with pytest.raises(release.StepFailed, match=r"infra/keys/other\.asc of main is no public key"):
        release.check_signature("v1.2.3", "main")


def test_tag_of_another_version_or_without_changelog_section_is_refused(release: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(release.StepFailed, match="but version"):
        release.check_version("v1.2.4", "main")
    run_git(tmp_path, *AUTHOR, "tag", "v1.2.3")
    run_git(tmp_path, *AUTHOR, "commit", "--allow-empty", "-qm", "One more")
    with pytest.raises(release.StepFailed, match="no tag of this commit"):
        release.check_version("v1.2.3", "main")
    (tmp_path / "CHANGELOG.md").write_text("## [Unreleased]\n")
    with pytest.raises(release.StepFailed, match="has no line"):
        release.check_version("v1.2.3", "main")


def test_release_publishes_only_after_its_checks() -> None:
    workflows = {path.stem: yaml.safe_load(path.read_text()) for path in (GITHUB / "workflows").glob("*.yml")}
    # YAML takes the key `on` for true.
    assert [name for name, flow in workflows.items() if "tags" in (flow[True].get("push") or {})] == ["release"]
    jobs = workflows["release"]["jobs"]
    assert {name for name, job in jobs.items() if "needs" not in job} == {"check", "test", "wheel"}
    assert jobs["image"]["needs"] == ["check", "test", "wheel"]
    assert (jobs["publish"]["needs"], jobs["docs"]["needs"]) == ("image", "publish")
    assert {job["if"] for name, job in jobs.items() if name not in ("check", "wheel")} == {
        "startsWith(github.ref, 'refs/tags/v')"
    }


def test_only_jobs_of_a_release_may_write() -> None:
    """Jobs of pull requests run the code of their authors. `labels` writes labels, after a merge."""
    for path in (GITHUB / "workflows").glob("*.yml"):
        flow = yaml.safe_load(path.read_text())
        by_default = flow["permissions"]
        assert by_default == {"contents": "read"} | ({"issues": "write"} if path.stem == "labels" else {})
        assert path.stem != "labels" or flow[True].keys() == {"push"}
        for name, job in flow["jobs"].items():
            if "write" in job.get("permissions", {}).values():
                assert job["if"] == "startsWith(github.ref, 'refs/tags/v')", name


def test_image_is_built_on_a_digest_without_a_right_to_the_registry() -> None:
    jobs = yaml.safe_load((GITHUB / "workflows/image.yml").read_text())["jobs"]
    assert [name for name, job in jobs.items() if "packages" in job.get("permissions", {})] == ["push"]
    (build,) = (step["with"] for step in jobs["build"]["steps"] if "build-push-action" in step.get("uses", ""))
    assert build["build-args"] == "BASE=${{ needs.base.outputs.reference }}"
    assert "push" not in build
    assert not [step for step in jobs["build"]["steps"] if "login-action" in step.get("uses", "")]
    assert not [step for step in jobs["push"]["steps"] if "checkout" in step.get("uses", "")]
    assert "\nARG BASE=" in (ROOT / "infra/image/Containerfile").read_text(), "the job `base` reads this line"


def test_known_vulnerabilities_are_looked_up_for_both_locks() -> None:
    (job,) = yaml.safe_load((GITHUB / "workflows/audit.yml").read_text())["jobs"].values()
    command = job["steps"][-1]["run"]
    assert "pip-audit --strict" in command
    assert all(f"-r {lock}" in command for lock in ("requirements.lock", "infra/image/requirements.lock"))


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
