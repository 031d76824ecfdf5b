"""Why an Avro record is in quarantine: a word and a sentence for each code of the loops (docs/formats.md)."""

from __future__ import annotations

from sluice.pipelines.records.avro import loops
from sluice.pipelines.records.json.reasons import Reason
from sluice.pipelines.records.slots.binary_reasons import Reasons

REASONS = Reasons(
    Reason.NOT_AVRO,
    {
        loops.LONG_VARINT: (Reason.NOT_AVRO, "a number of more than 64 bits"),
        loops.WIDE_INT: (Reason.NOT_AVRO, "an int of more than 32 bits"),
        loops.NO_TRUTH: (Reason.NOT_AVRO, "a boolean that is neither 0 nor 1"),
        loops.NO_BRANCH: (Reason.NOT_AVRO, "a branch that its union does not have"),
        loops.NO_SYMBOL: (Reason.NOT_AVRO, "a symbol that its enum does not have"),
        loops.BAD_SIZE: (Reason.NOT_AVRO, "a negative size"),
        loops.MORE: (Reason.NOT_AVRO, "more after the end of the record"),
        loops.DEEP: (Reason.TOO_DEEP, f"more than {loops.MOST_OPEN:,} lists and recursive records inside one another"),
        loops.OTHER_BRANCH: (Reason.INCOMPATIBLE, "a branch of the writer's union that is not {type}"),
        loops.OTHER_SYMBOL: (Reason.WRONG_TYPE, "a symbol that the feed's schema does not have"),
        loops.NEW_FIELDS: (Reason.UNKNOWN_FIELD, "its schema has fields that the feed's does not have"),
        loops.WIDE_DECIMAL: (Reason.OUT_OF_RANGE, "too large for {type}"),
    },
)
