"""Moved block inputs against kept ones: the same losses and gradients, bit for bit, however late a copy is."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

from tests.factories import VOCABULARY, llama, option, packed_batch, random_tokens
from tests.model.offload.copying import Earliest, Latest
from tests.model.offload.test_block_stream import LOSS, POLICIES, adapted, assert_bit_equal, steps
from trainer.model.attention import PACKED
from trainer.model.checkpointing import FullCheckpointing, NoCheckpointing, PerBlock
from trainer.model.offload.activations import IN_FLIGHT, MovedInputs, Mover, move_inputs
from trainer.model.offload.copies import ThreadCopies

CPU = torch.device("cpu")
DEPTH = 7
RECOMPUTES = [name for name in POLICIES if name not in ("none", "attention")]


def model():
    return adapted(llama(PACKED, num_hidden_layers=DEPTH), use_fused=True)


class Moving:
    """A policy with a queue of our own."""

    def __init__(self, inner, copies):
        self.inner, self.mover = inner, Mover(copies, CPU)

    def apply(self, base):
        self.inner.apply(base)
        move_inputs(base, self.mover)


@pytest.mark.parametrize("queue", [Earliest, Latest, ThreadCopies])
@pytest.mark.parametrize("policy", RECOMPUTES)
def test_gradients_are_those_of_kept_inputs(policy, queue):
    chosen = option("checkpointing", policy, **POLICIES[policy])
    expected = steps(model(), chosen)
    moving = Moving(chosen, queue())
    assert_bit_equal(expected, steps(model(), moving))
    inputs = {"full": DEPTH, "selective": DEPTH, "every_k": 3, "sqrt": 3}[policy]
    row = 29 * 64 * 4
    assert moving.mover.moved_bytes == 2 * row * (inputs + moving.mover.fetched // 2)  # two micro-batches
    assert moving.mover.fetched == 2 * max(0, inputs - IN_FLIGHT)  # the last ones are still there
    moving.mover.copies.close()


def test_blocks_that_keep_everything_send_nothing_away():
    policy = PerBlock([FullCheckpointing()] * 3 + [NoCheckpointing()] * (DEPTH - 3))
    expected = steps(model(), policy)
    moving = Moving(policy, Latest())
    assert_bit_equal(expected, steps(model(), moving))
    assert moving.mover.fetched == 2 * (3 - IN_FLIGHT)


def test_the_policy_of_the_option_is_the_same():
    expected = steps(model(), FullCheckpointing())
    assert_bit_equal(expected, steps(model(), option("offload", "activations").policy(FullCheckpointing())))
    assert MovedInputs(FullCheckpointing()).segment(5) is None


def test_as_the_synchronous_twin():
    """transformers' activation_checkpointing_enable(offload=True) is save_on_cpu around each checkpoint, pinned, which
    a machine without a GPU refuses; tests/gpu/offloads.py compares with the thing itself."""

    class Synchronous:
        def apply(self, base):
            FullCheckpointing().apply(base)
            for block in base.model.layers:
                block._gradient_checkpointing_func = synchronous

    def synchronous(function, *args):
        with save_on_cpu(pin_memory=False):
            return checkpoint(function, *args, use_reentrant=False)

    assert_bit_equal(steps(model(), Synchronous()), steps(model(), Moving(FullCheckpointing(), Latest())))


def test_the_device_holds_inputs_in_flight_only():
    """Of the inputs that a forward pass saved, IN_FLIGHT are alive outside the host's buffers, and none is lost."""
    deep = model()
    moving = Moving(FullCheckpointing(), Latest())
    moving.apply(deep.get_base_model())
    inputs: list[torch.Tensor] = []
    for block in deep.get_base_model().model.layers:
        block.register_forward_pre_hook(lambda _, args: inputs.append(weakref.ref(args[0].untyped_storage())))
    deep.train()
    hidden = deep.get_base_model().get_decoder()(**packed_batch(random_tokens([301])).inputs()).last_hidden_state
    gc.collect()
    assert len(inputs) == DEPTH
    assert [storage() is not None for storage in inputs] == [False] * (DEPTH - IN_FLIGHT) + [True] * IN_FLIGHT
    hidden.sum().backward()
    assert moving.mover.fetched == DEPTH - IN_FLIGHT


def test_host_buffers_are_used_again_and_replaced_by_larger_ones():
    deep, moving = model(), Moving(FullCheckpointing(), ThreadCopies())
    base = deep.get_base_model()
    moving.apply(base)
    deep.train()
    for seed in range(4):
        batch = packed_batch(random_tokens([20 + seed, 9], VOCABULARY, seed))
        LOSS.sum(base, batch).backward()
        gc.collect()
        assert len(moving.mover._free) == DEPTH
    moving.mover.copies.close()
