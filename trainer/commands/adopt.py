"""adopt: proves on a tiny twin of a model what of it can be trained here, and how."""

from __future__ import annotations

import json
from pathlib import Path

from trainer.commands.arguments import TRUST, key_values
from trainer.config.compose import compose
from trainer.errors import ConfigError, ModelError, StorageError
from trainer.libraries import loading

FILE = "certificate.json"
HELP = f"""trainer adopt MODEL [model.revision=REVISION] [output_dir=DIR]

MODEL is a hub id, a folder, or a model type that the installed transformers knows (qwen3, gemma4_text ...). A tiny twin
of its configuration is trained on for a step in each way that a run has, beside plain transformers and PEFT: loss and
gradients, packed rows, quantised weights, the adapter, checkpointing, the chat template, the adapter's files, merging
and the plan. No weight is downloaded. Code 4 where the model cannot be trained; output_dir= also gets {FILE}.
"""


def run(words: list[str]) -> int:
    named = [word for word in words if "=" not in word]
    arguments = key_values([word for word in words if "=" in word], ("output_dir", "model.revision", TRUST))
    if len(named) != 1 or named[0].startswith("-"):
        raise ConfigError("adopt takes one model: trainer adopt MODEL (a hub id, a folder or a model type).")
    with loading():
        from transformers import AutoConfig
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

        from trainer.certificate.certificate import certify
        from trainer.model.loading.base import load_tokenizer, whole_config
        from trainer.tracking.console import Screen, quiet_libraries

    screen, tokenizer = Screen(), None
    quiet_libraries(screen)
    if named[0] in CONFIG_MAPPING_NAMES and not Path(named[0]).exists():
        try:
            config = AutoConfig.for_model(named[0])
        except Exception as error:  # some types have no defaults that fit together
            raise ModelError(f"{named[0]}: transformers has no default configuration of it: {error}") from error
    else:
        settings = [f"{key}={value}" for key, value in arguments.items() if key.startswith("model.")]
        model = compose([f"model.path={named[0]}", *settings]).config.model
        config = whole_config(model)
        try:
            tokenizer = load_tokenizer(model)
        except ModelError as error:
            screen.say(str(error), style="yellow")
    certificate = certify(config, named[0], tokenizer)
    screen.table(f"certificate: {named[0]} ({certificate.model_type})", certificate.rows())
    if arguments.get("output_dir"):
        _write(Path(arguments["output_dir"]), certificate.plain())
    return 0 if certificate.holds else ModelError.exit_code


def _write(folder: Path, found: dict) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / FILE).write_text(json.dumps(found, indent=1), encoding="utf-8")
    except OSError as error:
        raise StorageError(f"output_dir={folder}: {FILE} cannot be written: {error.strerror}.") from None
