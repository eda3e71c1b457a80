"""An architecture as somebody wrote it: what is checked before it is built, and what is said where it cannot be."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from trainer.device.measure import is_out_of_memory
from trainer.errors import ModelError, TrainerError, closest
from trainer.model.families import check_modules

MOST_BLOCKS = 1000
"""Transformers of 1,000 layers have been trained (Wang et al. 2022, DeepNet); building each takes milliseconds."""
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


def skeleton(config: PretrainedConfig, trust_remote_code: bool = False) -> PreTrainedModel:
    """The model on the meta device: its shape without its weights. Raises ModelError for what cannot be trained."""
    with building(f"a {config.model_type} model cannot be built as it is described"), torch.device("meta"):
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

    def __init__(self, what: str):
        self.what = what

    def __enter__(self):
        return self

    def __exit__(self, kind, error, traceback):
        if isinstance(error, self.kinds) and not isinstance(error, TrainerError) and not is_out_of_memory(error):
            first_line = (str(error).strip() or type(error).__name__).split("\n")[0]
            raise ModelError(f"{self.what}: {first_line}") from error
        return False


class building(loading):
    """The same for a stranger's configuration: any value can meet any line of a library, so any error is its fault."""

    kinds = (Exception,)
