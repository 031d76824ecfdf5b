"""Samples of values, learned one by one."""

from __future__ import annotations

from collections.abc import Iterable

from sluice.pipelines.schema.inference import Sampled, parse_value


def sample_values(values: Iterable[bytes | None]) -> Sampled:
    sample = Sampled()
    for value in map(parse_value, values):
        sample.count(value)
        if isinstance(value, dict):
            sample.learn(value.items())
    return sample
