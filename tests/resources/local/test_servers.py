"""A local registry or S3 whose start fails, or is interrupted, leaves no process."""

from __future__ import annotations

from pathlib import Path

import pytest

from sluice.pipelines.errors import SetupError
from sluice.resources.local import local_registry, local_s3
from sluice.resources.local.local_registry import LocalRegistry
from sluice.resources.local.local_s3 import LocalS3


@pytest.mark.parametrize("ends", [SetupError, KeyboardInterrupt])
def test_a_registry_that_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: type[BaseException]
) -> None:
    def ask(port: int) -> bool:
        if ends is KeyboardInterrupt:
            raise ends
        return False

    program = tmp_path / "java"
    program.write_text("#!/bin/sh\nexec sleep 600\n")
    program.chmod(0o755)
    monkeypatch.setattr(local_registry, "application", lambda: tmp_path)
    monkeypatch.setattr(local_registry, "_java", lambda: program)
    monkeypatch.setattr(local_registry, "_answers", ask)
    monkeypatch.setattr(local_registry, "START_SECONDS", 0)
    registry = LocalRegistry(tmp_path / "registry", keep=False)
    with pytest.raises(ends):
        registry.start()
    assert not registry.running
    assert registry._guard is None


def test_an_s3_without_its_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(local_s3.Bucket, "call", interrupt)
    store = LocalS3()
    with pytest.raises(KeyboardInterrupt):
        store.__enter__()
    assert store._process is not None
    assert store._process.poll() is not None
