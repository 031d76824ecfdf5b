"""Spark's errors explained: the relevant line, the host, and the ends of executors."""

from __future__ import annotations

import pytest

from sluice.resources.spark.spark_errors import Ended, cause, full, host, is_ended, is_excluded, summarize_ends

CRASHED = """An error occurred while calling o127.collectToPython.
: org.apache.spark.SparkException: Job aborted due to stage failure: Task 0 in stage 8.0 failed 3 times, most recent \
failure: Lost task 0.2 in stage 8.0 (TID 21) (127.0.0.1 executor driver): org.apache.spark.SparkException: it crashed
\tat org.apache.spark.Foo.bar(Foo.scala:1)
"""
RAISED = """Job aborted
Traceback (most recent call last):
  File "w.py", line 1, in f
    g()
ValueError: bad

\tat org.apache.spark.Foo.bar(Foo.scala:1)
"""


CRASH = "org.apache.spark.SparkException: it crashed"
EXCLUDED = """An error occurred while calling z:org.apache.spark.api.python.PythonRDD.collectAndServe.
: org.apache.spark.SparkException: Job aborted due to stage failure:
Aborting TaskSet 0.0 because task 0 (partition 0)
cannot run anywhere due to node and executor excludeOnFailure.
Most recent failure:
Lost task 0.1 in stage 0.0 (TID 2) (10.0.0.2 executor 1): java.io.IOException: it broke
\tat org.apache.spark.Foo.bar(Foo.scala:1)

ExcludeOnFailure behavior can be configured via spark.excludeOnFailure.*.

Driver stacktrace:
"""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (CRASHED, CRASH),
        (RAISED, "ValueError: bad"),
        (EXCLUDED, "Spark excluded every executor, the last one on 10.0.0.2: java.io.IOException: it broke"),
        (CRASHED.replace("127.0.0.1 executor driver", "10.0.0.2 executor 3"), f"on 10.0.0.2: {CRASH}"),
        ("[JAVA_GATEWAY_EXITED] Java gateway process exited", "[JAVA_GATEWAY_EXITED] Java gateway process exited"),
        ("", "RuntimeError"),
    ],
)
def test_cause_is_the_informative_line_of_an_error(text: str, expected: str) -> None:
    assert cause(RuntimeError(text)) == expected


def test_executors_lost_at_the_end_are_read_from_the_driver_log() -> None:
    log = f"26/11/23 17:46:16 ERROR TaskSchedulerImpl: Lost executor 0 on w1: {UNABLE}\nWARN Other: it goes on\n"
    assert Ended(lambda: log).summarize()[0] == "an executor on w1 ended: No space left on device"
    assert Ended(lambda: "").summarize() == ("", "")


def test_spark_errors_are_classified() -> None:
    assert (is_excluded(EXCLUDED), is_excluded(CRASHED)) == (True, False)
    assert (host(EXCLUDED), host(CRASHED), host("it broke")) == ("10.0.0.2", "", "")
    assert full("java.io.IOException: No space left on device")
    assert is_ended("Job aborted due to stage failure: Master removed our application: FAILED")
    assert is_ended("Job 0 cancelled because SparkContext was shut down")
    assert not is_ended(EXCLUDED)


TAR = "tar: llvmlite/binding/libllvmlite.so: Wrote only 7168 of 10240 bytes\ntar: Exiting with failure status"
UNABLE = "Unable to create executor due to No space left on device"


@pytest.mark.parametrize(
    ("ends", "message", "remedy"),
    [
        ([], "", ""),
        ([("w1", "Executor killed by driver.")], "", ""),
        ([("w1", "Command exited with code 1")], "an executor on w1 ended: Command exited with code 1", "stderr"),
        (
            [("w1", UNABLE), ("w2", UNABLE), ("w1", UNABLE), ("w1", "Command exited with code 1")],
            "4 executors on w1, w2 ended: No space left on device",
            "SPARK_WORKER_DIR",
        ),
        (
            [("w1", f"Unable to create executor due to {TAR}")],
            "an executor on w1 ended: No space left on device",
            "free",
        ),
        ([(f"w{i}", "") for i in range(5)], "5 executors on w0, w1, w2 and 2 more ended: no reason is given", "stderr"),
    ],
)
def test_lost_executors_are_reported_by_host(ends: list[tuple[str, str]], message: str, remedy: str) -> None:
    assert summarize_ends(ends)[0] == message
    assert remedy in summarize_ends(ends)[1]
