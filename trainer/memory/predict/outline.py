"""The run's model without its weights: on the meta device, with stand-ins for its quantised layers.

Everything else, PEFT's modules included, is the code that runs.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights
from transformers.modeling_layers import GradientCheckpointingLayer

from trainer.errors import PlanError, TrainerError
from trainer.model.adapters import decoder_linears
from trainer.model.experts import stacks
from trainer.model.fused.tiles import tile
from trainer.model.mixtures import decoder_experts
from trainer.model.model_settings import Weights
from trainer.model.neftune import add_noise
from trainer.model.new_tokens import grow, planned_ids
from trainer.model.roles import mark_tables
from trainer.registry import name_of

if TYPE_CHECKING:
    from trainer.memory.predict.sections import Sections


@dataclass
class Outline:
    """A model's shape with its adapter, on the meta device."""

    base: PreTrainedModel
    adapted: torch.nn.Module
    """the PEFT model around base, or base itself"""
    quantised: dict[torch.nn.Module, int] = field(default_factory=dict)
    """stand-ins of quantised layers, and the numbers that their weights stand for"""

    def trainable(self) -> list[torch.nn.Parameter]:
        return [p for p in self.adapted.parameters() if p.requires_grad]

    def layers(self) -> list[torch.nn.Module]:
        """The decoder's blocks; empty where the model is not built from blocks that transformers can checkpoint."""
        blocks = [m for m in self.base.get_decoder().modules() if isinstance(m, GradientCheckpointingLayer)]
        return blocks if len(blocks) == self.base.config.get_text_config().num_hidden_layers else []


def outline(
    config: Sections, model_config: PretrainedConfig, compute: torch.dtype, attention: str, depth: int | None = None
) -> Outline:
    """The model that this configuration trains, with `depth` of its layers (null: all), on the meta device.

    Raises PlanError where an option cannot be applied without values.
    """
    quantised = {}
    with torch.device("meta"), no_init_weights():
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
            linear = getattr(holder, child)
            with _named("quant", config.quant):
                standin = config.quant.standin(linear, compute)
            if standin is not linear:
                quantised[standin] = linear.weight.numel()
                setattr(holder, child, standin)
        for name in decoder_experts(base):
            with _named("quant", config.quant):
                config.quant.experts(base.get_submodule(name), compute, torch.device("meta"))
        quantised |= {stack: stack.shape.numel() for stack in stacks(base).values()}
        base.tie_weights()
        if config.model.weights is Weights.pretrained:
            config.quant.mark(base)  # a base with random weights is quantised by us, not by from_pretrained
        base.config.use_cache = False
        with _named("adapter", config.adapter):
            adapted = config.adapter.attach(base, new_ids)
        mark_tables(adapted)
        tile(base, config.model.mlp_tiles)
        add_noise(base, config.train.neftune_alpha)
    return Outline(base, adapted, quantised)


@contextmanager
def _named(group: str, section: object) -> Iterator[None]:
    """Says which option it was that could not be planned."""
    try:
        yield
    except TrainerError:
        raise
    except Exception as error:
        raise PlanError.of(f"{group}={name_of(group, section)}", error) from error


def shallower(model_config: PretrainedConfig, depth: int) -> PretrainedConfig:
    """The same architecture with its first `depth` layers."""
    shallow = copy.deepcopy(model_config)
    text = shallow.get_text_config()
    text.num_hidden_layers = depth
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[:depth]
    return shallow
