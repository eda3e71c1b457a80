"""The run's model without its weights: on the meta device, with the quantised layers' shapes written out by hand.

bitsandbytes' own parameters quantise when they reach a device and cannot be built without values, so a stand-in holds
tensors of the same shapes and calls the same matrix product. Everything else, PEFT's modules included, is the code
that runs.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import singledispatch
from typing import TYPE_CHECKING

import bitsandbytes as bnb
import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from trainer.model.adapters import decoder_linears
from trainer.model.fused.tiles import tile
from trainer.model.int8 import frozen_forward
from trainer.model.model_settings import Weights
from trainer.model.new_tokens import grow, planned_ids
from trainer.model.quant import FourBit, Int8, NoQuant, Quant

if TYPE_CHECKING:
    from trainer.config.schema import Config

BLOCK, SCALE_BLOCK = 64, 256
"""Weights that share a scale; scales that share a second one (Dettmers et al. 2023, section 3)."""


@dataclass
class Outline:
    """A model's shape with its adapter, on the meta device."""

    base: PreTrainedModel
    adapted: torch.nn.Module
    """the PEFT model around base, or base itself"""

    def trainable(self) -> list[torch.nn.Parameter]:
        return [p for p in self.adapted.parameters() if p.requires_grad]

    def layers(self) -> list[torch.nn.Module]:
        """The decoder's blocks; empty where the model is not built from blocks that transformers can checkpoint."""
        blocks = [m for m in self.base.get_decoder().modules() if isinstance(m, GradientCheckpointingLayer)]
        return blocks if len(blocks) == self.base.config.get_text_config().num_hidden_layers else []


class Standin4bit(bnb.nn.Linear4bit):
    """The shape of a Linear4bit: packed codes, and a scale for each block."""

    def __init__(self, linear: torch.nn.Linear, quant: FourBit, compute: torch.dtype):
        torch.nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        numel = linear.in_features * linear.out_features
        self.weight = torch.nn.Parameter(_meta((numel + 1) // 2, 1, dtype=torch.uint8), requires_grad=False)
        self.weight.compress_statistics, self.weight.quant_type = quant.double_quant, quant.code
        self.bias = linear.bias
        self.compute_dtype = compute
        blocks = -(-numel // BLOCK)
        offset = state2 = None
        absmax = _meta(blocks)
        if quant.double_quant:
            absmax, offset = _meta(blocks, dtype=torch.uint8), _meta()
            state2 = bnb.functional.QuantState(
                absmax=_meta(-(-blocks // SCALE_BLOCK)), blocksize=SCALE_BLOCK, code=_meta(256), dtype=torch.float32
            )
        self.quant_state = bnb.functional.QuantState(
            absmax=absmax,
            shape=torch.Size((linear.out_features, linear.in_features)),
            code=_meta(16),
            blocksize=BLOCK,
            quant_type=quant.code,
            dtype=compute,
            offset=offset,
            state2=state2,
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        dtype = x.dtype
        x = x.to(self.compute_dtype)
        bias = None if self.bias is None else self.bias.to(self.compute_dtype)
        return bnb.matmul_4bit(x, self.weight, bias=bias, quant_state=self.quant_state).to(dtype)

    def scales(self) -> list[torch.Tensor]:
        """Tensors beside the packed codes."""
        state = self.quant_state
        found = [state.absmax, state.code]
        if state.state2 is not None:
            found += [state.offset, state.state2.absmax]  # its code table is one for all layers
        return found

    def block_scales(self) -> list[torch.Tensor]:
        """Those of them that grow with the weight."""
        state = self.quant_state
        return [state.absmax] if state.state2 is None else [state.absmax, state.state2.absmax]

    def convert(self, function) -> None:
        """Replaces every tensor of the quantisation state."""
        state = self.quant_state
        for holder in (state, state.state2):
            if holder is not None:
                holder.absmax, holder.code = function(holder.absmax), function(holder.code)
        if state.offset is not None:
            state.offset = function(state.offset)


class Standin8bit(bnb.nn.Linear8bitLt):
    """The shape of a Linear8bitLt: int8 weights and a scale a row; outlier columns, which only data shows, are none."""

    index = None

    def __init__(self, linear: torch.nn.Linear, quant: Int8, compute: torch.dtype):
        torch.nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight = torch.nn.Parameter(_meta(*linear.weight.shape, dtype=torch.int8), requires_grad=False)
        self.bias = linear.bias
        self.state = bnb.MatmulLtState()
        self.state.has_fp16_weights, self.state.threshold = False, 0.0
        self.state.CB, self.state.SCB = self.weight, _meta(linear.out_features)
        frozen_forward(self)  # as the run's own layers

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.state.is_training = True
        return bnb.matmul(x, self.weight, bias=self.bias, state=self.state)

    def scales(self) -> list[torch.Tensor]:
        return [self.state.SCB]

    def convert(self, function) -> None:
        self.state.CB, self.state.SCB = self.weight, function(self.state.SCB)


@singledispatch
def standin(quant: Quant, linear: torch.nn.Linear, compute: torch.dtype) -> torch.nn.Module:
    """A linear layer's shape under a quantisation."""
    raise TypeError(f"no stand-in is known for {type(quant).__name__}: register one beside its siblings")


@standin.register
def _(quant: NoQuant, linear, compute):
    return linear


@standin.register
def _(quant: FourBit, linear, compute):
    return Standin4bit(linear, quant, compute)


@standin.register
def _(quant: Int8, linear, compute):
    return Standin8bit(linear, quant, compute)


def outline(
    config: Config, model_config: PretrainedConfig, compute: torch.dtype, attention: str, depth: int | None = None
) -> Outline:
    """The model that this configuration trains, with `depth` of its layers (null: all), on the meta device."""
    with torch.device("meta"):
        base = AutoModelForCausalLM.from_config(
            shallower(model_config, depth or model_config.get_text_config().num_hidden_layers),
            dtype=compute,
            attn_implementation=attention,
        )
        new_ids = planned_ids(base, config.model.new_tokens)
        grow(base, new_ids)
        for name in decoder_linears(base):
            parent, _, child = name.rpartition(".")
            holder = base.get_submodule(parent)
            setattr(holder, child, standin(config.quant, getattr(holder, child), compute))
        base.tie_weights()
        pretrained = config.model.weights is Weights.pretrained
        # PEFT picks its layers by these: a base with random weights is quantised by us, not by from_pretrained.
        base.is_loaded_in_4bit = pretrained and isinstance(config.quant, FourBit)
        base.is_loaded_in_8bit = pretrained and isinstance(config.quant, Int8)
        base.config.use_cache = False
        adapted = config.adapter.attach(base, new_ids)
        tile(base, config.model.mlp_tiles)
    return Outline(base, adapted)


def shallower(model_config: PretrainedConfig, depth: int) -> PretrainedConfig:
    """The same architecture with its first `depth` layers."""
    shallow = copy.deepcopy(model_config)
    text = shallow.get_text_config()
    text.num_hidden_layers = depth
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[:depth]
    return shallow


def _meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")
