"""What the plan says of offloading, against a real stream and a traced step."""

from __future__ import annotations

import pytest
import torch

from tests.bench._memory_cases import BASE, A
from tests.bench._memory_step import worst_shape
from tests.factories import option
from tests.model.offload.copying import Latest
from tests.model.offload.test_stream import BATCHES, DEPTH, LOSS, POLICIES, adapted, streamed
from trainer.config.compose import compose
from trainer.memory.plan import Planner
from trainer.memory.predict import predict
from trainer.memory.streaming import moved_blocks
from trainer.memory.trace import trace
from trainer.model.checkpointing import Full
from trainer.model.offload.activations import IN_FLIGHT, MovedInputs, Mover, move_inputs
from trainer.model.offload.sources import HostSource

CPU = torch.device("cpu")


@pytest.mark.parametrize("policy", POLICIES)
def test_blocks_moved_are_those_of_a_real_step(policy):
    chosen = option("checkpointing", policy, **POLICIES[policy])
    base, stream = streamed("nf4", HostSource(CPU), Latest())
    model = adapted(base, True)
    chosen.apply(base)
    model.train()
    moved = []
    for _ in range(3):
        before = stream.moved.blocks
        LOSS.sum(base, BATCHES[0]).backward()
        moved.append(stream.moved.blocks - before)
    assert moved[2] == moved_blocks(chosen, DEPTH)


@pytest.mark.parametrize("quant", ["none", "nf4", "fp4"])
def test_the_bytes_of_a_streamed_base_are_those_of_a_real_one(quant):
    base, stream = streamed(quant, HostSource(CPU))
    words = [*BASE, f"quant={quant}", "offload=base_cpu", "adapter.dropout=0.1", f"{A}vocab_size=300",
             f"{A}hidden_size=64", f"{A}intermediate_size=128", f"{A}num_hidden_layers={DEPTH}",
             f"{A}head_dim=16"]  # fmt: skip
    planner = Planner(compose(words).config)
    assert planner.static.streamed == sum(place.size for block in stream.blocks for place in block.places)
    assert planner.static.slots == 2 * stream.slot_bytes
    resident = Planner(compose([*words, "offload=none"]).config).static
    for kind in ("embeddings", "head", "norms and others"):
        assert resident.weights[kind] == planner.static.weights[kind]
    streams = planner.static
    away = [
        resident.weights[kind] - streams.weights[kind] for kind in ("quantised weights", "absmax", "linear weights")
    ]
    assert sum(away) == streams.streamed
    stream.close()


class OnlyTheDevice(Mover):
    """Its host buffers do not exist, so that a tracker of live storages sees the device alone."""

    def _buffer(self, size):
        return torch.empty(0, dtype=torch.uint8)

    @staticmethod
    def _view(kept):
        return None


class Nothing(Latest):
    def enqueue(self, work, after=None):
        return None


class Traced:
    def __init__(self, inner):
        self.inner = inner

    def apply(self, base):
        self.inner.apply(base)
        move_inputs(base, OnlyTheDevice(Nothing(), CPU))


def test_moved_inputs_save_what_a_traced_step_saves():
    """The closed form, from three traced blocks, against all blocks traced with inputs that leave."""
    config = compose([*BASE, f"{A}num_hidden_layers=12", "train.micro_batch_tokens=1024"]).config
    planner = Planner(config, shape=worst_shape(config))
    plain, moved = planner.predict(Full()), planner.predict(MovedInputs(Full()))
    whole = trace(config, planner.model_config, planner.dtypes, "cpu", planner.shape, Traced(Full()), depth=12)
    real = predict(planner.static, [whole] * 12, planner.optimizer.workspace, planner.accumulates)
    size = planner.input_bytes()
    assert plain.peak - moved.peak == pytest.approx((12 - IN_FLIGHT) * size, rel=0.15)
    assert abs(moved.peak - real.peak) <= 1.5 * size
    assert planner.elsewhere(MovedInputs(Full())) == 12 * size
