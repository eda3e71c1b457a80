"""Options of the group `checkpointing`: which activations are kept for backward and which are computed again."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from trainer.config.registry import option
from trainer.errors import ModelError

if TYPE_CHECKING:
    import torch


@dataclass
class Checkpointing(ABC):
    """What the decoder keeps between forward and backward."""

    @abstractmethod
    def apply(self, model: torch.nn.Module) -> None:
        """Sets the policy on a transformers model, layer by layer."""


@option("checkpointing", "none")
@dataclass
class NoCheckpointing(Checkpointing):
    """Keep everything: fastest, most memory."""

    def apply(self, model):
        for layer in _checkpointable(model):
            layer.gradient_checkpointing = False


@option("checkpointing", "full")
@dataclass
class Full(Checkpointing):
    """Keep each layer's input and run the layer again in backward (Chen et al. 2016)."""

    def apply(self, model):
        from torch.utils.checkpoint import checkpoint

        layers = _checkpointable(model)
        if not layers:
            raise ModelError(
                f"checkpointing=full: {type(model).__name__} has no layers that transformers can checkpoint. "
                "Use checkpointing=none."
            )
        # Not through transformers' activation_checkpointing_enable: that makes the embedding's output require
        # gradients, which costs block 0's backward through q, k, v. Non-reentrant checkpointing does not need it.
        for layer in layers:
            layer.gradient_checkpointing = True
            layer._gradient_checkpointing_func = partial(checkpoint, use_reentrant=False)


def _checkpointable(model: torch.nn.Module) -> list[torch.nn.Module]:
    from transformers.modeling_layers import GradientCheckpointingLayer

    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
