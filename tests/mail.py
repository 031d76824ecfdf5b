"""A mail server on loopback that keeps the letters: with TLS from the first byte, after STARTTLS, or without it."""

from __future__ import annotations

import base64
import ssl
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from email import message_from_bytes, policy
from email.message import EmailMessage
from pathlib import Path
from socketserver import StreamRequestHandler, ThreadingTCPServer
from threading import Thread
from typing import Any

from sluice.resources.local.secured import Authority

HOST = "127.0.0.1"


@dataclass
class Mail:
    """The state of the server: accepted `letters`, `logins` as (user, password), and the `answer` code to a letter."""

    port: int
    ca: Path
    letters: list[EmailMessage] = field(default_factory=list)
    logins: list[tuple[str, str]] = field(default_factory=list)
    answer: int = 250


@contextmanager
def run_server(folder: Path, security: str) -> Iterator[Mail]:
    """Run a server with a certificate signed by `ca`; `security` as in notify.yaml."""
    authority = Authority.new()
    key, certificate = authority.issue("mail", timedelta(days=1), [HOST])
    own, ca = folder / "mail.pem", folder / "mail-ca.pem"
    own.write_bytes(key + certificate)
    ca.write_bytes(authority.certificate_pem())
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(own)
    mail = Mail(0, ca)

    class Session(StreamRequestHandler):
        def handle(self) -> None:
            with suppress(OSError):
                if security == "tls":
                    self._wrap()
                self._say("220 here")
                while line := self.rfile.readline().decode().strip():
                    self._answer(*line.partition(" ")[::2])

        def finish(self) -> None:
            with suppress(OSError):
                super().finish()
            self.request.close()  # the server closes only the plain socket

        def _answer(self, word: str, rest: str) -> None:
            match word.upper():
                case "EHLO":
                    offered = "STARTTLS" if security == "starttls" else "8BITMIME"
                    self._say("250-here", f"250-{offered}", "250 AUTH PLAIN")
                case "STARTTLS":
                    self._say("220 go on")
                    self._wrap()
                case "AUTH":
                    _, user, password = base64.b64decode(rest.split()[-1]).decode().split("\0")
                    mail.logins.append((user, password))
                    self._say("235 welcome")
                case "DATA":
                    self._say("354 go on")
                    text = b"".join(iter(self.rfile.readline, b".\r\n"))
                    if mail.answer == 250:
                        letter: Any = message_from_bytes(text, policy=policy.default)
                        mail.letters.append(letter)
                    self._say(f"{mail.answer} that was it")
                case "QUIT":
                    self._say("221 bye")
                case _:
                    self._say("250 well")

        def _say(self, *lines: str) -> None:
            self.wfile.write("".join(f"{line}\r\n" for line in lines).encode())

        def _wrap(self) -> None:
            self.request = context.wrap_socket(self.request, server_side=True)
            self.setup()

    with ThreadingTCPServer((HOST, 0), Session) as server:
        server.daemon_threads = True
        Thread(target=server.serve_forever, daemon=True).start()
        mail.port = server.server_address[1]
        yield mail
        server.shutdown()
