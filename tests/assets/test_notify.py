"""Notifications of the sensor's findings: by webhook, e-mail or command; repeated until accepted."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import quote

import dagster as dg
import pytest

from sluice.assets.runs.run_session import RunSession
from sluice.assets.schedules.sensors import SensorCursor, Tick
from sluice.pipelines.errors import Failed, FeedError
from sluice.pipelines.feed.project_files import NotifySettings
from sluice.resources.observe.notifications import Alert, notify
from tests import mail
from tests.assets.world import World
from tests.resources.kafka.tools import wait_until

TOKEN = "T000-canary-secret"


@dataclass
class Chat:
    """A Slack-compatible server; `heard` has the texts that it received."""

    address: str = ""
    answer: int = 200
    heard: list[str] = field(default_factory=list)
    requests: list[tuple[str, str, dict[str, Any]]] = field(default_factory=list)
    waits_for: Path | None = None
    """The server does not answer before this file exists."""


@pytest.fixture
def chat() -> Iterator[Chat]:
    chat = Chat()

    class Hook(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if chat.waits_for:
                wait_until(chat.waits_for.exists, 30)
            if chat.answer == 200:
                chat.heard.append(json.loads(body).get("text", ""))
                chat.requests.append((self.path, self.headers.get("Authorization", ""), json.loads(body)))
            self.send_response(chat.answer)
            self.send_header("Location", chat.address)
            self.end_headers()

        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    server = HTTPServer(("127.0.0.1", 0), Hook)
    Thread(target=server.serve_forever, daemon=True).start()
    chat.address = f"http://127.0.0.1:{server.server_port}/{TOKEN}"
    yield chat
    server.shutdown()
    server.server_close()


def run_tick(world: World, instance: dg.DagsterInstance, cursor: str | None = None) -> Tick:
    sensor_tick = Tick(RunSession(world.project, world.open_ports), SensorCursor.read(cursor))
    sensor_tick.run(instance, lambda: 0.0)
    sensor_tick.send()
    return sensor_tick


def configure(world: World, **keys: Any) -> None:
    (world.project.root / "notify.yaml").write_text(json.dumps(keys))


@pytest.fixture
def late(world: World) -> World:
    """A feed that is hours late."""
    world.land_unrecorded()
    world.grow(1, 130)
    world.at(9)
    return world


def test_finding_is_sent_when_new_and_when_resolved(late: World, instance: dg.DagsterInstance, chat: Chat) -> None:
    configure(late, webhook=chat.address)
    first = run_tick(late, instance)
    (text,) = chat.heard
    assert text.startswith(f"Sluice, {late.project.root.name}:\n• orders: the oldest pending record")
    assert "sluice run orders" in text
    assert "; since 20" in text
    assert "If nobody acts: the lag lasts or grows" in text
    second = run_tick(late, instance, first.cursor.dump())
    assert len(chat.heard) == 1, "nothing new"
    late.run()
    run_tick(late, instance, second.cursor.dump())
    assert "orders: passed: lag" in chat.heard[1]


def test_pagers_open_one_incident_for_a_finding_and_close_it(
    late: World, instance: dg.DagsterInstance, chat: Chat
) -> None:
    """The documents are those of PagerDuty's Events API v2 and of Opsgenie's Alert API."""
    opsgenie = {"key": TOKEN, "url": f"{chat.address}/v2/alerts"}
    configure(late, pagerduty={"key": TOKEN, "url": f"{chat.address}/v2/enqueue"}, opsgenie=opsgenie)
    chat.answer = 503
    first = run_tick(late, instance)
    assert first.news[-1] == "not sent: PagerDuty answers 503; Opsgenie answers 503"
    assert TOKEN not in f"{first.news} {first.cursor.dump()}"
    chat.answer = 200
    second = run_tick(late, instance, first.cursor.dump())
    late.run()
    third = run_tick(late, instance, second.cursor.dump())
    assert third.cursor.unsent == ()
    (_, _, trigger), (path, login, alert), (_, _, resolve), (close, _, _) = chat.requests
    assert (trigger["event_action"], resolve["event_action"]) == ("trigger", "resolve")
    assert trigger["routing_key"] == resolve["routing_key"] == TOKEN
    assert trigger["dedup_key"] == resolve["dedup_key"] == f"Sluice, {late.project.root.name}: orders lag"
    assert trigger["payload"]["severity"] == "warning"
    assert "If nobody acts" in trigger["payload"]["summary"]
    assert (path, login) == (f"/{TOKEN}/v2/alerts", f"GenieKey {TOKEN}")
    assert (alert["alias"], alert["priority"]) == (trigger["dedup_key"], "P3")
    assert close == f"/{TOKEN}/v2/alerts/{quote(alert['alias'], safe='')}/close?identifierType=alias"


def test_unsent_finding_is_retried_at_next_tick_and_url_is_redacted(
    late: World, instance: dg.DagsterInstance, chat: Chat
) -> None:
    configure(late, webhook=chat.address)
    chat.answer = 503
    first = run_tick(late, instance)
    assert first.news[-1] == "not sent: the webhook answers 503"
    assert TOKEN not in f"{first.news} {first.cursor.dump()} {late.project.notify()!r}"
    chat.answer = 200
    second = run_tick(late, instance, first.cursor.dump())
    assert len(chat.heard) == 1
    assert "the oldest pending record" in chat.heard[0]
    assert second.cursor.unsent == ()


def test_invalid_webhook_url_is_redacted_and_other_channels_are_used(tmp_path: Path) -> None:
    command = [sys.executable, "-c", f"open({str(tmp_path / 'lines')!r}, 'w').write(open(0).read())"]
    settings = NotifySettings.model_validate({"webhook": f"http://127.0.0.1:9/{TOKEN} x", "command": command})
    with pytest.raises(Failed, match="does not answer") as failure:
        notify(settings, "Sluice:", [Alert("a line")])
    assert TOKEN not in str(failure.value)
    assert (tmp_path / "lines").read_text() == "a line\n"


def test_channels_are_notified_concurrently(chat: Chat, tmp_path: Path) -> None:
    chat.waits_for = tmp_path / "ran"
    command = [sys.executable, "-c", f"open({str(chat.waits_for)!r}, 'w')"]
    notify(NotifySettings.model_validate({"webhook": chat.address, "command": command}), "Sluice:", [Alert("a line")])
    assert chat.heard == ["Sluice:\n• a line"]


def test_webhook_redirect_counts_as_failure(chat: Chat) -> None:
    chat.answer = 301
    settings = NotifySettings.model_validate({"webhook": chat.address})
    with pytest.raises(Failed, match="the webhook answers 301"):
        notify(settings, "Sluice:", [Alert("a line")])


def test_names_with_invalid_unicode_are_sent(tmp_path: Path) -> None:
    lines = tmp_path / "lines"
    command = [sys.executable, "-c", f"open({str(lines)!r}, 'wb').write(open(0, 'rb').read())"]
    with mail.run_server(tmp_path, "none") as server:
        where = {"server": mail.HOST, "port": server.port, "security": "none"}
        settings = {"command": command, "email": {**where, "sender": "a@example.com", "to": ["b@example.com"]}}
        notify(NotifySettings.model_validate(settings), "Sluice,\n\udcff:", [Alert("orders\udcff: größer")])
    (letter,) = server.letters
    assert letter["Subject"] == "Sluice, ?"
    assert letter.get_content().splitlines() == lines.read_text().splitlines() == ["orders?: größer"]


def test_hostile_text_reaches_no_receiver_as_it_is(chat: Chat, tmp_path: Path) -> None:
    lines = tmp_path / "lines"
    command = [sys.executable, "-c", f"open({str(lines)!r}, 'wb').write(open(0, 'rb').read())"]
    pager = {"key": "a key", "url": chat.address}
    evil = "<!channel> <script>\x00\x1b[2J\u202e\r\nBcc: x@example.com 😀" + "n" * 10_000
    with mail.run_server(tmp_path, "none") as server:
        email = {
            "server": mail.HOST,
            "port": server.port,
            "security": "none",
            "sender": "a@b.example",
            "to": ["c@d.example"],
        }
        settings = {"webhook": chat.address, "pagerduty": pager, "opsgenie": pager, "command": command, "email": email}
        notify(NotifySettings.model_validate(settings), "Sluice:", [Alert(evil, "a key", severe=True)])
    (letter,), (slack, pagerduty, opsgenie) = server.letters, (document for _, _, document in chat.requests)
    assert letter["Bcc"] is None
    assert "<!channel>" not in slack["text"]
    texts = slack["text"], pagerduty["payload"]["summary"], opsgenie["description"], letter.get_content()
    for text in (*texts, lines.read_text()):
        assert r"\x00\x1b[2J\u202e Bcc: x@example.com 😀nnn" in text
        assert all(line.isprintable() for line in text.splitlines())
        assert len(text) < 4000


@pytest.mark.parametrize("security", ["tls", "starttls", "none"])
def test_finding_is_sent_by_email(
    late: World, instance: dg.DagsterInstance, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, security: str
) -> None:
    with mail.run_server(tmp_path, security) as server:
        monkeypatch.setenv("SSL_CERT_FILE", str(server.ca))
        login = {"user": "sluice", "password": TOKEN} if security != "none" else {}
        to = ["data@example.com", "night@example.com"]
        email = {"server": mail.HOST, "port": server.port, "security": security, "to": to}
        configure(late, email={**email, **login, "sender": "sluice@example.com"})
        server.answer = 451
        first = run_tick(late, instance)
        assert first.news[-1] == "not sent: the mail server answers 451"
        assert TOKEN not in f"{first.news} {first.cursor.dump()} {late.project.notify()!r}"
        server.answer = 250
        second = run_tick(late, instance, first.cursor.dump())
    assert second.cursor.unsent == ()
    (letter,) = server.letters
    assert (letter["Subject"], letter["To"]) == (f"Sluice, {late.project.root.name}", ", ".join(to))
    assert letter.get_content().startswith("orders: the oldest pending record")
    assert server.logins == [("sluice", TOKEN)] * (2 if login else 0)


def test_untrusted_mail_server_gets_no_password(late: World, instance: dg.DagsterInstance, tmp_path: Path) -> None:
    with mail.run_server(tmp_path, "tls") as server:
        login = {"user": "sluice", "password": TOKEN, "sender": "sluice@example.com", "to": ["data@example.com"]}
        configure(late, email={"server": mail.HOST, "port": server.port, **login})
        ended = run_tick(late, instance)
    assert "the mail server takes no letter" in ended.news[-1]
    assert (server.logins, server.letters) == ([], [])


def test_mail_password_without_tls_is_refused(late: World) -> None:
    email = {"server": mail.HOST, "security": "none", "user": "sluice", "password": TOKEN}
    configure(late, email={**email, "sender": "sluice@example.com", "to": ["data@example.com"]})
    with pytest.raises(FeedError, match="never sent without TLS") as raised:
        late.project.notify()
    assert TOKEN not in str(raised.value)


def test_dagster_sends_email_for_failed_run(
    world: World, instance: dg.DagsterInstance, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sensor of Dagster itself, next to Sluice's definitions, as in docs/operating.md."""
    with mail.run_server(tmp_path, "tls") as server:
        monkeypatch.setenv("SSL_CERT_FILE", str(server.ca))
        to = {"email_from": "sluice@example.com", "email_password": TOKEN, "email_to": ["data@example.com"]}
        sensor: Any = dg.make_email_on_run_failure_sensor(**to, smtp_host=mail.HOST, smtp_port=server.port)

        @dg.op
        def lands() -> None:
            raise FeedError("orders: no such topic", remedy="name another")

        @dg.job
        def land_orders() -> None:
            lands()

        failed = land_orders.execute_in_process(instance=instance, raise_on_error=False)
        event = failed.get_run_failure_event()
        context = dg.build_run_status_sensor_context(sensor.name, event, instance, failed.dagster_run)
        sensor(context.for_run_failure())
    (letter,) = server.letters
    assert letter["Subject"] == "Dagster Run Failed: land_orders"
    assert server.logins == [("sluice@example.com", TOKEN)]


