"""The arithmetic behind MFU against a count by hand and against torch's flop counter."""

from __future__ import annotations

import time

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tests.factories import llama, option, packed_batch, padded_batch, random_tokens
from trainer.model.fused import modules as fused
from trainer.training.losses import Full
from trainer.training.throughput import count_arithmetic, matmul_flops

TOKENS = random_tokens([32, 32], targets=2.0)
N = 2 * (64 * 64 + 2 * 64 * 32 + 64 * 64 + 3 * 64 * 128)
NH = 300 * 64


def adapter_weights() -> int:
    linears = [(64, 64), (64, 32), (64, 32), (64, 64), (64, 128), (64, 128), (128, 64)]
    return 2 * sum(16 * (i + o) for i, o in linears)


@pytest.mark.parametrize("base_trains", [False, True])
def test_by_hand(base_trains):
    adapter = 0 if base_trains else adapter_weights()
    batch = packed_batch(TOKENS)
    assert batch.num_targets == 62
    attention = 3 * 2 * (2 * 4 * 16) * (32**2 + 32**2)
    passes = 6 if base_trains else 4
    expected = 64 * (passes * N + 6 * adapter) + 62 * passes * NH + attention
    arithmetic = count_arithmetic(llama(), adapter, base_trains)
    assert arithmetic.flops(batch) == expected
    assert arithmetic.flops(padded_batch(TOKENS)) == expected, "padding is no useful work"


@pytest.mark.parametrize("recomputed", [0.0, 0.5, 1.0])
def test_all_arithmetic_by_hand(recomputed):
    """Forward 2N + 2f Nh + 2Nl + A, backward 2N + 2f Nh + 4Nl + 2.5A, recompute its share of 2N + 2Nl + A."""
    adapter, attention = adapter_weights(), 2 * (2 * 4 * 16) * (32**2 + 32**2)
    forward = 64 * 2 * (N + adapter) + attention
    expected = 2 * 64 * 2 * N + 2 * 62 * 2 * NH + 64 * 6 * adapter + 3.5 * attention + recomputed * forward
    arithmetic = count_arithmetic(llama(), adapter, False)
    assert arithmetic.step_flops(packed_batch(TOKENS), recomputed) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("trains", ["lora", "none"])
def test_torchs_counter_agrees(trains):
    """It counts every position's logits, the whole T x T of attention (we the causal half), and block 0's input."""
    base = llama("eager")
    option("adapter", trains).attach(base)
    fused.remove(base)  # torch's counter does not know the products that add in place
    batch = padded_batch(TOKENS)
    counter = FlopCounterMode(display=False)
    with counter:
        Full().sum(base, batch).backward()
    adapter = 0 if trains == "none" else adapter_weights()
    ours = count_arithmetic(llama(), adapter, trains == "none").flops(batch)
    attention = 6 * (2 * 4 * 16) * 2 * 32**2
    head = (64 - 62) * (6 if trains == "none" else 4) * NH
    assert ours + attention + head == pytest.approx(counter.get_total_flops(), rel=0.06)


def test_the_measured_rate_is_that_of_a_product_timed_here():
    """Within a factor of four: the machine may be shared, and both are the best of a few."""
    size = 768
    a = torch.ones(size, size)
    seconds = []
    for _ in range(5):
        started = time.perf_counter()
        a @ a
        seconds.append(time.perf_counter() - started)
    expected = 2 * size**3 / min(seconds)
    assert expected / 4 < matmul_flops(torch.device("cpu"), torch.float32) < expected * 4
