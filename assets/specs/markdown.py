"""Escapes text for Dagster's UI, which renders descriptions as Markdown: names of fields, transactions and patterns
must stay text.

The UI itself removes HTML, but fetches images and makes links.
"""

from __future__ import annotations

import re

_MARKUP = re.compile(
    r"""[<`*]                                           # HTML, code, emphasis
    |(?<![0-9A-Za-z])_|_(?![0-9A-Za-z])|~(?=~)         # emphasis
    |\](?=[(\[:])                                      # what makes links and images of brackets
    |(?<=:)/(?=/)|(?<=www)\.|@                         # addresses, which become links by themselves
    |\\(?=[!-/:-@\[-`{-~])|&(?=\#?[0-9A-Za-z]+;)       # an escape, an entity
    |^[-#>+=]                                          # a list, a heading, a quotation
    """,
    re.VERBOSE | re.IGNORECASE,
)
_NUMBERED = re.compile(r"^([0-9]+)(?=[.)])")


def plain(text: str) -> str:
    """One line of text as Markdown that shows exactly this text: no image, no link, no emphasis.

    Usual text stays as it is, for the places where the UI shows a description without rendering it.
    """
    return _NUMBERED.sub(r"\1\\", _MARKUP.sub(r"\\\g<0>", text))
