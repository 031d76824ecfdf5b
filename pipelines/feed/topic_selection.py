"""Which topics a feed reads.

The filter is an exact list, or patterns to include and exclude. Patterns are RE2 and match whole names, so that no
topic name, however hostile, makes matching slow.
"""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints, model_validator

from sluice.pipelines.errors import UnknownTopic
from sluice.pipelines.model.kafka import is_topic_name

MAX_PATTERN = 500


def _topic_name(name: str) -> str:
    if not is_topic_name(name):
        raise ValueError("is not a topic name: 1 to 249 of a-z A-Z 0-9 . _ - (for a pattern write include: [...])")
    return name


def _pattern(pattern: str) -> str:
    try:
        _matches(pattern, ["x"])
    except ValueError:
        pass
    else:
        return pattern
    raise ValueError("is not a pattern that RE2 takes (regular expression without look-around or back-reference)")


TopicName = Annotated[str, AfterValidator(_topic_name)]

Pattern = Annotated[str, StringConstraints(min_length=1, max_length=MAX_PATTERN), AfterValidator(_pattern)]


class TopicFilter(BaseModel):
    """Exact `names`, or patterns over whole names: those that match `include` (empty: all) and not `exclude`.

    A feed file gives a name, a list of names, or `{include: [...], exclude: [...]}`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True, defer_build=True)

    names: Annotated[tuple[TopicName, ...], Field(max_length=1000)] = ()
    include: Annotated[tuple[Pattern, ...], Field(max_length=100)] = ()
    exclude: Annotated[tuple[Pattern, ...], Field(max_length=100)] = ()

    @model_validator(mode="before")
    @classmethod
    def _accept_names(cls, value: Any) -> Any:
        if isinstance(value, str):
            return {"names": (value,)}
        return {"names": value} if isinstance(value, list | tuple) else value

    @model_validator(mode="after")
    def _one_way(self) -> TopicFilter:
        patterns = bool(self.include or self.exclude)
        if bool(self.names) == patterns:
            raise ValueError("needs a topic name, a list of them, or {include: [patterns], exclude: [patterns]}")
        return self

    def takes(self, name: str) -> bool:
        """Returns whether the filter selects a topic of that name, which need not exist."""
        if self.names:
            return name in self.names
        wanted = not self.include or any(_matches(p, [name]) for p in self.include)
        return wanted and not any(_matches(p, [name]) for p in self.exclude)

    def __str__(self) -> str:
        if self.names:
            return ", ".join(self.names)
        included = " | ".join(self.include) or "all"
        return f"{included} except {' | '.join(self.exclude)}" if self.exclude else included


def match(wanted: TopicFilter, available: Mapping[str, str]) -> tuple[str, ...]:
    """The topics of `available` (name → topic id) that the filter asks for: sorted, at least one.

    Raises UnknownTopic for an exact name that is missing, an include pattern that matches nothing, and a filter that
    leaves nothing: a run never silently reads less than was asked for.
    """
    if wanted.names:
        missing = sorted(n for n in set(wanted.names) if n not in available)
        if missing:
            near = get_close_matches(missing[0], sorted(n for n in available if is_topic_name(n)), n=3)
            raise UnknownTopic(
                f"no topic {', '.join(f'`{n}`' for n in missing)} in Kafka, or no right to see it",
                remedy=(f"did you mean {' or '.join(f'`{n}`' for n in near)}? If not, " if near else "")
                + "correct `topics` in the feed, create the topic, or grant DESCRIBE on it",
                topic=missing[0],
            )
        return tuple(sorted(set(wanted.names)))
    names = sorted(n for n in available if is_topic_name(n))
    selected = (
        {n for pattern in wanted.include for n in _match_pattern(pattern, names)} if wanted.include else set(names)
    )
    selected -= {n for pattern in wanted.exclude for n in _matches(pattern, names)}
    if not selected:
        raise UnknownTopic(
            f"no topic is left of {len(names)} after `{wanted}`",
            remedy="correct `topics` in the feed, or create the topic first",
        )
    return tuple(sorted(selected))


def _match_pattern(pattern: str, names: list[str]) -> list[str]:
    matches = _matches(pattern, names)
    if not matches:
        raise UnknownTopic(
            f"no topic matches `{pattern}` ({len(names)} are visible)",
            remedy="patterns match whole names, as in `orders\\..*`; correct `topics` in the feed",
        )
    return matches


def _matches(pattern: str, names: list[str]) -> list[str]:
    """The names that the pattern matches from end to end. Raises ArrowInvalid."""
    import pyarrow.compute as pc  # late, as arrays: most feeds name their topics

    from sluice.pipelines.schema.arrays import text_array

    array = text_array(names)
    pc.match_substring_regex(array, pattern)  # alone first: `a)|(b` must not pass inside the brackets below
    hits = pc.match_substring_regex(array, rf"\A(?:{pattern})\z")
    return [n for n, hit in zip(names, hits.to_pylist(), strict=True) if hit]
