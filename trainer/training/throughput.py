"""Useful arithmetic of a step, and what share of the device's peak it reaches (MFU)."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from trainer.model.adapters import decoder_linears
from trainer.model.mixtures import active_weights

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from trainer.data.batches.batch import MicroBatch

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
    """N: weights of the decoder's linear layers, of a mixture's experts as many as a token meets"""
    head: int
    """Nh: weights of the output head"""
    adapter: int
    """Nl: weights of the adapter"""
    attention_width: int
    """L H D: layers x query heads x head size"""
    base_trains: bool

    def flops(self, batch: MicroBatch) -> float:
        """Useful operations of forward and backward of one micro-batch, which is still on the host."""
        passes = 6 if self.base_trains else 4
        linear = batch.num_tokens * (passes * self.base_linear + 6 * self.adapter)
        return linear + batch.num_targets * passes * self.head + 3 * self._attention(_squares(batch))

    def step_flops(self, batch: MicroBatch, recomputed: float) -> float:
        """All operations of one micro-batch, where `recomputed` is the share of the blocks that run twice."""
        return self.all_flops(batch.num_tokens, batch.num_targets, _squares(batch), recomputed)

    def all_flops(self, num_tokens: int, num_targets: int, squares: float, recomputed: float) -> float:
        """Forward, backward and recompute, a token: 2N + 2f Nh + 2Nl + A, then 2N + 2f Nh + 4Nl + 2.5A (with weight
        gradients 2N and 2f Nh more), then the recomputed share of 2N + 2Nl + A. `squares`: sum of squared lengths.
        """
        linear, adapter = 2 * num_tokens * self.base_linear, 2 * num_tokens * self.adapter
        head, attention = 2 * num_targets * self.head, self._attention(squares)
        forward = linear + head + adapter + attention
        backward = linear + head + 2 * adapter + 2.5 * attention
        if self.base_trains:
            backward += linear + head
        return forward + backward + recomputed * (linear + adapter + attention)

    def _attention(self, squares: float) -> float:
        """Operations of one forward pass over samples whose squared lengths sum to this."""
        return 2 * self.attention_width * squares


def _squares(batch: MicroBatch) -> float:
    """Sum of the squared lengths of its samples."""
    if batch.cu_seqlens is not None:
        lengths = np.diff(batch.cu_seqlens.numpy())
    else:
        lengths = batch.attention_mask.numpy().sum(1)
    return float((lengths.astype(np.float64) ** 2).sum())


def count_arithmetic(skeleton: PreTrainedModel, adapter_parameters: int, base_trains: bool) -> Arithmetic:
    """The counts of a model, from its shape on the meta device."""
    config = skeleton.config.get_text_config()
    heads = getattr(config, "num_attention_heads", 0)
    head_size = getattr(config, "head_dim", None) or config.hidden_size // max(heads, 1)
    return Arithmetic(
        base_linear=sum(skeleton.get_submodule(name).weight.numel() for name in decoder_linears(skeleton))
        + active_weights(skeleton),
        head=skeleton.get_output_embeddings().weight.numel(),
        adapter=adapter_parameters,
        attention_width=config.num_hidden_layers * heads * head_size,
        base_trains=base_trains,
    )


def matmul_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Operations a second of square matrix products on this very device: what MFU is measured against.

    The best of a few, which costs 0.1 s: clocks, other processes and power limits are part of the device as it is,
    a data sheet's rate is not. A CPU is timed with the threads that torch has. The numbers are random: of constants a
    GPU's multipliers draw less power, and its clock stays up to 13 % higher. No generator of the run is touched, and
    nothing stays in the device's memory.
    """
    size, repeats = (8192, 10) if device.type == "cuda" else (1024, 4)
    generator = torch.Generator(device).manual_seed(0)
    a, b = (torch.randn(size, size, dtype=dtype, device=device, generator=generator) for _ in range(2))
    seconds = []
    for _ in range(repeats + 1):
        _wait(device)
        started = time.perf_counter()
        a @ b
        _wait(device)
        seconds.append(time.perf_counter() - started)
    del a, b
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return 2 * size**3 / min(seconds[1:])


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
