"""The extras of pyproject.toml: which one installs a package.

Sluice without extras reads: `sluice.read`, `files`, `explain`, `audit`, `report`. A missing package raises SetupError,
which names its extra.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

from sluice.pipelines.errors import SetupError

VERSION = "0.2.0"
DISTRIBUTION = "kafka-sluice"
"""The name to install by. `sluice` on the public index is another project."""

BRINGS = {
    "kafka": "kafka",
    "cramjam": "kafka",
    "crc32c": "kafka",
    "cryptography": "kafka",
    "gssapi": "kerberos",
    "dagster": "dagster",
    "pyspark": "spark",
    "py4j": "spark",
    "duckdb": "duckdb",
    "dagster_webserver": "ui",
    "boto3": "s3",
    "botocore": "s3",
    "obstore": "gcs",
    "great_expectations": "contracts",
    "pandas": "pandas",
    "polars": "polars",
    "kazoo": "zookeeper",
    "dagster_postgres": "postgres",
    "airflow": "airflow",
    "dagster_k8s": "k8s",
    "prometheus_client": "metrics",
    "pyiceberg": "iceberg",
    "sqlalchemy": "iceberg",
    "opentelemetry": "otel",
    "openlineage": "openlineage",
    "deltalake": "delta",
    "google": "protobuf",
    "grpc_tools": "protobuf",
}
"""Packages, as they are imported, and the extra that brings each."""


def explain_import_error(error: ImportError) -> SetupError | None:
    """Returns the error with the extra's name; None if no extra installs the missing package."""
    package = (error.name or "").partition(".")[0]
    if package == "distutils":
        return SetupError(
            "PySpark 3.5 needs setuptools on Python 3.12 and newer",
            remedy="pip install setuptools; or install PySpark 4.0 or newer",
        )
    if package not in BRINGS:
        return None
    return build_missing_error(package)


def install(extra: str = "") -> str:
    """Return the command that installs Sluice, with this extra."""
    return f"pip install '{DISTRIBUTION}[{extra}]'" if extra else f"pip install {DISTRIBUTION}"


def build_missing_error(*packages: str) -> SetupError:
    """Returns the error for missing packages."""
    verb = "is" if len(packages) == 1 else "are"
    extras = ",".join(dict.fromkeys(BRINGS[package] for package in packages))
    return SetupError(f"{', '.join(packages)} {verb} not installed", remedy=install(extras))


def require(*packages: str) -> None:
    """Raise SetupError with all of the packages that are not installed; none is imported."""
    if missing := [package for package in packages if find_spec(package) is None]:
        raise build_missing_error(*missing)


@contextmanager
def name_missing() -> Iterator[None]:
    """Raise SetupError if the block imports a missing package of an extra."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (named_error := explain_import_error(error)) is None:
            raise
        raise named_error from None
