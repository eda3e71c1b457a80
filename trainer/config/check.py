"""Nothing a user writes can vanish: every key in an override or a recipe is held against the dataclass fields (Hydra
itself lets `+group.key=1` pass and drops it), every value against its type, and all mistakes are reported at once.
"""

from __future__ import annotations

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, OverrideParseException

from trainer.config.keys import Keys
from trainer.config.shelf import GROUPS, options, unknown_option
from trainer.config.written import Written, problems_of, written
from trainer.errors import ConfigError, excerpt, listing
from trainer.redact import holds_secret, redacted, refusal

NONE_PICKED = ("recipe", "sweep")
"""Groups in which nothing need be picked; null says so."""


def parse(words: list[str]) -> list[Override]:
    """Hydra's own grammar. Raises ConfigError for all words that are not of it."""
    parser, parsed, problems = OverridesParser.create(), [], []
    for word in words:
        try:
            if word.lstrip("+~").startswith("="):
                raise HydraException("no key before =")
            parsed += parser.parse_overrides([word])
        except RecursionError:
            problems.append(f"{redacted(word.partition('=')[0])}: its value is nested too deeply to be read")
        except (OverrideParseException, HydraException) as error:
            key = word.partition("=")[0]
            if holds_secret(word):
                problems.append(refusal(redacted(key)))
                continue
            reason = excerpt(str(error).splitlines()[0])
            problems.append(
                f"{excerpt(word)}: cannot be read: {reason}. Write key=value; a value with characters other than a-z, "
                f"0-9 and ._-/ wants quotes of its own: '{key}=\"...\"'"
            )
    if problems:
        raise ConfigError(listing(problems))
    return parsed


def without_null_picks(overrides: list[Override]) -> list[Override]:
    """The same without recipe=null and sweep=null, which Hydra does not understand: null is what they are anyway."""
    last = {o.key_or_group: o for o in overrides}
    dropped = {group for group in NONE_PICKED if group in last and _is_null(last[group])}
    return [o for o in overrides if o.key_or_group not in dropped]


def for_hydra(overrides: list[Override]) -> list[str]:
    """The words as Hydra takes them once they are checked: for a new entry of a mapping it wants ++."""
    words = []
    for override in overrides:
        plain = not (override.is_add() or override.is_force_add() or override.is_delete() or _is_hydra(override))
        entry = override.key_or_group.count(".") > 1 or isinstance(override.value(), dict)
        words.append(f"++{override.input_line}" if plain and entry else override.input_line)
    return words


def check(overrides: list[Override]) -> None:
    """Raises ConfigError for unknown options, keys and values of the wrong type, in overrides and in the recipe."""
    problems = problems_in(overrides)
    if problems:
        raise ConfigError(listing(problems))


def problems_in(overrides: list[Override]) -> list[str]:
    """All that is wrong with these overrides and the files they pick, before anything is composed."""
    secret = [refusal(redacted(o.key_or_group)) for o in overrides if holds_secret(o.input_line)]
    if secret:
        return secret
    picked = [o for o in overrides if o.key_or_group in GROUPS]
    settings = [o for o in overrides if o.key_or_group not in GROUPS and not _is_hydra(o)]
    problems = [problem for o in picked if (problem := _pick_problem(o)) is not None]
    found = files_of(overrides)
    keys = Keys(found.choices)
    problems += [*found.problems, *problems_of(found, keys)]
    for override in settings:
        problems += _setting_problems(override, keys)
    return list(dict.fromkeys(problems))


def files_of(overrides: list[Override]) -> Written:
    """The files that the overrides pick, as far as they pick what there is."""
    picked = [o for o in overrides if o.key_or_group in GROUPS and _pick_problem(o) is None]
    return written({o.key_or_group: o.value() for o in picked})


def _pick_problem(override: Override) -> str | None:
    """What is wrong with group=option, or None."""
    group = override.key_or_group
    if override.is_delete():
        return f"~{group}: a group cannot be taken away. Allowed: {', '.join(options(group))}"
    if override.is_add() or override.is_force_add() or override.package is not None:
        return f"{override.input_line}: an option is picked with {group}=option. Allowed: {', '.join(options(group))}"
    if override.is_sweep_override():
        return _needs_multirun(override)
    name = override.value()
    if name in options(group) or (name is None and group in NONE_PICKED):
        return None
    return unknown_option(group, name)


def _setting_problems(override: Override, keys: Keys) -> list[str]:
    key = override.key_or_group
    if override.is_delete():
        known = keys.problem(key, adding=False) or f"~{key}: a setting cannot be taken away, every one has a value"
        return [known]
    adding = override.is_add() or override.is_force_add()
    if override.package is not None:
        return [f"{override.input_line}: unknown key; only options have packages, and here they are fixed"]
    problem = keys.problem(key, adding)
    if problem is None and override.is_sweep_override():
        problem = _needs_multirun(override)
    elif problem is None:
        problem = keys.value_problem(key, override.value(), adding)
    return [problem] if problem is not None else []


def _needs_multirun(override: Override) -> str:
    key, _, values = override.input_line.partition("=")
    return (
        f"{override.input_line}: several values. To sweep over them add -m; a list is written "
        f"{override.key_or_group}=[a,b]; a comma within one text wants quotes of its own: '{key}=\"{values}\"'"
    )


def _is_null(override: Override) -> bool:
    return not override.is_sweep_override() and not override.is_delete() and override.value() is None


def _is_hydra(override: Override) -> bool:
    key = override.key_or_group
    return key == "hydra" or key.startswith(("hydra.", "hydra/"))
