"""NEFTune (Jain et al. 2024): uniform noise on the embeddings of a training step.

Of a sample with L tokens and embeddings of H numbers, each number gets noise from -a to a, a = alpha / sqrt(L H): the
length is the sample's own, in a packed row too. B: rows. T: tokens in a row.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def add_noise(base: PreTrainedModel, alpha: float) -> None:
    """From here on in training mode; 0: never. Torch's generator, which a run saves, draws it."""
    if alpha > 0:
        noise = EmbeddingNoise(alpha)
        base.get_decoder().register_forward_pre_hook(noise.before, with_kwargs=True)
        base.get_input_embeddings().register_forward_hook(noise.embedded)


class EmbeddingNoise:
    """Two hooks: the decoder's learns where samples begin, the embeddings' adds the noise."""

    def __init__(self, alpha: float):
        self.alpha = alpha
        self._lengths: torch.Tensor | None = None

    def before(self, decoder: torch.nn.Module, args: tuple, kwargs: dict) -> None:
        inside = decoder.training and kwargs.get("position_ids") is not None
        self._lengths = sample_lengths(kwargs["position_ids"], kwargs.get("attention_mask")) if inside else None

    def embedded(self, embeddings: torch.nn.Module, args: tuple, output: torch.Tensor) -> torch.Tensor:
        if self._lengths is None:
            return output
        largest = self.alpha / (self._lengths * output.shape[-1]).sqrt()  # (B, T)
        noise = torch.empty_like(output).uniform_(-1, 1)  # (B, T, H)
        return output + noise.mul_(largest[..., None].to(output.dtype))


def sample_lengths(position_ids: torch.Tensor, attention_mask: torch.Tensor | None) -> torch.Tensor:
    """(B, T) fp32: tokens of the sample that a position belongs to; the device is not read."""
    if attention_mask is not None:
        return attention_mask.sum(1, keepdim=True).expand_as(position_ids).float()
    sample = (position_ids == 0).cumsum(1) - 1
    counts = torch.zeros_like(position_ids).scatter_add_(1, sample, torch.ones_like(position_ids))
    return counts.gather(1, sample).float()
