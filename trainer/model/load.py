"""From a model's configuration to its frozen, quantised base on the device."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from trainer.errors import ConfigError, ModelError, closest
from trainer.model.adapters import decoder_linears
from trainer.model.options import Weights
from trainer.model.precision import Dtypes
from trainer.resources import resolve

if TYPE_CHECKING:
    from trainer.model.options import Model
    from trainer.model.quant import Quant


def load_tokenizer(model: Model) -> PreTrainedTokenizerBase:
    """The model's tokenizer, with its chat template. Raises ModelError."""
    if model.weights is Weights.random:
        path, revision = resolve(model.random_tokenizer), None
    else:
        path, revision = _checked_path(model), model.revision
    with _user_errors(f"model.path={model.path}: the tokenizer cannot be loaded"):
        return AutoTokenizer.from_pretrained(path, revision=revision)


def load_config(model: Model) -> PretrainedConfig:
    """The architecture, from the recipe (weights=random) or the model's config.json."""
    if model.weights is Weights.pretrained:
        with _user_errors(f"model.path={model.path}: config.json cannot be loaded"):
            return AutoConfig.from_pretrained(_checked_path(model), revision=model.revision)
    fields = dict(model.architecture)
    model_type = fields.pop("model_type", None)
    if model_type is None:
        raise ConfigError("model.architecture.model_type is missing: weights=random needs to know what to build.")
    try:
        defaults = AutoConfig.for_model(model_type)
    except ValueError:
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING

        raise ConfigError(
            f"model.architecture.model_type={model_type}: transformers knows no such model"
            f"{closest(model_type, CONFIG_MAPPING.keys())}."
        ) from None
    known = defaults.to_dict()
    unknown = [key for key in fields if key not in known]
    if unknown:
        hints = ", ".join(f"{key}{closest(key, known)}" for key in unknown)
        raise ConfigError(f"model.architecture: a {model_type} configuration has no field {hints}.")
    return AutoConfig.for_model(model_type, **fields)


def skeleton(config: PretrainedConfig) -> PreTrainedModel:
    """The model on the meta device: its shape without its weights."""
    with _user_errors(f"model type {config.model_type} is not a causal language model"), torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def load_base(
    model: Model, config: PretrainedConfig, quant: Quant, dtypes: Dtypes, device: torch.device, attention: str
) -> PreTrainedModel:
    """The base model, quantised while it is loaded or made, on `device`."""
    if model.weights is Weights.random:
        base = _random_base(config, quant, dtypes, device, attention)
    else:
        with _user_errors(f"model.path={model.path}: the weights cannot be loaded"):
            base = AutoModelForCausalLM.from_pretrained(
                _checked_path(model),
                config=config,
                revision=model.revision,
                dtype=dtypes.compute,
                quantization_config=quant.config(dtypes.compute),
                device_map={"": device},
                attn_implementation=attention,
                use_safetensors=True,
            )
    for module in base.modules():
        # On CPUs with AVX512-BF16 bitsandbytes would repack a 4-bit weight in its first evaluation pass.
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
    base.config.use_cache = False
    return base


@torch.no_grad()
def _random_base(
    config: PretrainedConfig, quant: Quant, dtypes: Dtypes, device: torch.device, attention: str
) -> PreTrainedModel:
    """Random weights, made and quantised one module at a time: the peak stays near the quantised size."""
    with torch.device("meta"):
        base = AutoModelForCausalLM.from_config(config, dtype=dtypes.compute, attn_implementation=attention)
    quantised = set(decoder_linears(base))
    head = base.get_output_embeddings()
    for name, module in list(base.named_modules()):
        if not (module._parameters or module._buffers):
            continue
        if module is head and config.get_text_config().tie_word_embeddings:
            continue
        module.to_empty(device=device, recurse=False)
        base._init_weights(module)
        if name in quantised:
            parent, _, child = name.rpartition(".")
            setattr(base.get_submodule(parent), child, quant.linear(module, dtypes.compute, device))
    base.tie_weights()
    base.eval()
    left = [name for name, tensor in base.named_parameters() if tensor.is_meta]
    assert not left, f"not initialised: {left}"
    return base


def _checked_path(model: Model) -> str:
    """model.path as transformers takes it; a local folder is looked into before anything is loaded."""
    if model.path is None:
        raise ConfigError("model.path: which model? Give a local folder or a hub id.")
    path = resolve(model.path)
    folder = Path(path)
    looks_local = path.startswith((".", "/", "~")) or folder.exists() or path.count("/") > 1
    if not looks_local:
        return path
    if not folder.is_dir():
        raise ModelError(f"model.path={model.path}: there is no such folder.")
    if not (folder / "config.json").is_file():
        raise ModelError(f"model.path={model.path}: the folder holds no config.json, so it is no model.")
    if not any(folder.glob("*.safetensors")):
        pickled = any(folder.glob("*.bin")) or any(folder.glob("*.pt"))
        why = "only pickled weights, which can run code and are not loaded" if pickled else "no weights"
        raise ModelError(f"model.path={model.path}: the folder holds {why}. It needs *.safetensors files.")
    return os.path.abspath(path)


class _user_errors:
    """Turns what transformers raises about a user's model into one ModelError."""

    def __init__(self, what: str):
        self.what = what

    def __enter__(self):
        return self

    def __exit__(self, kind, error, traceback):
        if kind is not None and issubclass(kind, (OSError, ValueError, KeyError, RuntimeError, SafetensorError)):
            if "out of memory" in str(error):
                return False
            first_line = str(error).strip().split("\n")[0]
            raise ModelError(f"{self.what}: {first_line}") from error
        return False
