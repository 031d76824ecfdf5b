"""What a feed makes of records: its schema, its contract, and what becomes of those that do not fit. Light: Arrow and
the compiled loops are loaded by whoever asks for rows.

Two shapes of one name make the same rows of the same records; receipts carry the name, the ledger keeps what is behind
it (`SchemaEntry`), so that a window can be explained and compared after the feed has changed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from sluice.pipelines.contract.expectation import Contract
from sluice.pipelines.schema.schema import Schema

if TYPE_CHECKING:
    import pyarrow as pa

    from sluice.pipelines.records.format import Format


@dataclass(frozen=True, slots=True)
class Shape:
    """`columns`: the schema of typed rows, None of raw ones. `dropping`: what does not fit is counted, and kept
    nowhere. `closed`: a record with fields that the schema does not name does not fit.
    """

    columns: Schema | None = None
    contract: Contract | None = None
    dropping: bool = False
    closed: bool = False

    @property
    def name(self) -> str:
        """A few words that differ where the same records would become other rows."""
        words = ["raw" if self.columns is None else f"json {self.columns.fingerprint}"]
        words += ["closed"] if self.closed else []
        words += [f"contract {self.contract.hash}"] if self.contract else []
        words += ["dropping"] if self.dropping else []
        return " ".join(words)

    @property
    def landed(self) -> pa.Schema:
        """Of landed rows."""
        from sluice.pipelines.records.landed_columns import landed_schema

        return landed_schema(self.columns)

    def format(self) -> Format:
        """What makes rows of records."""
        from sluice.pipelines.records.format import RawFormat

        form: Format = RawFormat()
        if self.columns is not None:
            from sluice.pipelines.records.typed.format import JsonFormat

            form = JsonFormat(self.columns, dropping=self.dropping, closed=self.closed)
        if self.contract is not None:
            from sluice.pipelines.records.checked.format import ContractFormat

            form = ContractFormat(form, self.contract, dropping=self.dropping)
        return form


RAW = Shape()
"""Records as they are, all of them."""
