"""An adapter merged into its base, one layer at a time.

The base has no values and only the adapter's own weights are there. When a layer's turn comes its weights are read from
the base's files, PEFT merges that one layer in fp32, and the layer is let go when it has been written.

d: output features of a layer. k: input features.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING

import peft
import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper, ModulesToSaveWrapper
from transformers import AutoConfig, AutoTokenizer, PreTrainedModel

from trainer.errors import ConfigError, ModelError
from trainer.model.adapters import decoder_linears, find_targets
from trainer.model.adapters.weight_share import round_trip
from trainer.model.loading.architecture import building, skeleton
from trainer.model.loading.assemble import FromFiles
from trainer.model.loading.base import adapter_keys, find, from_files, load_config
from trainer.model.loading.folder import weight_files
from trainer.model.mixtures import decoder_experts
from trainer.model.model_settings import Weights
from trainer.model.new_tokens import grow, with_mean_rows

if TYPE_CHECKING:
    from trainer.config.schema import Config
    from trainer.model.precision import Dtypes


class Onto(Enum):
    """What an adapter is merged into."""

    original = "original"
    """the base as its files have it"""
    dequantized = "dequantized"
    """what the run's quantisation made of it: the weights that the adapter was trained against"""


def in_effect(config: Config) -> Onto:
    """The base that a run's adapter was trained against."""
    return Onto.original if config.quant.loaded_as is None else Onto.dequantized


@dataclass(frozen=True)
class Piece:
    """A module with weights of its own, adapted or not."""

    name: str
    """in the plain model"""
    module: torch.nn.Module
    """as it is in the adapted model"""

    @property
    def base(self) -> torch.nn.Module:
        """What holds the base's weights."""
        if isinstance(self.module, AuxiliaryTrainingWrapper):
            return self.module.token_adapter.get_base_layer()
        return self.module.get_base_layer() if isinstance(self.module, BaseTunerLayer) else self.module

    @property
    def adapted(self) -> bool:
        return isinstance(self.module, (BaseTunerLayer, AuxiliaryTrainingWrapper))

    def merge(self) -> torch.nn.Module:
        """The module with the adapter's part in its weights, which must be there. PEFT's own order of questions."""
        if isinstance(self.module, AuxiliaryTrainingWrapper):
            return self.module.unload_and_optionally_merge_module(merge=True, safe_merge=False, adapter_names=None)
        if isinstance(self.module, BaseTunerLayer):
            self.module.merge()
        return self.base


