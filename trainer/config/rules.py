"""What no single type can say: ranges, and settings that exclude each other. Each option says its own."""

from __future__ import annotations

from pathlib import Path

from trainer.config.schema import SECTIONS, Config
from trainer.ranges import ranges_of
from trainer.redact import refusal, secrets_in
from trainer.registry import to_plain


def broken_rules(config: Config, trains: bool = True) -> list[str]:
    """Every rule that this configuration breaks, in a user's words; those of training only where it `trains`."""
    problems = [refusal(key) for key in secrets_in(to_plain(config))]
    problems += _ranges(config, "")
    for section in (*SECTIONS, "train"):
        problems += _ranges(getattr(config, section), f"{section}.")
    for section in (*SECTIONS, *(["train"] if trains else [])):
        problems += getattr(config, section).problems(config)
    return problems


def missing_paths(config: Config) -> list[str]:
    """Files and folders that the configuration names and that are not there; what may be a hub id is let pass."""
    sources = config.data.sources if isinstance(config.data.sources, list) else []
    named = [
        ("data.path", config.data.path),
        ("data.eval_path", config.data.eval_path),
        ("model.path", config.model.path),
    ]
    named += [(f"data.sources[{i}].path", s.get("path")) for i, s in enumerate(sources) if isinstance(s, dict)]
    return [
        f"{key}={path}: there is no such file or folder"
        for key, path in named
        if isinstance(path, str) and _is_local(path) and not Path(path).expanduser().exists()
    ]


def _is_local(path: str) -> bool:
    """Whether it can be nothing on the hub, whose names are owner/name."""
    return path.startswith(("/", "./", "../", "~")) or (path.count("/") > 1 and "://" not in path)


def _ranges(holder: object, prefix: str) -> list[str]:
    found = []
    for name, allowed in ranges_of(type(holder)).items():
        value = getattr(holder, name)
        problem = allowed.problem(value) if value is not None else None
        if problem is not None:
            found.append(f"{prefix}{name}={value}: {problem}")
    return found
