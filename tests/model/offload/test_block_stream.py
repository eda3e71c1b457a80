"""Streamed blocks against the same model resident: losses and gradients bit for bit."""

from __future__ import annotations

import os
from functools import cache

import pytest
import torch

from tests.factories import FP32, gradients, option, packed_batch, random_tokens
from tests.model.offload.copying import Earliest, Latest
from trainer.config.compose import compose
from trainer.errors import StorageError
from trainer.model.attention import PACKED
from trainer.model.fused import modules as fused
from trainer.model.loading.base import load_base, load_config
from trainer.model.offload.block_sources import FileSource, HostSource
from trainer.model.offload.block_stream import SLOTS
from trainer.model.offload.copies import ThreadCopies
from trainer.model.offload.streamed_base import streamed_base
from trainer.training.losses import Chunked

CPU = torch.device("cpu")
BATCHES = [packed_batch(random_tokens([9, 14, 6], seed=seed)) for seed in (0, 1)]
LOSS = Chunked(chunk_tokens=16)
POLICIES = {
    "none": {},
    "full": {},
    "attention": {},
    "sqrt": {},
    "every_k": {"k": 3},
    "selective": {"keep": "both"},
}
DEPTH = 5


def words(quant: str) -> list[str]:
    a = "model.architecture."
    return [
        "model=tiny", "model.weights=random", f"quant={quant}", "precision=fp32", "device=cpu", f"{a}vocab_size=300",
        f"{a}hidden_size=64", f"{a}intermediate_size=128", f"{a}num_hidden_layers={DEPTH}",
        f"{a}num_attention_heads=4", f"{a}num_key_value_heads=2", f"{a}head_dim=16",
    ]  # fmt: skip


@cache
def config_of(quant: str):
    return compose(words(quant)).config


def resident(quant: str):
    config = config_of(quant)
    torch.manual_seed(0)
    return load_base(config.model, load_config(config.model), config.quant, FP32, CPU, PACKED)


def streamed(quant: str, source, copies=None):
    config = config_of(quant)
    torch.manual_seed(0)
    return streamed_base(
        config.model, load_config(config.model), config.quant, FP32, CPU, PACKED, source, copies or ThreadCopies()
    )


def adapted(base, use_fused: bool):
    torch.manual_seed(1)
    model = option("adapter", "lora", r=4, dropout=0.1, fused=use_fused).attach(base)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    return model


def steps(model, policy):
    """Losses and summed gradients of two micro-batches, and the loss in evaluation."""
    base = model.get_base_model()
    policy.apply(base)
    model.train()
    torch.manual_seed(2)
    losses = []
    for batch in BATCHES:
        loss = LOSS.sum(base, batch) / batch.num_targets
        loss.backward()
        losses.append(loss.detach())
    model.eval()
    with torch.no_grad():
        losses.append(LOSS.sum(base, BATCHES[0]))
    return losses, gradients(model)


def assert_bit_equal(left, right):
    assert [x.item() for x in left[0]] == [x.item() for x in right[0]]
    assert left[1].keys() == right[1].keys()
    assert max(g.abs().max() for g in left[1].values()) > 1e-3
    for name, gradient in left[1].items():
        assert torch.equal(gradient, right[1][name]), name


@pytest.mark.parametrize("queue", [Earliest, Latest, ThreadCopies])
@pytest.mark.parametrize("use_fused", [True, False], ids=["fused", "eager"])
@pytest.mark.parametrize("policy", POLICIES)
def test_gradients_are_those_of_the_resident_model(policy, use_fused, queue):
    chosen = option("checkpointing", policy, **POLICIES[policy])
    expected = steps(adapted(resident("nf4"), use_fused), chosen)
    base, stream = streamed("nf4", HostSource(CPU), queue())
    assert_bit_equal(expected, steps(adapted(base, use_fused), option("checkpointing", policy, **POLICIES[policy])))
    stream.close()


@pytest.mark.parametrize("policy", ["none", "full"])
@pytest.mark.parametrize("quant", ["none", "nf4", "fp4"])
def test_blocks_read_from_files(quant, policy, tmp_path):
    expected = steps(adapted(resident(quant), True), option("checkpointing", policy))
    base, stream = streamed(quant, FileSource(tmp_path, CPU, 0))
    assert list(tmp_path.iterdir()) == []  # open, and without a name
    assert_bit_equal(expected, steps(adapted(base, True), option("checkpointing", policy)))
    assert stream.copies.hidden_share() is not None
    stream.close()


