"""An architecture as somebody wrote it: what is checked before it is built, and what is said where it cannot be."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from trainer.device.measure import is_out_of_memory
from trainer.errors import ConfigError, ModelError, TrainerError, closest
from trainer.model.families import check_modules
from trainer.model.model_settings import MOST_BLOCKS

MOST_PARAMETERS = 10**13
BLOCKS, DTYPES = ("num_hidden_layers", "n_layer", "n_layers", "num_layers"), ("dtype", "torch_dtype")


def check_fields(fields: Mapping[str, Any], where: str, error: type[TrainerError] = ModelError) -> None:
    """Raises `error` for values that no library refuses in good time, here and in nested configurations."""
    for key, value in fields.items():
        if isinstance(value, Mapping):
            check_fields(value, f"{where}.{key}", error)
        elif key in BLOCKS and isinstance(value, int) and not 0 < value <= MOST_BLOCKS:
            raise error(f"{where}.{key}={value}: must be from 1 to {MOST_BLOCKS}.")
        elif key in DTYPES and value is not None and not _is_dtype(value):
            known = [name for name in dir(torch) if _is_dtype(name)]
            raise error(f"{where}.{key}={value!r}: no data type of this name{closest(str(value), known)}.")


def _is_dtype(name: Any) -> bool:
    return name == "auto" or (isinstance(name, str) and isinstance(getattr(torch, name, None), torch.dtype))


def written_config(architecture: Mapping[str, Any]) -> PretrainedConfig:
    """The configuration in a recipe's architecture block. Raises ConfigError for fields that it does not have, and for
    values that the installed transformers does not take there."""
    where, fields = "model.architecture", dict(architecture)
    model_type = fields.pop("model_type", None)
    if model_type is None:
        raise ConfigError(f"{where}.model_type is missing: weights=random needs to know what to build.")
    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING:
        raise ConfigError(
            f"{where}.model_type={model_type}: transformers knows no such model"
            f"{closest(str(model_type), CONFIG_MAPPING.keys())}."
        )
    defaults = AutoConfig.for_model(model_type)
    # Fields also go by their published names, and head_dim is read wherever it is set (Qwen3-MoE does not list it).
    known = {*defaults.to_dict(), *defaults.attribute_map, "head_dim"}
    unknown = [key for key in fields if key not in known]
    if unknown:
        hints = ", ".join(f"{key}{closest(key, known)}" for key in unknown)
        raise ConfigError(f"{where}: a {model_type} configuration has no field {hints}.")
    check_fields(fields, where, ConfigError)
    try:
        return AutoConfig.for_model(model_type, **fields)
    except Exception as error:  # any value can meet any line of the library
        raise ConfigError(_refused(where, fields, type(defaults), error)) from error


def _refused(where: str, fields: Mapping[str, Any], kind: type, error: Exception) -> str:
    """What transformers says about a value, with the key where it names one."""
    reason = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    named = re.search(r"field '(\w+)'", reason[0])
    if named is not None and named[1] in fields:
        allowed = str(kind.__annotations__.get(named[1], "another")).removeprefix("<class '").removesuffix("'>")
        return f"{where}.{named[1]}={fields[named[1]]}: must be of the type {allowed} in a {kind.model_type} model."
    return f"{where}: transformers can make no {kind.model_type} configuration of it: {reason[-1]}"


def skeleton(config: PretrainedConfig, trust_remote_code: bool = False) -> PreTrainedModel:
    """The model on the meta device: its shape without its weights. Raises ModelError for what cannot be trained."""
    what = f"a {config.model_type} model cannot be built as it is described"
    with building(what, config.to_dict()), torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    parameters = sum(p.numel() for p in model.parameters())
    if parameters > MOST_PARAMETERS:
        raise ModelError(
            f"model type {config.model_type}: what is described has {parameters:.3g} parameters, more than any model. "
            "Check its sizes."
        )
    check_modules(model)
    return model


class loading:
    """Turns what libraries raise about a user's files into one ModelError."""

    kinds: tuple[type[Exception], ...] = (OSError, ValueError, KeyError, RuntimeError, SafetensorError)

    def __init__(self, what: str, fields: Mapping[str, Any] | None = None):
        """`fields`: where the value is looked up that a library only names."""
        self.what, self.fields = what, fields or {}

    def __enter__(self):
        return self

    def __exit__(self, kind, error, traceback):
        if isinstance(error, self.kinds) and not isinstance(error, TrainerError) and not is_out_of_memory(error):
            first_line = (str(error).strip() or type(error).__name__).split("\n")[0]
            if isinstance(error, KeyError):
                first_line = ", ".join(
                    [f"{k}={v}" for k, v in self.fields.items() if v == error.args[0]] or [first_line]
                )
            raise ModelError(f"{self.what}: {first_line}") from error
        return False


class building(loading):
    """The same for a stranger's configuration: any value can meet any line of a library, so any error is its fault."""

    kinds = (Exception,)
