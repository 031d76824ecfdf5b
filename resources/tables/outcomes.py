"""What became of a question or a commit, in our words, whichever library raised it.

Its own texts may hold an address with a password: they are kept only where the library speaks of the table itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pyarrow as pa

from sluice.pipelines.vocabulary.errors import (
    CatalogUnavailable,
    NotAuthorized,
    PartUnreadable,
    SetupError,
    SluiceError,
    TableMoved,
    TableRefused,
    Unknown,
)

_AWAY = {"SQLAlchemyError", "OSError", "RESTError", "RequestException", "BotoCoreError", "ClientError", "TException"}
"""Kinds of errors, by name, of a catalog or store that does not answer now."""
_DENIED = {"UnauthorizedError", "ForbiddenError", "OAuthError", "AuthorizationExpiredError", "PermissionError"}
_MOST = 300
"""How many characters of another's message are kept."""


@contextmanager
def readable(address: str) -> Iterator[None]:
    """Raise PartUnreadable where a file that is to be added is not there, or is no Parquet."""
    try:
        yield
    except FileNotFoundError:
        raise PartUnreadable(f"{address} is missing", remedy="see sluice audit FEED", path=address, gone=True) from None
    except pa.ArrowException as error:
        raise PartUnreadable(
            f"{address} cannot be read: {type(error).__name__}", remedy="see sluice audit FEED", path=address
        ) from None


class Outcomes:
    """The errors about one table, which its `keeper` keeps: a catalog, or a log."""

    def __init__(self, table: str, keeper: str) -> None:
        self._table, self._keeper = table, keeper

    @contextmanager
    def asking(self) -> Iterator[None]:
        """Raise by our names what comes from a table that was only asked."""
        try:
            yield
        except SluiceError:
            raise
        except Exception as error:  # noqa: BLE001 - each catalog and store raises its own
            raise self.told(error) from None

    def told(self, error: Exception) -> SluiceError:
        """The error for one that has nothing to do with what was asked or committed."""
        kinds, settings = {k.__name__ for k in type(error).__mro__}, f"the {self._keeper}'s settings in the feed"
        if kinds & _DENIED:
            return NotAuthorized(
                f"the {self._keeper} or the store of {self._table} refuses us: {type(error).__name__}",
                remedy=f"see the rights of this user, and {settings}",
            )
        if kinds & _AWAY:
            return CatalogUnavailable(
                f"the {self._keeper} of {self._table} does not answer: {type(error).__name__}",
                remedy="landing and committing go on without it; the next run adds what is owed",
            )
        return SetupError(f"{self._table} cannot be used: {type(error).__name__}", remedy=f"see {settings}")

    def moved(self) -> TableMoved:
        return TableMoved(f"somebody else committed to {self._table} first", remedy="the next try decides anew")

    def refused(self, error: Exception | str) -> TableRefused:
        return TableRefused(
            f"{self._table} does not take what is to be added: {' '.join(str(error).split())[:_MOST]}",
            remedy="see which columns the table has; the feed's schema says what lands",
        )

    def unknown(self) -> Unknown:
        return Unknown(f"nobody saw what became of a commit to {self._table}", remedy="look again")
