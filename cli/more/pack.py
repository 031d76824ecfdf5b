"""`sluice pack`: what Spark's executors need of Python, as one archive."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Annotated

import typer

from sluice.cli.app.invocation import Session, command
from sluice.cli.app.parameters import option
from sluice.cli.terminal.output import facts, good
from sluice.cli.terminal.text_layout import size

Output = Annotated[Path | None, option("--output", "FILE", "Copy the pack to this file (.tar.gz).")]


With = Annotated[list[str] | None, option("--with", "MODULE", "Add this module of yours; repeatable.")]


def register(app: typer.Typer) -> None:
    command(app)(pack)


def pack(session: Session, output: Output = None, modules: With = None) -> None:
    """Build the archive of Python packages that Spark's executors need.

    It contains Sluice without its commands, and the packages that tasks import. Runs on a cluster build and send it by
    themselves. Build it by hand to see its size, to save time in the first run, or to store it where executors can read
    it, with that address in the feed:

        spark: {master: yarn, environment: "hdfs:///sluice/pack.tar.gz"}

    Executors then need only a Python of the same minor version and platform as this one. A pack is built once per
    version of Sluice and these packages (half a minute), and stays in the user's cache.

    --with, or `spark: {modules: [company.tokens]}` in the feed, adds modules of yours, such as a token provider, and
    the packages that they require.

    $ sluice pack
    $ sluice pack --with company.tokens --output tokens.tar.gz
    $ sluice pack --output /mnt/shared/sluice.tar.gz
    """
    from sluice.pipelines.errors import UsageError
    from sluice.resources.spark import pack_archive as packing

    if output is not None and not output.name.endswith((".tar.gz", ".tgz")):
        raise UsageError(
            f"{output} does not end in .tar.gz", remedy="choose a name that ends in .tar.gz, which Spark requires"
        )
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
    session.terminal.print_document(built, path=output or built.path, python=packing.python())
