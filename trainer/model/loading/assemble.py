"""A base made module by module: each module is filled, quantised and, if its block is streamed, sent away at once.

The peak stays near the quantised size, or near that of one block where blocks are streamed.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

from trainer.errors import ModelError
from trainer.model.adapters import decoder_linears
from trainer.model.mixtures import decoder_experts
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
    quantised, mixed = set(decoder_linears(base)), set(decoder_experts(base))
    head = base.get_output_embeddings()
    # By name: a list of the modules would keep every unquantised weight alive until the end.
    for name in [name for name, _ in base.named_modules()]:
        module = base.get_submodule(name)
        if module._parameters or module._buffers:
            if module is head and config.get_text_config().tie_word_embeddings:
                continue
            # A stack of experts is filled on the host, and goes to the device one quantised expert at a time.
            module.to_empty(device="cpu" if name in mixed else device, recurse=False)
            fill(base, name, module)
            if before is not None:
                before(base, name, module)
            if name in quantised:
                parent, _, child = name.rpartition(".")
                setattr(base.get_submodule(parent), child, quant.linear(module, dtypes.compute, device))
            if name in mixed:
                quant.experts(module, dtypes.compute, device)
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

    def __init__(
        self, folder: Path, files: Iterable[str], renamed: dict[str, str] | None, asked: str, shape: PreTrainedModel
    ):
        """`shape`: the model on the meta device; what stands in the files becomes its parameters as transformers has
        it: by other names, or put together from several tensors."""
        self.asked = asked
        transforms = get_model_conversion_mapping(shape, renamed)
        renamings = [one for one in transforms if isinstance(one, WeightRenaming)]
        converters = [one for one in transforms if isinstance(one, WeightConverter)]
        self._converters = {pattern: one for one in converters for pattern in one.source_patterns}
        self._places: dict[str, list[_Place]] = {}
        self._made_with: dict[str, str] = {}
        """a parameter -> the first of those that are made at once with it"""
        self._made: dict[str, torch.Tensor] = {}
        names, prefix = shape.state_dict(), shape.base_model_prefix
        for file in files:
            path = folder / file
            with safe_open(path, "pt") as tensors:
                for key in tensors.keys():
                    name, pattern = rename_source_key(key, renamings, converters, prefix, names)
                    if name not in names and key in names:
                        name, pattern = key, None
                    self._places.setdefault(name, []).append(_Place(path, key, pattern))
        for name, places in self._places.items():
            if places[0].pattern is not None:
                first, *others = self._converters[places[0].pattern].target_patterns
                self._made_with |= {name.replace(first, other): name for other in others}

    def check_shapes(self, base: PreTrainedModel) -> None:
        """Against a model on the meta device, before a weight is read."""
        for name, parameter in base.named_parameters():
            for place in self._places.get(name, []):
                if place.pattern is None:
                    with safe_open(place.path, "pt") as tensors:
                        self._check_shape(tensors.get_slice(place.key).get_shape(), parameter, place, base)

    def unread(self, base: PreTrainedModel) -> list[str]:
        """Keys in the files that stand for nothing in the model."""
        names = set(base.state_dict())
        return [place.key for name, places in self._places.items() if name not in names for place in places]

    def _check_shape(self, shape, parameter: torch.Tensor, place: _Place, base: PreTrainedModel) -> None:
        if list(shape) != list(parameter.shape):
            raise ModelError(
                f"{self.asked}: {place.key} has the shape {list(shape)} in {place.path.name}, and "
                f"{list(parameter.shape)} in this architecture ({base.config.model_type})."
            )

    def __call__(self, base: PreTrainedModel, name: str, module: torch.nn.Module) -> None:
        if module._buffers:
            base._init_weights(module)  # rotary frequencies and the like are computed, not stored
        stored = {own: b for own, b in module._buffers.items() if own not in module._non_persistent_buffers_set}
        for own, tensor in [*module._parameters.items(), *stored.items()]:
            full = f"{name}.{own}" if name else own
            if tensor is not None and (own in module._parameters or full in self._places):
                self._copy(full, tensor, base)

    def _copy(self, name: str, parameter: torch.Tensor, base: PreTrainedModel) -> None:
        tensor = self.read(base, name)
        self._check_shape(tensor.shape, parameter, self._place(base, name)[0], base)
        parameter.copy_(tensor)

    def read(self, base: PreTrainedModel, name: str) -> torch.Tensor:
        """The tensor that the files hold for a parameter, in their dtype."""
        places = self._place(base, name)
        if places[0].pattern is None:
            return places[0].tensor()
        if name not in self._made:
            self._made = self._convert(self._made_with.get(name, name), places, base)
        return self._made.pop(name)

    def _place(self, base: PreTrainedModel, name: str) -> list[_Place]:
        found = self._places.get(self._made_with.get(name, name))
        if found is None:
            raise ModelError(
                f"{self.asked}: the weights do not belong to this architecture ({base.config.model_type}): {name} is "
                "not in the files under this name, and by it a base is streamed or merged, or its experts are "
                "quantised. offload=none and quant=none may load it."
            )
        return found

    def _convert(self, name: str, places: list[_Place], base: PreTrainedModel) -> dict[str, torch.Tensor]:
        """What transformers puts together from several tensors of the files."""
        converter = copy.deepcopy(self._converters[places[0].pattern])
        for place in sorted(places, key=lambda one: dot_natural_key(one.key)):
            converter.add_tensor(name, place.key, place.pattern, place.tensor)
        made = converter.convert(name, model=base, config=base.config)
        return {key: value[0] if isinstance(value, list) else value for key, value in made.items()}


@dataclass(frozen=True)
class _Place:
    """Where a tensor lies, and by which pattern it is a part of a parameter; None: it is the whole of it."""

    path: Path
    key: str
    pattern: str | None

    def tensor(self) -> torch.Tensor:
        with safe_open(self.path, "pt") as tensors:
            return tensors.get_tensor(self.key)