def test_blocks_that_lie_across_slabs_of_host_memory(monkeypatch):
    monkeypatch.setattr(HostSource, "SLAB", 10_000)  # a block is about three of them
    expected = steps(adapted(resident("nf4"), True), option("checkpointing", "full"))
    base, stream = streamed("nf4", HostSource(CPU), Latest())
    assert len(stream.source._slabs) == -(-sum(block.size for block in stream.blocks) // 10_000) > DEPTH
    assert_bit_equal(expected, steps(adapted(base, True), option("checkpointing", "full")))
    stream.close()


def held_bytes(base) -> int:
    """Bytes of the storages that the linear layers of the blocks use."""
    storages = {}
    for module in base.model.layers.modules():
        for tensor in [*module._parameters.values(), *module._buffers.values()]:
            if tensor is not None:
                storages[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
    return sum(storages.values())


def test_two_blocks_are_held_and_no_more(tmp_path):
    whole = held_bytes(resident("none"))
    base, stream = streamed("none", FileSource(tmp_path, CPU, 0))
    with torch.no_grad():
        LOSS.sum(base, BATCHES[0])
    norms = DEPTH * 2 * 64 * 4
    assert held_bytes(base) <= SLOTS * stream.slot_bytes + norms + DEPTH * 7 * 4
    assert SLOTS * stream.slot_bytes < 0.5 * whole
    stream.close()


@pytest.mark.parametrize("policy", POLICIES)
def test_the_order_of_a_step_is_learnt(policy):
    """After one micro-batch nothing comes unforeseen, and a micro-batch moves what two slots cannot keep."""
    base, stream = streamed("nf4", HostSource(CPU), Latest())
    model = adapted(base, True)
    option("checkpointing", policy, **POLICIES[policy]).apply(base)
    model.train()
    counts = []
    for _ in range(3):
        before = stream.moved.blocks, stream.moved.unforeseen
        stream.moved.order = []
        (LOSS.sum(base, BATCHES[0]) / 50).backward()
        counts.append((stream.moved.blocks - before[0], stream.moved.unforeseen - before[1]))
    assert counts[1] == counts[2]
    blocks, unforeseen = counts[2]
    assert unforeseen == 0
    assert blocks == fewest_moves(stream.moved.order * 2, SLOTS) - fewest_moves(stream.moved.order, SLOTS)


def fewest_moves(order: list[int], slots: int) -> int:
    """Loads of a cache that always drops what is used last of all (Belady 1966): no policy moves less."""
    held, moves = set(), 0
    for position, block in enumerate(order):
        if block in held:
            continue
        moves += 1
        if len(held) == slots:
            later = order[position:]
            held.discard(max(held, key=lambda b: later.index(b) if b in later else len(later)))
        held.add(block)
    return moves


def test_a_weight_that_nobody_fetched_spoils_the_result():
    base, stream = streamed("nf4", HostSource(CPU), Latest())
    layer = base.model.layers[3].mlp.up_proj
    assert type(layer).forward(layer, torch.ones(1, 64)).isnan().all()
    assert layer(torch.ones(1, 64)).isfinite().all()
    stream.close()


@pytest.mark.parametrize("policy", ["none", "full"])
def test_a_file_that_ends_early_is_an_error_with_the_reason(policy, tmp_path):
    base, stream = streamed("nf4", FileSource(tmp_path, CPU, 0))
    model = adapted(base, True)
    option("checkpointing", policy).apply(base)
    model.train()
    LOSS.sum(base, BATCHES[0]).backward()
    for block, file in stream.source._files.items():
        if block != 0:
            os.truncate(f"/proc/self/fd/{file}", 100)
    with pytest.raises(StorageError, match=r"offload=base_disk: block \d .*ends \d+ bytes early.*checkpoint is kept"):
        for _ in range(2):
            LOSS.sum(base, BATCHES[0]).backward()
    stream.close()


def test_a_folder_without_room(tmp_path):
    with pytest.raises(StorageError, match=r"take 931322.57 GiB.*offload.folder"):
        FileSource(tmp_path, CPU, 10**15)


def test_switched_off_adapters_give_the_resident_base():
    base, stream = streamed("none", HostSource(CPU), Latest())
    model = adapted(base, True).eval()
    plain = resident("none").requires_grad_(False)
    with torch.no_grad():
        expected = LOSS.sum(plain, BATCHES[0])
        with model.disable_adapter():
            assert torch.equal(LOSS.sum(base, BATCHES[0]), expected)
        assert not torch.equal(LOSS.sum(base, BATCHES[0]), expected)
    assert fused.describe(model).startswith("fused 5 q/k/v groups, 5 MLPs")  # their proof by numbers fetched the blocks
    stream.close()
