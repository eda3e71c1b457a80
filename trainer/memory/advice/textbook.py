"""The textbook accounting of training memory: short formulas with their sources, as `plan explain=true` shows them.

All results are bytes. GB in a comment is 1e9 bytes, as the sources count; the program prints GiB everywhere else.

P: parameters of the model. theta: trainable parameters. L: layers. d: hidden size. B: samples. T: tokens a sample.
a: attention heads. r: rank. n: adapted projections a layer.
"""

from __future__ import annotations

from math import ceil, sqrt

GB = 10**9

BF16, FP32, ADAM, ADAM_8BIT = 2, 4, 8, 2
"""Bytes a number: a bf16 value, an fp32 value, two fp32 moments, two 8-bit moments (without their scales)."""


def full_mixed_precision(parameters: int, state: int = ADAM) -> int:
    """Weights, fp32 master, gradients and Adam state: 16 bytes a parameter (Rajbhandari et al. 2020, ZeRO, section 3).

    With 8-bit state (Dettmers et al. 2022, 8-bit optimizers): 10.
    """
    return parameters * (BF16 + FP32 + BF16 + state)


def lora(parameters: int, trainable: int) -> int:
    """A bf16 base, bf16 gradients and fp32 Adam state of the adapter only (Hu et al. 2021, LoRA, section 4.2)."""
    return BF16 * parameters + BF16 * trainable + ADAM * trainable


def qlora(parameters: int, trainable: int) -> int:
    """4 bits a base weight, the rest as lora (Dettmers et al. 2023, QLoRA): P/2 + 10 theta."""
    return parameters // 2 + BF16 * trainable + ADAM * trainable


def lora_parameters(layers: int, projections: int, hidden: int, rank: int) -> int:
    """theta of square projections: each adds A (r, d) and B (d, r) (Hu et al. 2021, section 4.1)."""
    return layers * projections * 2 * hidden * rank


def activations_rule(batch: int, tokens: int, hidden: int, layers: int) -> int:
    """The rule of thumb 24 B T d L of many write-ups: twelve bf16 vectors of size d a token and layer."""
    return 24 * batch * tokens * hidden * layers


def activations_layer(batch: int, tokens: int, hidden: int, heads: int, flash: bool) -> int:
    """One layer without checkpointing: 34 s b h + 5 a s^2 b (Korthikanti et al. 2022, equation 1).

    The second term is the attention matrix and its softmax and dropout; a flash kernel does not store them.
    """
    linear = 34 * tokens * batch * hidden
    return linear if flash else linear + 5 * heads * tokens**2 * batch


def activations_checkpointed(batch: int, tokens: int, hidden: int, layers: int) -> int:
    """Full checkpointing keeps each layer's bf16 input: 2 L B T d (Chen et al. 2016)."""
    return BF16 * layers * batch * tokens * hidden


def sqrt_segments(layers: int) -> int:
    """Length of a segment in the placement of Chen et al. 2016, section 4.1: k minimises k + L / k, so k = sqrt(L)."""
    return ceil(sqrt(layers))


def sqrt_stored_inputs(layers: int) -> int:
    """Layer inputs alive at most in that placement: one a segment, and one segment's own layers."""
    segment = sqrt_segments(layers)
    return ceil(layers / segment) + segment


def logits(tokens: int, vocabulary: int) -> int:
    """fp32 logits of every token."""
    return FP32 * tokens * vocabulary
