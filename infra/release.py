"""Check and build a release: `make release-check`. The workflow release.yml runs the same.

    python infra/release.py [--tag vX.Y.Z] [--keys BRANCH]

Without --tag, the tag of this commit is checked, if it has one. Only the keys below infra/keys/ of BRANCH (default:
origin/main) may have signed it: those of the tagged commit would come from its author.

Builds a wheel and a source distribution in dist/, checks that both have the same modules, installs the wheel into an
empty environment below build/release/, runs the README and the tutorial with it word by word, and writes the bill of
materials of that environment (CycloneDX). With a tag: it must be signed, equal the version in the code, and have a
dated section in the changelog. Starts a Kafka on loopback, and ends it. All steps run; any failure fails.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DIST, BUILD = ROOT / "dist", ROOT / "build" / "release"
PYTHON = ROOT / ".venv" / "bin" / "python"
EXTRAS = "land,ui"
"""The extras of the README."""
SBOM = "cyclonedx-bom==7.5.0"


class StepFailed(Exception):
    """A step failed. The text has the reason and a remedy."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tag", default="", help="the release's tag (default: the signed tag of this commit)")
    parser.add_argument("--keys", default="origin/main", help="the branch whose infra/keys/ is trusted")
    options = parser.parse_args()
    tag = options.tag or _find_tag()
    steps: Mapping[str, Callable[[], str]] = {
        "version and changelog": lambda: check_version(tag, options.keys),
        "wheel and source distribution": build_packages,
        "empty environment": install_wheel,
        "README and tutorial": follow_pages,
        "bill of materials": write_sbom,
    }
    failed = False
    for name, step in steps.items():
        try:
            print(f"== {name}: {step()}", flush=True)
        except (StepFailed, subprocess.CalledProcessError) as error:
            failed = True
            print(f"== {name}: FAILED: {error}", flush=True)
    sys.exit(failed)


def check_version(tag: str, keys: str) -> str:
    """Compare the tag, its signature, the version in the code and the changelog. `keys`: a branch."""
    version = _read_version()
    changelog = (ROOT / "CHANGELOG.md").read_text()
    if not tag:
        waiting = changelog.partition("## [Unreleased]")[2].partition("\n## [")[0].count("\n- ")
        return f"{version}, without a tag; {waiting} unreleased changes"
    if tag != f"v{version}":
        raise StepFailed(f"tag {tag}, but version {version}: set VERSION in pipelines/util/extras.py")
    if not re.search(rf"^## \[{re.escape(version)}\] - \d{{4}}-\d\d-\d\d$", changelog, re.MULTILINE):
        raise StepFailed(f"CHANGELOG.md has no line `## [{version}] - YYYY-MM-DD`: give *Unreleased* the version")
    if _ask_git("rev-parse", "--verify", f"refs/tags/{tag}^{{commit}}") != _ask_git("rev-parse", "HEAD"):
        raise StepFailed(f"{tag} is no tag of this commit: git tag --sign {tag}")
    if subprocess.run(["git", "-C", ROOT, "merge-base", "--is-ancestor", "HEAD", keys], check=False).returncode:
        raise StepFailed(f"{tag} is no commit of {keys}: merge it first")
    check_signature(tag, keys)
    return f"{version}, signed"


def check_signature(tag: str, keys: str) -> None:
    """Verify the tag with the keys below infra/keys/ of a branch, and no others. Raises StepFailed."""
    names = _ask_git("ls-tree", "--name-only", "--full-tree", keys, "infra/keys/").splitlines()
    names = [name for name in names if name.endswith(".asc")]
    if not names:
        raise StepFailed(
            f"{keys} has no infra/keys/*.asc, so no signature is trusted: a maintainer adds a key there by a pull "
            "request (gpg --armor --export FINGERPRINT >infra/keys/NAME.asc), before the release"
        )
    with tempfile.TemporaryDirectory() as ring:
        env = os.environ | {"GNUPGHOME": ring}
        for name in names:
            key = subprocess.run(["git", "-C", ROOT, "show", f"{keys}:{name}"], capture_output=True, check=True).stdout
            imported = subprocess.run(
                ["gpg", "--batch", "--import"], input=key, env=env, capture_output=True, check=False
            )
            if imported.returncode:
                raise StepFailed(f"{name} of {keys} is no public key: gpg --show-keys {name}")
        # `gpg.program` and the format of signatures could be set in a configuration; these are the defaults.
        verify = ["git", "-C", ROOT, "-c", "gpg.format=openpgp", "-c", "gpg.program=gpg", "verify-tag", tag]
        if subprocess.run(verify, env=env, capture_output=True, check=False).returncode:
            raise StepFailed(
                f"{tag} has no valid signature by a key of infra/keys/ of {keys}: git tag --sign --force {tag}"
            )


