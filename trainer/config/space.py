"""What a sweep varies: values with commas, ranges, and the intervals that only a search can draw from."""

from __future__ import annotations

from dataclasses import dataclass

from hydra.core.override_parser.types import Override, ValueType

from trainer.config.shelf import GROUPS, options
from trainer.errors import ConfigError


@dataclass(frozen=True)
class Interval:
    """From `low` to `high`, both included; whole numbers where both are written so: `int(interval(1, 8))`."""

    low: float
    high: float
    log: bool
    """drawn evenly on a logarithmic scale: `tag(log, interval(1e-5, 1e-3))`"""

    @property
    def whole(self) -> bool:
        return isinstance(self.low, int) and isinstance(self.high, int)


Space = dict[str, "Interval | list[str]"]
"""By key an interval, or the values as words."""


def space_of(overrides: list[Override]) -> Space:
    """What the overrides vary. Raises ConfigError where a key has no values."""
    swept = [o for o in overrides if not o.is_hydra_override() and o.is_sweep_override()]
    last = {override.get_key_element(): override for override in swept}
    return {key: _interval(o) if o.is_interval_sweep() else choices_of(o) for key, o in last.items()}


def fixed_words(overrides: list[Override]) -> list[str]:
    """The words that are the same in each trial, of several for a key the last."""
    words = {o.get_key_element(): o for o in overrides if not o.is_hydra_override()}
    return [o.input_line for o in words.values() if not o.is_sweep_override()]


def corners(overrides: list[Override]) -> list[list[str]]:
    """Few trials that have each value of each key once, and the ends of intervals: to check words, not to run."""
    fixed, space = fixed_words(overrides), space_of(overrides)
    ends = {k: [str(v.low), str(v.high)] if isinstance(v, Interval) else v for k, v in space.items()}
    first = {key: values[0] for key, values in ends.items()}
    trials = [first, *({**first, key: value} for key, values in ends.items() for value in values[1:])]
    return [[*fixed, *(f"{key}={value}" for key, value in trial.items())] for trial in trials]


def choices_of(override: Override) -> list[str]:
    """The values of a sweep over one key. Raises ConfigError where there are none, or none that can be counted."""
    key, values = override.key_or_group, []
    if override.value_type is ValueType.GLOB_CHOICE_SWEEP:
        values = override.value().filter(options(key)) if key in GROUPS else []
    elif override.is_discrete_sweep():
        values = list(override.sweep_string_iterator())
    if not values:
        known = f" Options: {', '.join(options(key))}" if key in GROUPS else ""
        draw = " search=optuna draws from intervals" if override.is_interval_sweep() else ""
        raise ConfigError(f"{override.input_line}: no values to try. Give them one by one: {key}=a,b,c.{known}{draw}")
    return values


def _interval(override: Override) -> Interval:
    value, said = override.value(), override.input_line
    log = "log" in value.tags
    if not value.start < value.end or (log and value.start <= 0):
        raise ConfigError(f"{said}: must go from a smaller number to a larger one{', above 0' if log else ''}")
    return Interval(value.start, value.end, log)
