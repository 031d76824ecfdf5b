"""A timeline shows the stages of a run and the CPU of its processes."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from bench.timeline import Process, Timeline, draw, watch
from sluice.pipelines.errors import Failed

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="CPU times are read from /proc")

_WORK = "import time\nwhile time.process_time() < 0.3: pass\n"
_POOL = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {_WORK!r}], check=True)\n{_WORK}"
_DOCUMENT = json.dumps({"feeds": [{"runs": [{"seconds": {"start": 0.2, "plan & <land>": 0.1}}]}]})
_RUN = (
    f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {_POOL!r}], check=True)\n{_WORK}"
    f"print({_DOCUMENT!r})"
)


def test_each_process_has_a_lane_with_its_cpu_times(tmp_path: Path) -> None:
    timeline = watch([sys.executable, "-c", _RUN], tmp_path, os.environ)
    assert [p.name for p in timeline.processes] == ["command", "pool", "worker"]
    assert all(0 <= p.began <= a < b <= p.ended <= timeline.seconds for p in timeline.processes for a, b in p.busy)
    assert all(p.busy for p in timeline.processes)
    assert [*timeline.stages] == ["start", "plan & <land>", "exit"]
    assert sum(timeline.stages.values()) == pytest.approx(timeline.seconds)
    stages = {"start": 0.2, "plan & <land>": 0.1, "exit": 0.7}  # shares that no busy machine changes
    drawn = ElementTree.fromstring(str(draw(Timeline(1.0, stages, timeline.processes))))
    text = [e.text or "" for e in drawn.iter() if e.tag.endswith("text")]
    assert {"stages", "CPU of command", "CPU of pool", "CPU of worker"} <= {*text}
    assert any("plan & <land>" in t for t in text)


def test_process_busy_before_first_sample_has_no_empty_bar() -> None:
    process = Process("worker", 1.0, 1.0)
    process.see(1.0, 0.2)
    process.see(1.1, 0.3)
    assert process.busy == [(1.0, 1.1)]


def test_failed_run_has_no_timeline(tmp_path: Path) -> None:
    with pytest.raises(Failed, match="ended with 3: no Kafka"):
        watch([sys.executable, "-c", "import sys; sys.stderr.write('no Kafka'); sys.exit(3)"], tmp_path, os.environ)
