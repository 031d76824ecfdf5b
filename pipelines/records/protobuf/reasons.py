"""Why a Protobuf record is in quarantine: a word and a sentence for each code of the loops (docs/formats.md)."""

from __future__ import annotations

from sluice.pipelines.records.json.reasons import Reason
from sluice.pipelines.records.protobuf import loops
from sluice.pipelines.records.slots.binary_reasons import Reasons

REASONS = Reasons(
    Reason.NOT_PROTOBUF,
    {
        loops.OTHER_MESSAGE: (Reason.INCOMPATIBLE, "it is of another message than the feed's"),
        loops.NO_MESSAGE: (Reason.NOT_PROTOBUF, "it names a message that its schema does not have"),
        loops.LONG_VARINT: (Reason.NOT_PROTOBUF, "a number of too many bytes"),
        loops.NO_FIELD: (Reason.NOT_PROTOBUF, "a field's number that no field can have"),
        loops.NO_WIRE: (Reason.NOT_PROTOBUF, "a wire type that there is not"),
        loops.NO_GROUP: (Reason.NOT_PROTOBUF, "the end of a group that has not begun"),
        loops.DEEP: (Reason.TOO_DEEP, f"more than {loops.MOST_DEPTH} messages and groups inside one another"),
        loops.NEW_FIELD: (Reason.UNKNOWN_FIELD, "it has a field that the feed's message does not have"),
        loops.OTHER_SYMBOL: (Reason.WRONG_TYPE, "a number that the enum of the feed's schema does not have"),
        loops.MISSING: (Reason.MISSING, "is missing, and is required"),
        loops.NO_DOCUMENT: (Reason.MALFORMED, "holds what JSON cannot say"),
    },
)
