"""`sluice pack`: what Spark's executors need of Python, as one archive."""

from __future__ import annotations

import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from sluice.cli.app.invocation import Session, command
from sluice.cli.terminal.number_format import size
from sluice.cli.terminal.output import facts, good

Output = Annotated[
    Path | None,
    typer.Option(
        "--output", metavar="FILE", help="Copy the pack to this file, which ends in .tar.gz.", show_default=False
    ),
]


With = Annotated[
    list[str] | None,
    typer.Option(
        "--with", metavar="MODULE", help="A module of yours, to be packed too; repeatable.", show_default=False
    ),
]


def register(app: typer.Typer) -> None:
    command(app)(pack)


def pack(session: Session, output: Output = None, modules: With = None) -> None:
    """Pack what Spark's executors need: Sluice without its commands, and the packages that tasks import.

    A run on a cluster makes the pack by itself and sends it. Make it by hand to see its size, to build it before the
    first run, or to put it where executors find it, and name that place in the feed:

        spark: {master: yarn, environment: "hdfs:///sluice/pack.tar.gz"}

    Executors then need a Python of the same minor version as this one, on the same kind of machine, and nothing else. A
    pack is made once for a version of Sluice and of these packages (half a minute), and is kept in the user's cache.

    Modules of your own, such as a token provider, go into the pack with what their packages require, if you name them
    here, or in the feed: `spark: {modules: [company.tokens]}`.

    $ sluice pack
    $ sluice pack --with company.tokens --output tokens.tar.gz
    $ sluice pack --output /mnt/shared/sluice.tar.gz
    """
    from sluice.pipelines.errors import UsageError
    from sluice.resources.spark import pack_archive as packing

    if output is not None and not output.name.endswith((".tar.gz", ".tgz")):
        raise UsageError(f"{output} is no name for a pack", remedy="Spark goes by the name: let it end in .tar.gz")
    with session.terminal.progress() as meter:
        built = packing.pack(meter, modules or ())
    if output is not None:
        shutil.copyfile(built.path, output)
    session.terminal.show(
        good(f"{'packed' if built.created else 'packed before'}: {size(built.bytes)}, {size(built.unpacked)} unpacked"),
        facts(
            ("file", str(output or built.path)),
            ("python", packing.python().removeprefix("python")),
            ("holds", ", ".join(["sluice", *(modules or ()), *built.distributions])),
        ),
    )
    session.terminal.print_document(asdict(built) | {"path": str(output or built.path), "python": packing.python()})
