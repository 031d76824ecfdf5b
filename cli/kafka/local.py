"""`sluice kafka`: the project's own local Apache Kafka."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from sluice.cli.app.feed_choice import FeedNames, choose_feeds
from sluice.cli.app.invocation import Session, command, make_group
from sluice.cli.app.parameters import flag
from sluice.cli.terminal.output import bad, copyable, facts, good, table

if TYPE_CHECKING:
    from sluice.resources.local.local_kafka import ClusterStatus, LocalKafka
    from sluice.resources.project import Project

group = make_group(
    "Start and stop a local Apache Kafka (KRaft) for this project.",
    "sluice kafka start",
    "sluice kafka status",
    "sluice kafka stop",
)


def register(app: typer.Typer) -> None:
    app.add_typer(group, name="kafka")


Brokers = Annotated[
    int | None,
    typer.Option(
        metavar="1|3",
        help="Number of brokers. Set by the first start.",
        show_default="1, or the existing number",
    ),
]


Secure = Annotated[bool, flag("--secure", "Use TLS, users and ACLs. Set by the first start.", show_default=False)]


Registry = Annotated[
    bool, flag("--registry", "Also start a schema registry (Apicurio; needs Java 21).", show_default=False)
]


@command(group)
def start(session: Session, brokers: Brokers = None, secure: Secure = False, registry: Registry = False) -> None:
    """Start the local Kafka and wait until it answers.

    Its data stays in .sluice/kafka. The first start downloads Kafka (about 45 MB), once per user. Feeds without a
    `kafka.bootstrap` read from it, and so do feeds with ${KAFKA_BOOTSTRAP} while it runs.

    With --secure it has its own CA, listeners for passwords (SCRAM-SHA-512) and for certificates, and two users:
    `admin` has all rights, `sluice` only those that you grant (sluice kafka grant '*'). Feeds without security
    settings log in as `sluice`.

    --registry also starts an Apicurio Registry with Confluent's API (160 MB, downloaded once). Feeds with a section
    `registry` without a url use it.

    $ sluice kafka start --brokers 3
    $ sluice kafka start --secure
    $ sluice kafka start --registry
    """
    from sluice.resources.local.local_kafka import LocalKafka

    project = _find_project(session)
    folder = project.kafka_folder
    # A cluster that was started before goes on as it was.
    if (folder / "cluster.json").exists():
        standing = LocalKafka.attach(folder)
        brokers, secure = brokers or len(standing.broker_ids), secure or standing.secured is not None
    with session.terminal.progress() as report:
        kafka = LocalKafka(folder, brokers or 1, secure=secure).start(report)
    registry_server = project.local_registry
    if registry or registry_server.there:
        with session.terminal.working("starting the schema registry"):
            registry_server.start()
    _show(session, project, kafka)


@command(group)
def grant(session: Session, feeds: FeedNames = None) -> None:
    """Grant the user `sluice` of the secured local Kafka the rights that feeds need.

    sluice acls FEED lists them, with commands for any other Kafka.

    $ sluice kafka grant orders
    $ sluice kafka grant '*'
    """
    from sluice.pipelines.feed.rights import rights_of
    from sluice.resources.local import secured
    from sluice.resources.local.local_kafka import LocalKafka

    names = choose_feeds(session.files, feeds or (), everything=None)
    rights = [*dict.fromkeys(right for name in names for right in rights_of(session.feed(name)))]
    kafka = LocalKafka.attach(session.project.kafka_folder)
    secured.grant(kafka, rights)
    rows = [(r.operation, r.what, r.need) for r in rights]
    session.terminal.show(good("rights of user sluice"), table(("right", "on", "what for"), rows))
    session.terminal.print_document(user="sluice", rights=rights)


@command(group)
def renew(session: Session) -> None:
    """Renew the certificates of the secured local Kafka's brokers and users.

    Running brokers load theirs at once, for new connections. Each start renews certificates that expire within a month.

    $ sluice kafka renew
    """
    from sluice.resources.local.local_kafka import LocalKafka

    kafka = LocalKafka.attach(_find_project(session).kafka_folder)
    with session.terminal.working("renewing certificates"):
        kafka.renew()
    session.terminal.show(good("certificates renewed"))
    session.terminal.print_document(kafka.status())


@command(group)
def stop(session: Session) -> None:
    """Stop the local Kafka; its data stays.

    $ sluice kafka stop
    """
    from sluice.resources.local.local_kafka import LocalKafka

    project = _find_project(session)
    cluster = LocalKafka.attach(project.kafka_folder)
    with session.terminal.working("stopping Kafka"):
        cluster.stop()
        project.local_registry.stop()
    status = cluster.status()
    session.terminal.show(good(f"stopped; its data stays in {status.root}"))
    session.terminal.print_document(status)


@command(group)
def status(session: Session) -> int:
    """Show whether the local Kafka is up.

    Exit 0 if every broker answers, 1 if not.

    $ sluice kafka status --json
    """
    from sluice.resources.local.local_kafka import LocalKafka

    project = _find_project(session)
    folder = project.kafka_folder
    if not (folder / "cluster.json").exists():
        session.terminal.show(bad("no local Kafka"), "  → sluice kafka start")
        session.terminal.print_document(root=folder, answering=False, brokers=[])
        return 1
    return 0 if _show(session, project, LocalKafka.attach(folder)) else 1


def _find_project(session: Session) -> Project:
    """Return the project, or one in the current folder if it has no feeds yet."""
    from sluice.resources.project import Project

    return Project.find(session.folder, needs_feeds=False)


def _show(session: Session, project: Project, kafka: LocalKafka) -> bool:
    """Report the state of the cluster. Returns whether it answers."""
    status, registry_server = kafka.status(), project.local_registry
    section = kafka.secured.section(kafka.bootstrap, project.root) if kafka.secured else []
    brokers = "\n".join(
        f"{b.id} at {b.address}" + (f", pid {b.pid}" if b.running else ", not running") for b in status.brokers
    )
    session.terminal.show(
        good(f"Kafka {status.version} answers") if status.answering else bad(f"Kafka {status.version} does not answer"),
        facts(
            *_list_addresses(kafka, status),
            ("cluster", status.cluster_id),
            ("brokers", brokers),
            ("data", str(status.root)),
            *([("registry", registry_server.url)] if registry_server.running else []),
        ),
        *(["", "  Feeds without security settings use these:"] if section else []),
        *map(copyable, section),
    )
    session.terminal.print_document(status, registry=registry_server.url if registry_server.running else None)
    return status.answering


def _list_addresses(kafka: LocalKafka, status: ClusterStatus) -> list[tuple[str, str]]:
    if kafka.secured is None:
        return [("address", status.bootstrap)]
    return [
        ("by password", f"{status.bootstrap} (SASL_SSL, SCRAM-SHA-512)"),
        ("by certificate", f"{kafka.certificate_bootstrap} (SSL)"),
        ("users", "admin (all rights), sluice (rights granted with sluice kafka grant '*')"),
        ("Java tools", f"--command-config {kafka.secured.java_properties()}"),
    ]