class Merger:
    """The tensors of the merged model, in its own order."""

    def __init__(self, config: Config, result: Path, onto: Onto, device: torch.device, dtypes: Dtypes):
        """Reads the result's (adapter/ or model/) own weights and no others.

        Raises ModelError for a method that does not merge, ConfigError for a base that there is not.
        """
        self.config, self.onto, self.device, self.dtypes = config, onto, device, dtypes
        if result.name == "model":
            self._whole_model(result)
        else:
            self._adapter(result)
        self.tied = self._still_tied()
        """whether the merged model's head is its embedding"""
        self.model.config.get_text_config().tie_word_embeddings = self.tied
        pieces = _pieces(self.adapted, "")
        self.pieces = [piece for piece in pieces if not (self.tied and piece.name == self.head)]

    def _whole_model(self, result: Path) -> None:
        """A run that trained all parameters: there is nothing to merge, only to write in another form."""
        if self.onto is Onto.dequantized:
            raise ConfigError("merge.base=dequantized: this run trained every weight, unquantised. Leave it out.")
        with building(f"{result}: cannot be loaded"):
            self.model = skeleton(AutoConfig.from_pretrained(result), self.config.model.trust_remote_code)
        self.adapted: torch.nn.Module = self.model
        self.files = FromFiles(result, weight_files(result, str(result)), None, str(result), self.model)
        self._note_base()
        _hollow(self.model)

    def _adapter(self, result: Path) -> None:
        config = self.config
        if config.model.weights is Weights.random:
            raise ModelError("this run's base was random weights, which are not kept: there is nothing to merge into.")
        share = config.adapter.weight_share(config.quant, self.dtypes.compute, self.device)
        if self.onto is Onto.dequantized and config.quant.loaded_as is None:
            raise ConfigError("merge.base=dequantized: this run's base was not quantised (quant=none). Leave it out.")
        self.model = skeleton(load_config(config.model), config.model.trust_remote_code)
        if decoder_experts(self.model):
            raise ModelError(
                f"merge does not put an adapter into the stacked experts of a mixture ({self.model.config.model_type}) "
                "yet. The adapter itself loads with peft.PeftModel.from_pretrained."
            )
        self.files = from_files(config.model, find(config.model))
        with building(f"{result}: cannot be loaded"):
            tokenizer = AutoTokenizer.from_pretrained(result)
            grow(self.model, tokenizer.convert_tokens_to_ids(config.model.new_tokens))
        self._note_base()
        self.shared = set() if share is None else set(find_targets(self.model, config.adapter.target_modules))
        with building(f"{result}: cannot be loaded"):
            keys = adapter_keys(config.model)
            self.adapted = peft.PeftModel.from_pretrained(
                _hollow(self.model), result, key_mapping=keys
            ).get_base_model()
        self.method = str(getattr(self.model.peft_config["default"].peft_type, "value", "this method"))

    def _note_base(self) -> None:
        """What of the base is asked for later, before the adapter changes its modules."""
        model, quant = self.model, self.config.quant
        names = {module: name for name, module in model.named_modules()}
        self.embedding, self.head = names[model.get_input_embeddings()], names.get(model.get_output_embeddings())
        self.tied_in_files = bool(model.config.get_text_config().tie_word_embeddings)
        self.quantised, self.shared, self.method = set(), set(), "none"
        if self.onto is Onto.dequantized:
            self.quantised = set(decoder_linears(model))
            self.through = round_trip(quant, self.dtypes.compute, self.device)

    def _still_tied(self) -> bool:
        """An adapter on the head or the embedding alone parts what was one table."""
        if not self.tied_in_files or self.head is None:
            return False
        table, head = self.adapted.get_submodule(self.embedding), self.adapted.get_submodule(self.head)
        rows = getattr(head, "token_adapter", None)
        if rows is not None:  # of new tokens, trained in both at once
            return rows.tied_adapter is not None
        return not any(Piece("", module).adapted for module in (table, head))

    def sizes(self) -> list[tuple[str, torch.Size]]:
        """Each tensor's name and shape, in the order of `tensors`."""
        return [
            (f"{piece.name}.{own}", parameter.shape)
            for piece in self.pieces
            for own, parameter in piece.base._parameters.items()
            if parameter is not None
        ]

    @property
    def largest(self) -> int:
        """Numbers in the largest layer."""
        return max(shape.numel() for _, shape in self.sizes())

    def own_dtype(self) -> torch.dtype:
        """Of the base's weights, as its first is."""
        piece = self.pieces[0]
        own = next(own for own, parameter in piece.base._parameters.items() if parameter is not None)
        return self.files.read(self.model, f"{piece.name}.{own}").dtype

    @torch.no_grad()
    def tensors(self, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
        """Each tensor of the merged model by name, on the CPU; nothing of it is kept here.

        Raises ModelError for a value that `dtype` cannot hold.
        """
        for piece in self.pieces:
            base = piece.base
            empty = dict(base._parameters)
            for own, parameter in empty.items():
                if parameter is not None and _is_hollow(parameter):
                    value = self._weight(piece, own, parameter.shape)
                    base._parameters[own] = torch.nn.Parameter(value, requires_grad=False)
            try:
                merged = piece.merge()
            except NotImplementedError as error:
                raise ModelError(
                    f"adapter {self.method}: PEFT merges no layers of this method. {error} Use the adapter itself."
                ) from None
            for own in [own for own, parameter in merged._parameters.items() if parameter is not None]:
                yield f"{piece.name}.{own}", _cast(merged._parameters[own].detach(), dtype, f"{piece.name}.{own}")
            merged._parameters.update(empty)

    def _weight(self, piece: Piece, own: str, shape: torch.Size) -> torch.Tensor:
        """A weight of the base that is merged into; in fp32 where something is."""
        name = piece.name
        at = self.embedding if name == self.head and self.tied_in_files else name
        value = self.files.read(self.model, f"{at}.{own}")
        if value.shape != shape:  # a table that new tokens made longer
            value = with_mean_rows(value, shape[0])
        if own == "weight" and name in self.quantised:
            return self._as_trained_against(name, value)
        return value.float() if piece.adapted else value

    def _as_trained_against(self, name: str, weight: torch.Tensor) -> torch.Tensor:
        """(d, k) -> (d, k), fp32: through the run's quantisation, without the share that the adapter took out before.

        That share is a part of the adapter's file, taken off there, so it is added here.
        """
        weight = weight.to(self.device)  # each kind of device rounds in its own way
        if name not in self.shared:
            return self.through(weight).cpu()
        adapter = self.config.adapter
        kept, (a, b) = adapter.split(weight.to(self.dtypes.compute).float(), self.through)
        return (self.through(kept) + adapter.alpha / adapter.r * b @ a).cpu()

    @property
    def text_only(self) -> bool:
        """Whether the base's folder held more than the text decoder, which alone is merged."""
        return adapter_keys(self.config.model) is not None


def _pieces(module: torch.nn.Module, name: str) -> Iterator[Piece]:
    """All modules with weights of their own, by their names in the plain model."""
    if isinstance(module, ModulesToSaveWrapper):  # trained whole: what it was is not looked at
        yield from _pieces(module.modules_to_save[module.active_adapters[0]], name)
        return
    piece = Piece(name, module)
    if piece.adapted:
        yield piece
        return
    if any(parameter is not None for parameter in module._parameters.values()):
        yield piece
    for child, inner in module.named_children():
        yield from _pieces(inner, f"{name}.{child}" if name else child)


def _hollow(model: PreTrainedModel) -> PreTrainedModel:
    """The model on the CPU with weights that take no memory and are no numbers: PEFT needs their shapes and device.

    What an adapter's file holds of the base, such as trained biases, is written over them.
    """
    made: dict[torch.nn.Parameter, torch.nn.Parameter] = {}  # tied weights stay one
    for module in model.modules():
        for own, parameter in module._parameters.items():
            if parameter is None:
                continue
            if parameter not in made:
                nothing = torch.full((), math.nan, dtype=parameter.dtype).expand(parameter.shape)
                nothing = nothing.clone() if parameter.ndim < 2 else nothing
                made[parameter] = torch.nn.Parameter(nothing, requires_grad=False)
            module._parameters[own] = made[parameter]
    return model


def _is_hollow(parameter: torch.nn.Parameter) -> bool:
    return bool(parameter[(0,) * parameter.ndim].isnan())


def _cast(value: torch.Tensor, dtype: torch.dtype, name: str) -> torch.Tensor:
    cast = value.to(dtype).contiguous()
    if dtype is torch.float16 and not bool(torch.isfinite(cast).all()):
        raise ModelError(f"merge.dtype=fp16: {name} has values above 65504, which fp16 cannot hold. Use bf16 or fp32.")
    return cast
