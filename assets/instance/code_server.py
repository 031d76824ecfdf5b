"""`dagster code-server start`, whose process for the code is replaced when it dies.

    python -m sluice.assets.instance.code_server -m sluice.assets.definitions -h 127.0.0.1 -p 4000

takes Dagster's options. Dagster's code server forwards requests to a process that has loaded the code. When that
process is killed, or shuts itself down because the machine was suspended for 30 seconds, Dagster starts no other until
a user presses Reload (dagster-io/dagster#24050), and no schedule or sensor ticks. This server starts another within
seconds; active runs go on.
"""

from __future__ import annotations

import argparse
import os
import runpy
import sys
import threading
from contextlib import suppress
from pathlib import Path

import grpc

_CHECK_SECONDS = 2.0
"""Seconds between two checks."""
_LONGEST = 300.0
"""The longest pause, in seconds, between attempts to start a process: each failure doubles it."""
_LOAD_SECONDS = 300.0
_RELOAD = "/api.DagsterApi/ReloadCode"
"""A method of Dagster's gRPC API; its request has no fields."""


def main(arguments: list[str]) -> None:
    """Serve until SIGTERM, as `dagster code-server start` does."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("-p", "--port", default=os.environ.get("DAGSTER_CODE_SERVER_PORT"))
    parser.add_argument("-s", "--socket", default=os.environ.get("DAGSTER_CODE_SERVER_SOCKET"))
    parser.add_argument("-h", "--host", default=os.environ.get("DAGSTER_CODE_SERVER_HOST", "localhost"))
    options, _ = parser.parse_known_args(arguments)
    host = "127.0.0.1" if options.host == "0.0.0.0" else options.host
    address = f"unix:{options.socket}" if options.socket else f"{host}:{options.port}"
    threading.Thread(target=_replace_dead, args=(address,), name="code-server-guard", daemon=True).start()
    sys.argv = ["dagster", "code-server", "start", *arguments]
    runpy.run_module("dagster", run_name="__main__", alter_sys=True)


def _replace_dead(address: str) -> None:
    """Have the code loaded again whenever the process that loaded it is gone. Does not return."""
    pause = threading.Event()
    while not _has_process():  # Dagster starts the first
        pause.wait(_CHECK_SECONDS)
    wait = _CHECK_SECONDS
    while True:
        pause.wait(wait)
        if _has_process():
            wait = _CHECK_SECONDS
            continue
        print("sluice: the code server's process has died; starting another", file=sys.stderr, flush=True)
        with suppress(grpc.RpcError), grpc.insecure_channel(address) as channel:
            channel.unary_unary(_RELOAD)(b"", timeout=_LOAD_SECONDS)  # fails after the start: the old one is gone
        wait = min(wait * 2, _LONGEST)


def _has_process() -> bool:
    """Return whether a child of this process serves the code; True where the system has no /proc."""
    own = str(os.getpid()).encode()
    if not (processes := list(Path("/proc").glob("[0-9]*"))):
        return True
    for process in processes:
        with suppress(OSError):
            state, parent = (process / "stat").read_bytes().rpartition(b")")[2].split()[:2]
            if parent == own and state not in b"ZX" and b"\0grpc\0" in (process / "cmdline").read_bytes():
                return True
    return False


if __name__ == "__main__":
    main(sys.argv[1:])
