"""A whole step of the largest micro-batch, and evaluation, first: a lack of memory shows in the first minute.

Then all is as before, to the bit: weights, gradients, optimizer, generators and mode.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
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
    """Makes the optimizer's state, runs forward and backward of the largest micro-batch beside it, twice where
    gradients accumulate, clips them, and runs the largest evaluation batch. Returns tokens of the batch."""
    device = loop.accelerator.device
    generators, was_training = rng_state(device), loop.model.training
    batch = collate(*loop.steps.fullest(), loop.steps.packing.packed)
    loop.model.train()
    with _state_as_in_a_step(loop.optimizer):
        for _ in range(min(2, loop.steps.train.accumulation_steps)):
            with loop.dtypes.autocast():
                loss = loop.loss.sum(loop.model, batch.to(device))
            loop.memory.sample()
            loop.accelerator.backward(loss / batch.num_targets)
            del loss
        torch.nn.utils.clip_grad_norm_(loop.parameters, 1.0)
        loop.memory.sample()
        loop.optimizer.zero_grad(set_to_none=True)
        if held_out is not None:
            largest = max(held_out(), key=lambda b: b.input_ids.numel())
            evaluate(loop.model, loop.loss, [largest], loop.dtypes)
    loop.model.train(was_training)
    set_rng_state(generators, device)
    return batch.num_tokens


@contextmanager
def _state_as_in_a_step(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Inside, the optimizer holds what it holds from its first step on; afterwards what it held before.

    A step of zero gradients at a learning rate of zero, without weight decay, moves no weight, and its memory is that
    of any step. A resumed run's optimizer has its state already and does not step: nothing could put its moments back.
    """
    if optimizer.state:
        yield
        return
    settings = [(group, dict(group)) for group in optimizer.param_groups]  # some count their steps there
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    negative_zeros = [((p == 0) & p.signbit()).nonzero(as_tuple=True) for p in parameters]  # -0.0 + 0.0 is 0.0
    try:
        for group, _ in settings:
            group.update(lr=0.0, weight_decay=0.0)
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        yield
    finally:
        optimizer.zero_grad(set_to_none=True)
        for group, values in settings:
            group.clear()
            group.update(values)
        with torch.no_grad():
            for parameter, places in zip(parameters, negative_zeros, strict=True):
                parameter[places] = -0.0
        _forget(optimizer)


def _forget(optimizer: torch.optim.Optimizer) -> None:
    """The state that a first step made is gone. bitsandbytes never frees paged memory: such state stays, as new."""
    for parameter, state in list(optimizer.state.items()):
        tensors = {key: value for key, value in state.items() if isinstance(value, torch.Tensor)}
        if not any(getattr(value, "is_paged", False) for value in tensors.values()):
            del optimizer.state[parameter]
            continue
        state["step"] = 0
        for key, value in tensors.items():
            if not key.startswith("qmap"):  # the code tables, which all parameters share
                value.zero_()
