"""Useful arithmetic of a step, and what share of the device's peak it reaches (MFU)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from trainer.model.adapters import decoder_linears

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from trainer.data.batch import MicroBatch

PEAK_TFLOPS = {
    "RTX 3090": 71,
    "RTX 4090": 165,
    "RTX 5090": 209,
    "A10G": 70,
    "A100": 312,
    "L4": 121,
    "L40S": 362,
    "H100": 989,
    "H200": 989,
    "B200": 2250,
}
"""Dense bf16 tensor-core rates with fp32 accumulation, from the vendor's data sheets."""


@dataclass(frozen=True)
class Arithmetic:
    """Counts behind the useful floating-point operations of a micro-batch.

    Per token 4N + 4f Nh + 6Nl + 3A with a frozen base (no weight gradients), 6N + 6f Nh + 3A without, where f is the
    share of targets and A = 2 L H D times the mean over tokens of the sample's length (causal attention's half of
    4 L T H D). Recomputation is not useful, so it does not count.
    """

    base_linear: int
    """N: weights of the decoder's linear layers"""
    head: int
    """Nh: weights of the output head"""
    adapter: int
    """Nl: weights of the adapter"""
    attention_width: int
    """L H D: layers x query heads x head size"""
    base_trains: bool

    def flops(self, batch: MicroBatch) -> float:
        """Useful operations of forward and backward of one micro-batch."""
        if batch.cu_seqlens is not None:
            lengths = batch.cu_seqlens.diff().double()
        else:
            lengths = batch.attention_mask.sum(1).double()
        attention = 2 * self.attention_width * float((lengths**2).sum())
        passes = 6 if self.base_trains else 4
        linear = batch.num_tokens * (passes * self.base_linear + 6 * self.adapter)
        return linear + batch.num_targets * passes * self.head + 3 * attention


def count_arithmetic(skeleton: PreTrainedModel, adapter_parameters: int, base_trains: bool) -> Arithmetic:
    """The counts of a model, from its shape on the meta device."""
    config = skeleton.config.get_text_config()
    heads = getattr(config, "num_attention_heads", 0)
    head_size = getattr(config, "head_dim", None) or config.hidden_size // max(heads, 1)
    return Arithmetic(
        base_linear=sum(skeleton.get_submodule(name).weight.numel() for name in decoder_linears(skeleton)),
        head=skeleton.get_output_embeddings().weight.numel(),
        adapter=adapter_parameters,
        attention_width=config.num_hidden_layers * heads * head_size,
        base_trains=base_trains,
    )


def peak_flops(device: torch.device) -> float | None:
    """The device's peak operations a second, or None where it is not known."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    matches = [key for key in PEAK_TFLOPS if key in name]
    return PEAK_TFLOPS[max(matches, key=len)] * 1e12 if matches else None
