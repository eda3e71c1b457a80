"""README.md beside a result, as the hub reads it: base, data, recipe, figures; no secret, no path of this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from trainer.config.saved import Run, public_config
from trainer.data.data_settings import training_sources
from trainer.data.sources.files import is_hub_id
from trainer.redact import redacted
from trainer.resources import EMBEDDED

CARD = "README.md"
FIGURES = {
    "steps": "optimizer steps",
    "num_tokens": "tokens",
    "final_loss": "training loss",
    "first_eval_loss": "held-out loss before",
    "eval_loss": "held-out loss after",
    "peak_memory_gib": "peak memory, GiB",
    "trainable_parameters": "trained parameters",
}


def model_card(run: Run, manifest: dict[str, Any], summary: dict[str, Any], result: str) -> str:
    """The card of `result`, which is adapter or model."""
    config = run.config
    sources = [_public(source.path) for source in training_sources(config.data)]
    base = _public(config.model.path)
    head: dict[str, Any] = {"library_name": "peft" if result == "adapter" else "transformers"}
    if is_hub_id(config.model.path):
        head["base_model"] = config.model.path
    head |= {"tags": ["trainer", run.choices["adapter"], run.choices["quant"]]}
    if datasets := [source.path for source in training_sources(config.data) if is_hub_id(source.path)]:
        head["datasets"] = datasets
    settings = _without_paths(public_config(run))
    figures = [(words, summary.get(key)) for key, words in FIGURES.items() if summary.get(key) is not None]
    lines = [
        f"---\n{_yaml(head)}---\n",
        f"# {_code(config.recipe)}\n",
        f"Fine-tuned from {_code(base)} ({run.choices['adapter']} on {run.choices['quant']}), seed {config.seed}.\n",
        f"Data: {', '.join(map(_code, sources))}; sha256 of its tokens {_code(str(manifest.get('data_hash')))}.\n",
        "| figure | value |\n|---|---|",
        *(f"| {words} | {value:{',' if isinstance(value, int) else '.6g'}} |" for words, value in figures),
        "\n## Versions\n",
        *(f"- {name} {version}" for name, version in manifest.get("versions", {}).items()),
        "\n## Settings\n",
        *(f"    {line}" for line in _yaml(settings).splitlines()),
    ]
    return redacted("\n".join(lines) + "\n")


def _public(path: str | None) -> str:
    """A hub id or an embedded name as it is; of a file here its name alone."""
    text = str(path)
    return text if text.startswith(EMBEDDED) or is_hub_id(text) else Path(text).name


def _without_paths(values: Any) -> Any:
    """The same values, in which absolute paths are names alone."""
    if isinstance(values, dict):
        return {key: _without_paths(value) for key, value in values.items() if key != "output_dir"}
    if isinstance(values, list):
        return [_without_paths(value) for value in values]
    return Path(values).name if isinstance(values, str) and values.startswith(("/", "~", "./", "../")) else values


def _yaml(values: Any) -> str:
    return yaml.safe_dump(values, sort_keys=False, allow_unicode=True)


def _code(text: str) -> str:
    """As Markdown shows it letter by letter."""
    return "`" + text.replace("`", "'").replace("\n", " ") + "`"