def build_packages() -> str:
    """Build both packages. Returns their names and sizes."""
    shutil.rmtree(DIST, ignore_errors=True)
    wheel = ROOT / _run("infra/wheel.sh").split()[-1]
    make = f"from setuptools import build_meta; print(build_meta.build_sdist({str(DIST)!r}))"
    source = DIST / _run(PYTHON, "-c", make).split()[-1]
    with zipfile.ZipFile(wheel) as archive:
        packed = {n for n in archive.namelist() if n.endswith(".py")}
    with tarfile.open(source) as archive:
        files = [m.name for m in archive.getmembers() if m.isfile()]
    in_source = {n.partition("/src/")[2] for n in files if n.endswith(".py") and "/src/" in n}
    if binaries := [n for n in files if n.endswith(".so")]:
        raise StepFailed(f"{source.name} has a library of this platform: {binaries[0]}")
    if differing := sorted(packed ^ in_source):
        raise StepFailed(f"{len(differing)} modules are in one package only, such as {differing[0]}")
    return ", ".join(f"{p.name} {p.stat().st_size / 1e6:.1f} MB" for p in (wheel, source)) + f", {len(packed)} modules"


def install_wheel() -> str:
    """Install the wheel into an empty environment, with the newest packages that its ranges allow."""
    shutil.rmtree(BUILD, ignore_errors=True)
    os.environ.pop("PYTHONPATH", None)  # pip would take the checkout for an installation
    _run(sys.executable, "-m", "venv", BUILD / "env")
    pip = BUILD / "env" / "bin" / "pip"
    wheel = next(DIST.glob("*.whl"), None)
    if wheel is None:
        raise StepFailed("dist/ has no wheel: see the step before")
    _run(pip, "install", "--quiet", "--disable-pip-version-check", f"{wheel}[{EXTRAS}]")
    _run(pip, "check")
    version = _run(BUILD / "env" / "bin" / "sluice", "--version").strip()
    if f"sluice {_read_version()} " not in version:
        raise StepFailed(f"the installed command has another version: {version}")
    return version


def follow_pages() -> str:
    """Run the commands of the README and the tutorial with the installed wheel, and compare their output."""
    env = os.environ | {"SLUICE_TEST_COMMAND": str(BUILD / "env" / "bin" / "sluice")}
    test = "tests/test_readme.py::test_readme_and_tutorial_run_as_typed"
    return _run(PYTHON, "-m", "pytest", "-q", "-n", "0", test, env=env).strip().splitlines()[-1]


def write_sbom() -> str:
    """Write the bill of materials of the environment to dist/."""
    _run(sys.executable, "-m", "venv", BUILD / "tools")
    _run(BUILD / "tools" / "bin" / "pip", "install", "--quiet", "--disable-pip-version-check", SBOM)
    out = DIST / f"kafka_sluice-{_read_version()}.cdx.json"
    _run(BUILD / "tools" / "bin" / "cyclonedx-py", "environment", "-o", out, BUILD / "env" / "bin" / "python")
    return f"{out.name}, {len(json.loads(out.read_text())['components'])} components"


def _find_tag() -> str:
    """Return the tag of this commit; empty if it has none. One without a signature counts, and is refused later."""
    return _ask_git("describe", "--exact-match", "--tags", "--match", "v*")


def _ask_git(*words: str) -> str:
    """Return the answer of a git command; empty if it fails."""
    return subprocess.run(["git", "-C", ROOT, *words], capture_output=True, text=True, check=False).stdout.strip()


def _read_version() -> str:
    code = (ROOT / "pipelines" / "util" / "extras.py").read_text()
    (version,) = re.findall(r'^VERSION = "(.+)"$', code, re.MULTILINE)
    return str(version)


def _run(*command: str | Path, env: Mapping[str, str] | None = None) -> str:
    """Run a command in the checkout. Returns its output. Raises StepFailed with the end of it."""
    done = subprocess.run(
        command, cwd=ROOT, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False
    )
    if done.returncode:
        raise StepFailed(f"{Path(command[0]).name} ended with {done.returncode}:\n{done.stdout[-2000:]}")
    return done.stdout


if __name__ == "__main__":
    main()
