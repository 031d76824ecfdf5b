"""Great Expectations itself, for the two commands that need it; nothing else imports it while Sluice runs.

Loading it takes some seconds, so the first call loads it. Its analytics are off: it sends nothing to anybody.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from sluice.pipelines.util import extras

_MOST = 300
"""Maximum length of its message about one expectation, in characters."""


def suite_text(name: str, expectations: Sequence[Mapping[str, Any]], meta: Mapping[str, Any]) -> str:
    """A suite file's text with these expectations (type, kwargs, severity, meta), as Great Expectations writes it."""
    suite = _suite()(name=name, expectations=[dict(e) for e in expectations], meta=dict(meta))
    return json.dumps(suite.to_json_dict(), indent=2, ensure_ascii=False) + "\n"


def refusals(expectations: Sequence[Mapping[str, Any]]) -> Iterator[tuple[int, str]]:
    """Yields the positions of expectations that Great Expectations refuses, each with its message."""
    suite = _suite()
    for position, item in enumerate(expectations):
        try:
            if not suite(name="one", expectations=[dict(item)]).expectations:  # unknown expectations are left out
                yield position, "Great Expectations has no expectation of this type"
        except Exception as error:  # noqa: BLE001 - it raises errors of any class
            # If pydantic refused arguments: which and why.
            errors = getattr(error, "errors", None)
            if callable(errors):
                lines = [f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in errors()]
            else:
                lines = [str(error) or type(error).__name__]
            yield position, "; ".join(" ".join(line.split()) for line in lines)[:_MOST]


def _suite() -> Any:
    os.environ.setdefault("GX_ANALYTICS_ENABLED", "false")
    logging.getLogger("great_expectations").setLevel(logging.CRITICAL)  # it logs its errors with a traceback
    with extras.name_missing():
        from great_expectations.core.expectation_suite import ExpectationSuite

    return ExpectationSuite
