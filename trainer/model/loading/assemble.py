"""A base made module by module: each module is filled, quantised and, if its block is streamed, sent away at once.

The peak stays near the quantised size, or near that of one block where blocks are streamed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from trainer.errors import ModelError
from trainer.model.adapters import decoder_linears
from trainer.model.precision import Dtypes

if TYPE_CHECKING:
    from trainer.model.quant import Quant

Fill = Callable[[PreTrainedModel, str, torch.nn.Module], None]
"""Gives a module, known by its full name, its values: parameters and buffers of its own, not of its children."""


@torch.no_grad()
def assemble(
    config: PretrainedConfig,
    quant: Quant,
    dtypes: Dtypes,
    device: torch.device,
    attention: str,
    fill: Fill,
    filled: Callable[[PreTrainedModel, str], None] = lambda base, name: None,
    before: Fill | None = None,
) -> PreTrainedModel:
    """The base on `device`, its decoder's linear layers quantised; `before` may change a module that has its values,
    before it is; `filled` hears of each module when it is done."""
    with torch.device("meta"):
        base = AutoModelForCausalLM.from_config(config, dtype=dtypes.compute, attn_implementation=attention)
    quantised = set(decoder_linears(base))
    head = base.get_output_embeddings()
    # By name: a list of the modules would keep every unquantised weight alive until the end.
    for name in [name for name, _ in base.named_modules()]:
        module = base.get_submodule(name)
        if module._parameters or module._buffers:
            if module is head and config.get_text_config().tie_word_embeddings:
                continue
            module.to_empty(device=device, recurse=False)
            fill(base, name, module)
            if before is not None:
                before(base, name, module)
            if name in quantised:
                parent, _, child = name.rpartition(".")
                setattr(base.get_submodule(parent), child, quant.linear(module, dtypes.compute, device))
            del module
        filled(base, name)
    base.tie_weights()
    base.eval()
    left = [name for name, tensor in base.named_parameters() if tensor.is_meta]
    assert not left, f"not initialised: {left}"
    return base


def at_random(base: PreTrainedModel, name: str, module: torch.nn.Module) -> None:
    """Fills a module as transformers initialises it."""
    base._init_weights(module)


class FromFiles:
    """Fills modules from safetensors files, tensor by tensor. Raises ModelError for what is not in them, and for
    shapes that are not the model's."""

    def __init__(self, folder: Path, files: Iterable[str], renamed: dict[str, str] | None, asked: str):
        self.asked = asked
        self._places: dict[str, tuple[Path, str]] = {}
        for file in files:
            path = folder / file
            with safe_open(path, "pt") as tensors:
                for key in tensors.keys():
                    self._places[_renamed(key, renamed or {})] = (path, key)

    def check_shapes(self, base: PreTrainedModel) -> None:
        """Against a model on the meta device, before a weight is read."""
        for name, parameter in base.named_parameters():
            if name in self._places:
                path, key = self._places[name]
                with safe_open(path, "pt") as tensors:
                    self._check_shape(tensors.get_slice(key).get_shape(), parameter, path, key, base)

    def unread(self, base: PreTrainedModel) -> list[str]:
        """Keys in the files that stand for nothing in the model."""
        prefix, names = f"{base.base_model_prefix}.", set(base.state_dict())
        return [key for name, (_, key) in self._places.items() if not {name, prefix + name} & names]

    def _check_shape(self, shape, parameter: torch.nn.Parameter, path: Path, key: str, base: PreTrainedModel) -> None:
        if list(shape) != list(parameter.shape):
            raise ModelError(
                f"{self.asked}: {key} has the shape {list(shape)} in {path.name}, and {list(parameter.shape)} "
                f"in this architecture ({base.config.model_type})."
            )

    def __call__(self, base: PreTrainedModel, name: str, module: torch.nn.Module) -> None:
        if module._buffers:
            base._init_weights(module)  # rotary frequencies and the like are computed, not stored
        for own, parameter in module._parameters.items():
            if parameter is not None:
                self._copy(f"{name}.{own}" if name else own, parameter, base)

    def _copy(self, name: str, parameter: torch.nn.Parameter, base: PreTrainedModel) -> None:
        tensor = self.read(base, name)
        path, key = self._place(base, name)
        self._check_shape(tensor.shape, parameter, path, key, base)
        parameter.copy_(tensor)

    def read(self, base: PreTrainedModel, name: str) -> torch.Tensor:
        """The tensor that the files hold for a parameter, in their dtype."""
        path, key = self._place(base, name)
        with safe_open(path, "pt") as tensors:
            return tensors.get_tensor(key)

    def _place(self, base: PreTrainedModel, name: str) -> tuple[Path, str]:
        # A checkpoint of the bare decoder has no prefix.
        found = self._places.get(name) or self._places.get(name.removeprefix(f"{base.base_model_prefix}."))
        if found is None:
            raise ModelError(
                f"{self.asked}: the weights do not belong to this architecture ({base.config.model_type}): {name} is "
                "not in the files under this name, and by it a base is streamed or merged. offload=none may load it."
            )
        return found


def _renamed(key: str, patterns: dict[str, str]) -> str:
    for pattern, target in patterns.items():
        key = re.sub(pattern, target, key)
    return key