def test_command_receives_findings_on_stdin(late: World, instance: dg.DagsterInstance, tmp_path: Path) -> None:
    output = tmp_path / "said"
    code = f"import sys, pathlib; pathlib.Path({str(output)!r}).write_text(sys.stdin.read())"
    configure(late, command=[sys.executable, "-c", code])
    run_tick(late, instance)
    (line,) = output.read_text().splitlines()
    assert line.startswith("orders: the oldest pending record")


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        (["/nowhere/page"], "/nowhere/page cannot be run"),
        ([sys.executable, "-c", "raise SystemExit(3)"], "ended with 3"),
    ],
)
def test_failing_command_does_not_fail_the_tick(
    late: World, instance: dg.DagsterInstance, command: list[str], reason: str
) -> None:
    configure(late, command=command)
    ended = run_tick(late, instance)
    assert reason in ended.news[-1]
    assert ended.looked == 1
    assert ended.cursor.unsent


def test_feed_text_cannot_mention_a_channel(world: World, instance: dg.DagsterInstance, chat: Chat) -> None:
    configure(world, webhook=chat.address)
    (world.project.feeds_folder / "bad.yaml").write_text("topics: '<!channel>'\nstart: earliest\n")
    first = run_tick(world, instance)
    assert "<!channel>" not in "".join(chat.heard)
    assert chat.heard
    run_tick(world, instance, first.cursor.dump())
    assert len(chat.heard) == 1, "a file that stays wrong is reported once"


def test_invalid_notify_file_is_reported_without_secret(late: World, instance: dg.DagsterInstance) -> None:
    configure(late, webhook=f"ftp://chat.example/{TOKEN}", to="me")
    ended = run_tick(late, instance)
    assert "notify.yaml" in ended.news[-1]
    assert TOKEN not in ended.news[-1]
    with pytest.raises(FeedError):
        late.project.notify()


def test_nothing_is_sent_without_notify_file(late: World, instance: dg.DagsterInstance) -> None:
    assert late.project.notify() == NotifySettings()
    assert run_tick(late, instance).cursor.unsent == ()
