"""A run's configuration on disk: config.yaml (resolved) and overrides.yaml (what the user typed)."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from trainer.atomic import write_atomically
from trainer.config.own import OPTIONS_FLAG, OWN
from trainer.config.schema import SECTIONS, Config
from trainer.config.shelf import default_choices, option_values, options, own_option, root_values, schema_of
from trainer.config.types import in_short
from trainer.errors import ConfigError, StorageError, closest, listing
from trainer.redact import redacted
from trainer.registry import OPTIONS, to_plain

CONFIG, OVERRIDES = "config.yaml", "overrides.yaml"
OWN_OPTIONS = "own_options"
"""Key of config.yaml: the user's own options of a run, by group the class and the module it comes from."""


@dataclass(frozen=True)
class Run:
    """A configuration and where it came from."""

    config: Config
    choices: dict[str, str]
    """the option picked in each group"""
    overrides: list[str]
    """what the user typed"""


def public_config(run: Run) -> dict[str, Any]:
    """What a tracking service gets: the configuration's own keys. Secrets are never configuration keys."""
    return {**to_plain(run.config), "choices": run.choices}


def save_run(run: Run, folder: Path) -> None:
    """Writes config.yaml and overrides.yaml."""
    own = _own_options(run)
    values = {"choices": run.choices, **({OWN_OPTIONS: own} if own else {}), **to_plain(run.config)}
    text = yaml.safe_dump(values, sort_keys=False, allow_unicode=True)
    head = "# Resolved configuration of this run; choices names the option picked in each group.\n"
    write_atomically(folder / OVERRIDES, redacted(yaml.safe_dump(list(run.overrides), allow_unicode=True)))
    write_atomically(folder / CONFIG, redacted(head + text))  # last: it says that a run is here


def load_run(folder: Path) -> Run | None:
    """The run saved in a folder, or None where there is none. Raises StorageError where its files are damaged."""
    if not (folder / CONFIG).is_file():
        return None
    values, overrides = _read(folder / CONFIG, dict), _read(folder / OVERRIDES, list)
    choices = values.pop("choices", None)
    if not isinstance(choices, dict):
        raise StorageError(f"{folder / CONFIG}: is not the configuration of a run (it has no choices).")
    own = values.pop(OWN_OPTIONS, {})
    try:
        return Run(from_saved(choices, values, own), choices, overrides)
    except ConfigError as error:
        raise ConfigError(f"{folder / CONFIG}: {error}") from error


def with_settings(run: Run, words: list[str]) -> Run:
    """The run with some settings of `data` as these words say: data.path=FILE. Raises ConfigError."""
    known = [f"data.{field.name}" for field in fields(run.config.data)]
    unknown = [word for word in words if word.partition("=")[0] not in known]
    if unknown:
        hints = [f"{word}: no such setting{closest(word.partition('=')[0], known)}" for word in unknown]
        raise ConfigError(listing(hints))
    try:
        values = OmegaConf.merge(to_plain(run.config), OmegaConf.from_dotlist(words))
    except (OmegaConfBaseException, yaml.YAMLError) as error:
        raise ConfigError(f"{' '.join(words)}: {str(error).splitlines()[0]}") from error
    values = OmegaConf.to_container(values)
    return replace(run, config=from_saved(run.choices, values, _own_options(run)))


def _own_options(run: Run) -> dict[str, dict[str, str | None]]:
    """Of each option that does not come with the trainer: its class, and the module where that does not either."""
    own = {}
    for group, choice in run.choices.items():
        if group in SECTIONS and own_option(group, choice) is not None:
            cls = type(getattr(run.config, group))
            schema = next(name for name, known in OPTIONS[group].items() if known is cls)
            own[group] = {"schema": schema, "module": OWN.module_of.get(cls)}
    return own


def _own_class(group: str, choice: str, saved: Any) -> type:
    """The class of an option that does not come with the trainer. Raises ConfigError where it is not loaded."""
    known = isinstance(saved, dict) and OPTIONS[group].get(saved.get("schema"))
    if known:
        return known
    module = saved.get("module") if isinstance(saved, dict) else None
    if module is None:
        raise ConfigError(f"{group}={choice}: no such option")
    raise ConfigError(
        f"{group}={choice} is an option of {module}, which runs only where the command line names it. Add "
        f"{OPTIONS_FLAG} {shlex.quote(str(module))}"
    )


def from_saved(choices: dict[str, str], values: dict[str, Any], own: Any = None) -> Config:
    """Typed dataclasses from saved values; what a run saved before a setting existed lacks comes from conf/.

    `own`: what `config.yaml` says of the user's own options, which need no YAML then. Raises ConfigError where an
    option or a setting is gone, or a value is of another type.
    """
    own = own if isinstance(own, dict) else {}
    choices = {**default_choices(), **{group: choice for group, choice in choices.items() if group in SECTIONS}}
    shipped = {group: choice for group, choice in choices.items() if group not in own}
    unfit = "the saved configuration does not fit this version: "
    gone = [f"{group}={choice}: no such option" for group, choice in shipped.items() if choice not in options(group)]
    gone += [f"{group}: no mapping" for group in choices if not isinstance(values.get(group, {}), dict)]
    if gone:
        raise ConfigError(unfit + listing(gone))
    try:
        root = OmegaConf.structured(Config)
        for key, value in {**root_values(), **values}.items():
            if key not in choices:
                root[key] = value
        for group, choice in choices.items():
            given = values.get(group, {})
            if group in own:
                root[group] = OmegaConf.merge(OmegaConf.structured(_own_class(group, choice, own[group])), given)
            else:
                schema = OmegaConf.structured(schema_of(group, choice))
                root[group] = OmegaConf.merge(schema, option_values(group, choice), given)
        return OmegaConf.to_object(root)
    except OmegaConfBaseException as error:
        raise ConfigError(unfit + in_short(error)) from error


def _read(file: Path, kind: type) -> Any:
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise StorageError(f"{file}: cannot be read: {error.strerror}.") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise StorageError(f"{file}: is damaged: {str(error).splitlines()[0]}.") from None
    if not isinstance(content, kind):
        raise StorageError(f"{file}: is damaged: it holds no {'mapping' if kind is dict else 'list'}.")
    return content


def differences(old: Run, new: Run, free: tuple[str, ...]) -> list[tuple[str, Any, Any]]:
    """Keys whose values differ, with both values; keys that start with one of `free` do not count."""
    flat_old, flat_new = _flat(public_config(old)), _flat(public_config(new))
    keys = [*flat_old, *(key for key in flat_new if key not in flat_old)]
    return [
        (key, flat_old.get(key), flat_new.get(key))
        for key in keys
        if flat_old.get(key) != flat_new.get(key)
        and not any(key == f or key.startswith(f + ".") or key == f"choices.{f}" for f in free)
    ]


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat = {}
    for key, value in values.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat
