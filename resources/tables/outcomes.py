"""Errors of libraries of tables, about reads and commits, as ours.

A library's message may contain an address with a password: it is repeated only if it concerns the table itself.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import pyarrow as pa

from sluice.pipelines.errors import (
    CatalogUnavailable,
    NotAuthorized,
    PartUnreadable,
    SetupError,
    SluiceError,
    TableDiffers,
    TableMoved,
    TableRefused,
    Unknown,
)

_AWAY = {"SQLAlchemyError", "OSError", "RESTError", "RequestException", "BotoCoreError", "ClientError", "TException"}
"""Kinds of errors, by name, of a catalog or store that does not answer now."""
_DENIED = {"UnauthorizedError", "ForbiddenError", "OAuthError", "AuthorizationExpiredError", "PermissionError"}
_OWN = {"ArithmeticError", "AssertionError", "AttributeError", "LookupError", "TypeError"}
"""Kinds of errors, by name, that no setting causes: a value or a case that code did not expect."""
_DENIED_SAID = re.compile(
    r"ACCESS_DENIED|AccessDenied|InvalidAccessKeyId|SignatureDoesNotMatch|ExpiredToken|401 Unauthorized|403 Forbidden"
    r"|permission denied|password authentication failed|readonly database"
)
"""Messages of errors without a class of their own: stores behind pyarrow and deltalake, databases behind a
catalog."""
_BROKEN_SAID = re.compile("Kernel error")
_FILE_NAME = re.compile(r"[^\s/'\"]+\.(?:json|avro|parquet|crc)\b")
_STORE_SAID = re.compile("object store|Generic S3 error")
_MOST = 300
"""How many characters of another's message are kept."""


class Outcomes:
    """The errors about one table, which its `keeper` keeps: a catalog, or a log."""

    def __init__(self, table: str, keeper: str, feed: str = "FEED") -> None:
        self._table, self._keeper, self.feed = table, keeper, feed

    @contextmanager
    def reading(self, address: str) -> Iterator[None]:
        """Raise PartUnreadable where a file that is to be added is not there, or is no Parquet."""
        remedy = f"see sluice audit {self.feed.partition('.')[0]} --all"
        try:
            yield
        except FileNotFoundError:
            raise PartUnreadable(f"{address} is missing", remedy=remedy, path=address, gone=True) from None
        except pa.ArrowException as error:
            text = f"{address} cannot be read: {type(error).__name__}"
            raise PartUnreadable(text, remedy=remedy, path=address) from None

    @contextmanager
    def asking(self) -> Iterator[None]:
        """Translate errors of a table that was only read."""
        try:
            yield
        except SluiceError:
            raise
        except Exception as error:  # noqa: BLE001 - each catalog and store raises its own
            raise self.translate(error) from None

    def translate(self, error: Exception) -> SluiceError:
        """Returns the error for a failure that is unrelated to the read or commit."""
        kinds, settings = _kinds(error), f"the {self._keeper}'s settings in the feed"
        if is_denied(error):
            denial = _DENIED_SAID.search(str(error))
            return NotAuthorized(
                f"the {self._keeper} or the store of {self._table} refuses us: {denial[0] if denial else _kind(error)}",
                remedy=f"see the rights of this user, and {settings}",
            )
        away = _STORE_SAID.search(str(error)) is not None
        if "FileNotFoundError" in kinds or (_BROKEN_SAID.match(str(error)) and not away):
            name = _FILE_NAME.search(str(error))
            return TableDiffers(
                f"{name[0] if name else 'a file'}, which describes {self._table}, is missing or broken, and Sluice did "
                "not remove it",
                remedy=f"sluice table rebuild {self.feed}",
            )
        if kinds & _AWAY or away:
            return CatalogUnavailable(
                f"the {self._keeper} of {self._table} does not answer: {_kind(error)}",
                remedy="landing and committing continue without it; the next run adds the pending rows",
            )
        if kinds & _OWN:
            return SetupError(
                f"{self._table} cannot be brought up: {_kind(error)}",
                remedy="this is a bug in Sluice or in the table's library: report it",
            )
        return SetupError(f"{self._table} cannot be used: {_kind(error)}", remedy=f"see {settings}")

    def make_moved(self) -> TableMoved:
        return TableMoved(f"somebody else committed to {self._table} first", remedy="the next try decides again")

    def make_refused(self, error: Exception | str) -> TableRefused:
        return TableRefused(
            f"{self._table} refuses the rows to be added: {' '.join(str(error).split())[:_MOST]}",
            remedy="compare the columns of the table with the feed's schema",
        )

    def unknown(self, error: Exception) -> Unknown:
        return Unknown(
            f"the outcome of a commit to {self._table} is unknown ({_kind(error)})",
            remedy="the next run reads the table and adds the missing rows",
        )


def is_denied(error: Exception) -> bool:
    """Returns whether a catalog or a store refuses this user, however it reports that."""
    return bool(_kinds(error) & _DENIED) or _DENIED_SAID.search(str(error)) is not None


def _kinds(error: Exception) -> set[str]:
    return {k.__name__ for k in type(error).__mro__}


def _kind(error: Exception) -> str:
    return type(error).__name__
