"""What the plan says of offloading, against a real stream and a traced step."""

from __future__ import annotations

import pytest
import torch

from tests.bench._memory_cases import BASE, A
from tests.bench._memory_step import worst_shape
from tests.factories import option
from tests.model.offload.copying import Latest
from tests.model.offload.test_block_stream import BATCHES, DEPTH, LOSS, POLICIES, adapted, streamed
from trainer.config.compose import compose
from trainer.config.shelf import all_options
from trainer.memory.advice import whatif
from trainer.memory.fit import fit
from trainer.memory.predict.moments import predict
from trainer.memory.predict.moved import LINKS, moved_blocks, offload_plan
from trainer.memory.predict.planner import Planner
from trainer.memory.predict.trace import trace
from trainer.model.checkpointing import FullCheckpointing
from trainer.model.offload.activations import IN_FLIGHT, MovedInputs, Mover, move_inputs
from trainer.model.offload.block_sources import HostSource
from trainer.units import GIB

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
        resident.weights[kind] - streams.weights[kind]
        for kind in ("quantised weights", "scales of quantised weights", "linear weights")
    ]
    assert sum(away) == streams.streamed
    stream.close()


def test_what_the_70b_recipe_moves():
    """By hand: each block twice a micro-batch, but for the two that are still there at either end."""
    config = compose(["recipe=qlora_llama3_70b_24gb", "model.weights=random"]).config
    planner = Planner(config)
    plan = offload_plan(planner)
    block = 8192 * (2 * 8192 + 2 * 1024 + 3 * 28672)  # q and o, k and v, gate and up and down
    stored = block / 2 + block / 64 + 4 * block / 64 / 256
    assert plan.elsewhere_gib == pytest.approx(80 * stored / GIB, rel=1e-3)
    assert plan.moved_gib_a_micro_batch == pytest.approx(2 * 78 * stored / GIB, rel=1e-3)
    assert plan.moved_gib_a_step == 4 * plan.moved_gib_a_micro_batch
    card = plan.devices["RTX 4090"]
    assert card.moving_seconds == pytest.approx(2 * 78 * stored / LINKS["RTX 4090"], rel=1e-3)
    tokens = planner.shape.num_tokens * card.moving_seconds / card.computing_seconds
    assert card.hidden_from_tokens == pytest.approx(tokens, abs=1)
    prediction = planner.predict()
    assert planner.needed(prediction) < 24 * GIB and prediction.host / GIB == plan.elsewhere_gib


def test_a_gpu_that_is_too_small_gets_offloading():
    """checkpointing=auto moves inputs before it makes the micro-batch smaller; the rows say what each frees."""
    words = ["recipe=qlora_llama3_8b", "model.weights=random", "train.micro_batch_tokens=16384", "data.max_length=4096"]
    planner = Planner(compose([*words, "checkpointing=auto"]).config)
    plain, moved = (
        planner.needed(planner.predict(policy)) for policy in (FullCheckpointing(), MovedInputs(FullCheckpointing()))
    )
    chosen = fit(planner, (plain + moved) / 2 / GIB)
    assert chosen.policy.moves_inputs and chosen.micro_batch_tokens == 16384
    assert chosen.sentence() == "32 blocks recomputed, their inputs in host memory"
    full = Planner(compose(words).config)
    rows = {row.change: row.needed for row in whatif.rows(full, all_options())}
    assert rows["offload=activations"] == moved
    for change in ("offload=base_cpu", "offload=base_disk", "model.mlp_tiles=auto"):
        changed = Planner(compose([*words, change]).config)
        assert rows[change] == changed.needed(changed.predict()), change
        assert rows[change] < plain


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
    plain, moved = planner.predict(FullCheckpointing()).peak, planner.predict(MovedInputs(FullCheckpointing()))
    assert moved.static.host == 12 * planner.input_bytes() and moved.host == 0  # one pool, on a CPU
    moved = moved.peak - moved.static.host
    whole = trace(
        config, planner.model_config, planner.dtypes, "cpu", planner.shape, Traced(FullCheckpointing()), depth=12
    )
    real = predict(planner.static, [whole] * 12, planner.optimizer.workspace, planner.accumulates)
    size = planner.input_bytes()
    assert plain - moved == pytest.approx((12 - IN_FLIGHT) * size, rel=0.15)
    assert abs(moved - real.peak) <= 1.5 * size
    assert planner.elsewhere(MovedInputs(FullCheckpointing())) == 12 * size
