"""The largest micro-batch and evaluation first: a lack of memory shows in the first minute. Then all is as before."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import torch

from trainer.data.batches.batch import MicroBatch, collate
from trainer.memory.memory_settings import Probe
from trainer.training.evaluate import evaluate
from trainer.training.state import rng_state, set_rng_state

if TYPE_CHECKING:
    from trainer.training.loop import Loop


def wanted(probe: Probe, device: torch.device) -> bool:
    """Whether this run probes."""
    return probe is Probe.always or (probe is Probe.auto and device.type == "cuda")


def probe_memory(loop: Loop, held_out: Callable[[], Iterable[MicroBatch]] | None) -> int:
    """Runs forward and backward of the largest micro-batch, twice where gradients accumulate, and the largest
    evaluation batch. Weights, gradients, generators and mode are as before afterwards. Returns tokens of the batch."""
    device = loop.accelerator.device
    generators, was_training = rng_state(device), loop.model.training
    batch = collate(*loop.steps.fullest(), loop.steps.packing.packed)
    loop.model.train()
    for _ in range(min(2, loop.steps.train.accumulation_steps)):
        with loop.dtypes.autocast():
            loss = loop.loss.sum(loop.model, batch.to(device))
        loop.memory.sample()
        loop.accelerator.backward(loss / batch.num_targets)
        del loss
    loop.optimizer.zero_grad(set_to_none=True)
    if held_out is not None:
        largest = max(held_out(), key=lambda b: b.input_ids.numel())
        evaluate(loop.model, loop.loss, [largest], loop.dtypes)
    loop.model.train(was_training)
    set_rng_state(generators, device)
    return batch.num_tokens
