"""Checks a lake in an object store, without writing: clock, rights, and settings of the bucket that keep old objects.

A right is checked by a request that needs it and cannot change anything: for an object that does not exist, or on
a condition that does not hold.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import suppress

from sluice.pipelines.errors import NotAuthorized, SluiceError
from sluice.pipelines.feed.stores import StoreSettings
from sluice.pipelines.model.health import Diagnosis, of_error, report_failure, report_ok, report_skipped
from sluice.resources.health import Check
from sluice.resources.lake import open_store
from sluice.resources.lake.object_lake import MAX_SKEW_S, PROBE_FOLDER, PROBE_NOTE, ObjectLake
from sluice.resources.lake.store_client import Signal, StoreClient, describe_lead

LEDGERS = "_sluice"
HASTY_MS = 5_000


def open_hastily(address: str, settings: StoreSettings) -> ObjectLake:
    """The lake, whose requests use short timeouts regardless of the feed's settings."""
    waits = {n: min(HASTY_MS, getattr(settings, n)) for n in ("connect_timeout_ms", "read_timeout_ms")}
    return open_store(address, settings.model_copy(update=waits | {"retries": 1}))


def check_store(lake: ObjectLake) -> Iterator[Diagnosis]:
    """Check the clock and the right to list; if it is there, the other rights and the bucket's settings."""
    client, prefix = lake.client, lake.client.home.prefix
    yield from _check_clock(client.measure_lead(f"{prefix}{LEDGERS}/"))
    yield from client.check_credentials()
    try:
        first = next(iter(lake.list(LEDGERS)), None)
    except NotAuthorized as error:
        yield _report_missing(client, "list", error)
        return
    except SluiceError as error:
        yield of_error("listing", error)
        return
    summary = "the ledger can be listed" if first else "it can be listed, and nothing has landed yet"
    yield report_ok("listing", f"{lake.uri}: {summary}")
    yield from _check_rights(client)
    yield from client.check_retention(prefix + PROBE_NOTE)


def check_probe(lake: ObjectLake) -> Iterator[Diagnosis]:
    """Check for the note of the first writing process, which shows that the store passed the probe."""
    title = "conditional writes"
    try:
        is_tested = lake.is_tested()
    except SluiceError as error:
        yield report_skipped(title, f"not checked: {error.message}")
        return
    if is_tested:
        yield report_ok(title, f"the store keeps them: tested by a run, which left {PROBE_NOTE}")
    else:
        yield report_skipped(title, "only a write shows it; the first run tests them before it writes anything else")


IN_A_STORE: tuple[Check[ObjectLake], ...] = (
    Check("listing", check_store),
    Check("conditional writes", check_probe),
)


def _check_rights(client: StoreClient) -> Iterator[Diagnosis]:
    key = f"{client.home.prefix}{PROBE_FOLDER}{secrets.token_hex(8)}"
    granted = []
    for right, attempt in client.list_attempts().items():
        try:
            with suppress(Signal):  # the object does not exist
                attempt(key)
            granted.append(right)
        except NotAuthorized as error:
            yield _report_missing(client, right, error)
        except SluiceError as error:
            yield report_skipped(f"right to {right}", f"the store does not show it: {error.message}")
    if granted:
        yield report_ok("rights", f"this user may {', '.join(granted)} below the lake")


def _report_missing(client: StoreClient, right: str, error: NotAuthorized) -> Diagnosis:
    if "forbids" not in error.message:  # the credentials are wrong or expired
        return of_error("credentials", error)
    return report_failure(f"right to {right}", error.message, f"grant {client.GRANTS[right]}")


def _check_clock(ahead: float | None) -> Iterator[Diagnosis]:
    if ahead is None:
        return
    if abs(ahead) > MAX_SKEW_S:
        yield report_failure("clock", f"{describe_lead(ahead)} of the store's", "set this machine's clock (NTP)")
    else:
        yield report_ok(
            "clock", "as the store's, to the second" if abs(ahead) < 2 else f"{describe_lead(ahead)} of the store's"
        )
