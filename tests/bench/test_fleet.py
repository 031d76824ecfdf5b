"""Measuring a fleet, without Kafka: the proxy counts requests, and the report shows the figures."""

from __future__ import annotations

import socket
import struct
from contextlib import closing
from threading import Thread

from bench.counting import Counting
from bench.fleet import FleetReport, Took, fleet_view
from tests.bench.printing import print_view


def test_requests_are_counted_by_api_and_passed_on() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def echo() -> None:
            client, _ = server.accept()
            with client:
                while data := client.recv(1 << 16):
                    client.sendall(data)

        Thread(target=echo, daemon=True).start()
        with closing(Counting(lambda: server.getsockname())) as counting:
            requests = [struct.pack(">ihh", 4, api, 0) for api in (3, 3, 9, 999)]
            with socket.create_connection(("127.0.0.1", counting.port)) as client:
                client.sendall(b"".join(requests))
                got = b""
                while len(got) < 32:
                    got += client.recv(64)
            assert got == b"".join(requests)
            assert counting.seen == {"Metadata": 2, "OffsetFetch": 1, "API 999": 1}
            assert counting.connections == 1
            counting.reset()
            assert not counting.seen


def test_sequential_figures_are_extrapolated_to_all_feeds() -> None:
    machine = {"cpu": "some processor", "cores": 2}
    took = (
        Took("one by one", 3, 1, 30.0, 36.0, 1.0, {"Metadata": 30}, 9),
        Took("in one run", 1, 50, 40.0, 60.0, 2.0, {"Metadata": 50, "Fetch": 50}, 4),
        Took("nothing pending", 1, 50, 10.0, 12.0, 0.1, {"Metadata": 5}, 2),
        Took("status", 1, 50, 1.0, 1.0, None, {"Metadata": 2}, 2),
    )
    report = FleetReport(50, 3, 300, took, machine)
    text = print_view(fleet_view(report), 120)
    assert "600 s of CPU, 500 s: reckoned from 3 of them" in text
    assert "10.0 times less CPU" in text
    assert "in one run 50 40.0 60.0 1.20 100 2.0" in text
    assert report.document()["took"][1]["requests"] == {"Metadata": 50, "Fetch": 50}
