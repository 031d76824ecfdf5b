"""`sluice kafka`: the project's own local Apache Kafka."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sluice.cli.session import Session, command
from sluice.cli.terminal import bad, facts, good

if TYPE_CHECKING:
    from sluice.resources.local.kafka import ClusterStatus

group = typer.Typer(help="The local Apache Kafka (KRaft) of this project.", no_args_is_help=True)


def register(app: typer.Typer) -> None:
    app.add_typer(group, name="kafka")


Brokers = Annotated[
    int | None,
    typer.Option(
        metavar="1|3",
        help="How many brokers. The first start decides; later ones keep it.",
        show_default="1, or as many as there are",
    ),
]


@command(group)
def start(session: Session, brokers: Brokers = None) -> None:
    """Start the local Kafka and wait until it answers.

    Its data stays in .sluice/kafka. The first start fetches Kafka's jars (about 45 MB), once for this user. Feeds that
    name no Kafka read from it, and so do those that name ${KAFKA_BOOTSTRAP} while it runs.

    $ sluice kafka start --brokers 3
    """
    from sluice.resources.local.kafka import LocalKafka

    folder = session.project.kafka_folder
    if brokers is None:
        brokers = len(LocalKafka.attach(folder).status().brokers) if (folder / "cluster.json").exists() else 1
    with session.terminal.working("starting Kafka"):
        status = LocalKafka(folder, brokers).start().status()
    _show(session, status)


@command(group)
def stop(session: Session) -> None:
    """Stop the local Kafka; its data stays.

    $ sluice kafka stop
    """
    from sluice.resources.local.kafka import LocalKafka

    cluster = LocalKafka.attach(session.project.kafka_folder)
    with session.terminal.working("stopping Kafka"):
        cluster.stop()
    status = cluster.status()
    session.terminal.show(good(f"stopped; its data stays in {status.root}"))
    session.terminal.document(_document(status))


@command(group)
def status(session: Session) -> int:
    """Show whether the local Kafka runs and answers.

    Exit 0 when every broker answers, else 1.

    $ sluice kafka status --json
    """
    from sluice.resources.local.kafka import LocalKafka

    folder = session.project.kafka_folder
    if not (folder / "cluster.json").exists():
        session.terminal.show(bad("no local Kafka yet"), "  start one: sluice kafka start")
        session.terminal.document({"root": str(folder), "answering": False, "brokers": []})
        return 1
    found = LocalKafka.attach(folder).status()
    _show(session, found)
    return 0 if found.answering else 1


def _show(session: Session, status: ClusterStatus) -> None:
    brokers = "\n".join(
        f"{b.id} at {b.address}" + (f", pid {b.pid}" if b.running else ", not running") for b in status.brokers
    )
    session.terminal.show(
        good(f"Kafka {status.version} answers") if status.answering else bad(f"Kafka {status.version} does not answer"),
        facts(
            ("address", status.bootstrap),
            ("cluster", status.cluster_id),
            ("brokers", brokers),
            ("data", str(status.root)),
        ),
    )
    session.terminal.document(_document(status))


def _document(status: ClusterStatus) -> dict[str, Any]:
    brokers = [{**asdict(b), "log": str(b.log), "running": b.running} for b in status.brokers]
    return {**asdict(status), "root": str(status.root), "brokers": brokers}
