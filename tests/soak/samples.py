"""A line of measurements each minute: processes, temporary folders, Dagster's database, ledgers, caches, lag."""

from __future__ import annotations

import os
import re
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg2
from botocore.exceptions import ClientError

from sluice.cli.inspect.metrics import PORT
from tests.faults.nemeses.engines import Process
from tests.soak.feeds import FEEDS
from tests.soak.site import Site

_ROLES = (
    ("code", b"code_server", "code server"),
    ("code", b"\0grpc", "code server's child"),
    ("daemon", b"dagster-daemon", "daemon"),
    ("web", b"dagster-webserver", "web server"),
    ("metrics", b"metrics", "metrics"),
)
"""Resident processes: the unit, a word of the command line, the name."""
_STATES = {"01": "established", "06": "time_wait", "08": "close_wait", "0A": "listen"}
_MIB = 1 << 20
_LAG = re.compile(r'^sluice_lag_offsets\{feed="(\w+)",[^}]*\} (\S+)$', re.M)


@dataclass
class Sampler:
    """Measures the site. A value that cannot be read now is left out."""

    site: Site

    def measure(self) -> dict[str, Any]:
        """Returns one line of `metrics.jsonl`."""
        line: dict[str, Any] = {
            "processes": dict(self._measure_residents()),
            "count": len(self.site.processes.list_alive()),
        }
        line |= {"temporary": measure_folder(self.site.temporary), "home": measure_folder(self.site.deployment.home)}
        line["project"] = self._measure_project()
        line["caches"] = measure_folder(Path.home() / ".cache" / "sluice")
        line["lag"] = self._read_lag()
        line["ledger"] = self._count_entries()
        with suppress(psycopg2.Error):
            line |= self._measure_database()
        self.site.store.requests.clear()  # of the proxies of the scene itself, which keep every request
        self.site.registry.requests.clear()
        return line

    # -- processes

    def _measure_residents(self) -> Iterator[tuple[str, dict[str, Any]]]:
        states = dict(_read_states())
        for unit in ("code", "daemon", "web", "metrics"):
            for process in self.site.list_tree(unit):
                name = next((n for u, word, n in _ROLES if u == unit and word in process.command), "")
                if name and b"spawn_main" not in process.command:
                    with suppress(OSError, ValueError):
                        yield name, _measure_process(process, states)

    # -- disks

    def _measure_project(self) -> dict[str, float]:
        """The project without its lake: the leavings of runs and commands."""
        hidden = self.site.project / ".sluice"
        sizes = [measure_folder(p) for p in hidden.iterdir() if p.name != "lake"] if hidden.exists() else []
        return {"entries": sum(s["entries"] for s in sizes), "mib": round(sum(s["mib"] for s in sizes), 2)}

    def _measure_database(self) -> dict[str, Any]:
        if self.site.postgres is None:
            return {"runs": len(list((self.site.deployment.home / "history" / "runs").glob("*.db")))}
        server, name = self.site.postgres
        address = psycopg2.connect(host=str(server.folder), user=server.user, dbname=name)
        with closing(address) as connection, connection.cursor() as cursor:
            cursor.execute("select pg_database_size(current_database()), (select count(*) from runs)")
            size, runs = cursor.fetchone() or (0, 0)
            cursor.execute("select count(*) from pg_stat_activity where datname = current_database()")
            (connections,) = cursor.fetchone() or (0,)
        return {"database": round(size / _MIB, 2), "runs": runs, "connections": connections - 1}

    # -- feeds

    def _read_lag(self) -> dict[str, float]:
        """Returns the pending offsets of each feed, by `sluice metrics`."""
        with suppress(OSError):
            address = f"http://{self.site.deployment.address}:{PORT}/metrics"
            with urllib.request.urlopen(address, timeout=20) as answer:
                text = answer.read().decode()
            return {feed: float(lag) for feed, lag in _LAG.findall(text)}
        return {}

    def _count_entries(self) -> dict[str, int]:
        bucket, _, prefix = self.site.lake.removeprefix("s3://").partition("/")
        counts = {}
        with closing(self.site.backend.open_client()) as client:
            for feed in FEEDS:
                below = f"_sluice/{feed.name}/log/"
                if feed.local:
                    counts[feed.name] = sum(1 for _ in (self.site.project / ".sluice" / "lake" / below).glob("*.json"))
                    continue
                with suppress(ClientError):  # moto's, of a list while many requests write
                    pages = client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=f"{prefix}/{below}")
                    counts[feed.name] = sum(len(page.get("Contents", ())) for page in pages)
        return counts


def measure_folder(folder: Path) -> dict[str, float]:
    """Returns how many entries a folder has, at any depth, and their size in MiB."""
    entries = size = 0
    for parent, folders, files in os.walk(folder):
        entries += len(folders) + len(files)
        for name in files:
            with suppress(OSError):
                size += os.lstat(os.path.join(parent, name)).st_size
    return {"entries": entries, "mib": round(size / _MIB, 2)}


def _measure_process(process: Process, states: dict[str, str]) -> dict[str, Any]:
    status = Path("/proc", str(process.pid))
    memory = dict(re.findall(r"^(Pss_Anon|Rss): +(\d+) kB", (status / "smaps_rollup").read_text(), re.M))
    threads = re.search(r"^Threads:\s+(\d+)", (status / "status").read_text(), re.M)
    links = []
    for descriptor in (status / "fd").iterdir():
        with suppress(OSError):
            links.append(os.readlink(descriptor))
    inodes = [link.removeprefix("socket:[").removesuffix("]") for link in links if link.startswith("socket:")]
    return {
        "pid": process.pid,
        # Not all of Pss: a process's share of a library's pages rises when another process that uses them ends.
        "memory": round(int(memory.get("Pss_Anon", 0)) / 1024, 1),
        "rss": round(int(memory.get("Rss", 0)) / 1024, 1),
        "threads": int(threads[1]) if threads else 0,
        "files": len(links),
        "sockets": len(inodes),
        "states": dict(Counter(states.get(i, "other") for i in inodes)),
    }


def _read_states() -> Iterator[tuple[str, str]]:
    """Yields inode and state of each TCP socket of this machine."""
    for name in ("tcp", "tcp6"):
        for line in Path("/proc/net", name).read_text().splitlines()[1:]:
            fields = line.split()
            yield fields[9], _STATES.get(fields[3], "other")
