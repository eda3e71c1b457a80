"""The MLP in pieces against the whole: losses, gradients, dropout, memory, arithmetic."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM

from tests.factories import VOCABULARY, llama, packed_batch, random_tokens
from tests.model.fused.test_modules import LOSS, assert_equal, attached, other_model, quantised, step
from trainer.errors import ModelError
from trainer.model.attention import PACKED
from trainer.model.checkpointing import FullCheckpointing, NoCheckpointing, Selective
from trainer.model.fused import modules as fused
from trainer.model.fused.tiles import num_tiles, tile
from trainer.model.live_storages import LiveStorages
from trainer.model.recompute import Keep

POLICIES = [NoCheckpointing(), FullCheckpointing()]


@pytest.mark.parametrize("policy", POLICIES, ids=["keep", "recompute"])
@pytest.mark.parametrize("tiles", [2, 5, "auto", 1000])
@pytest.mark.parametrize("use_fused", [True, False], ids=["fused", "eager"])
def test_gradients_are_those_of_the_whole_row(use_fused, tiles, policy):
    """To 1e-5: a matrix product over fewer rows may block its sums in another way."""
    expected = step(attached(quantised(llama(PACKED)), fused=use_fused), policy)
    model = attached(quantised(llama(PACKED)), fused=use_fused)
    tile(model.get_base_model(), tiles)
    assert_equal(expected, step(model, policy))


@pytest.mark.parametrize("model_type", ["qwen3", "gemma", "phi3"])
def test_other_architectures(model_type):
    expected = step(attached(other_model(model_type), fused=True), FullCheckpointing())
    model = attached(other_model(model_type), fused=True)
    tile(model.get_base_model(), 3)
    assert_equal(expected, step(model, FullCheckpointing()))


def test_one_piece_is_the_model_itself():
    expected = step(attached(llama(PACKED), fused=True), FullCheckpointing())
    model = attached(llama(PACKED), fused=True)
    tile(model.get_base_model(), "auto")  # 29 tokens, 64 wide
    actual = step(model, FullCheckpointing())
    assert torch.equal(expected[0], actual[0])
    assert all(torch.equal(gradient, actual[1][name]) for name, gradient in expected[1].items())


@pytest.mark.parametrize("policy", POLICIES, ids=["keep", "recompute"])
def test_dropout_is_the_same_in_forward_and_in_backward(policy):
    """Against finite differences: a step along the gradient changes the loss of the same masks by what it says."""
    model = attached(llama(PACKED).double(), dropout=0.3, fused=True)
    for parameter in model.parameters():
        parameter.data = parameter.data.double()
    tile(model.get_base_model(), 4)
    _, gradients = step(model, policy)
    parameters = {n: p for n, p in model.named_parameters() if p.requires_grad and "mlp" in n}
    direction = {name: gradients[name] / gradients[name].norm() for name in parameters}
    losses = []
    for epsilon in (2e-3, -2e-3):
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.add_(direction[name], alpha=epsilon)
        losses.append(step(model, policy)[0])
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.add_(direction[name], alpha=-epsilon)
    slope = (losses[0] - losses[1]).item() / 4e-3
    assert slope == pytest.approx(sum(gradients[name].norm().item() for name in parameters), rel=1e-3)


class Products(TorchDispatchMode):
    """Rows that pass through matrix products with weights of the MLP's width."""

    def __init__(self, width):
        super().__init__()
        self.width, self.rows = width, 0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        out = op(*args, **(kwargs or {}))
        if op.name() in ("aten::mm", "aten::addmm", "aten::bmm") and self.width in (*out.shape, *args[-1].shape):
            self.rows += out.numel() // out.shape[-1]
        return out


def test_full_checkpointing_runs_the_mlp_no_more_often():
    """Its recomputation ends at the MLP's input, so backward's own forward of each piece is the only second one."""
    rows = []
    for tiles in (1, 4):
        model = attached(llama(PACKED), targets=["q_proj"], fused=True)
        tile(model.get_base_model(), tiles)
        with Products(128) as counter:
            step(model, FullCheckpointing())
        rows.append(counter.rows)
    down_again = 2 * 29  # two blocks; the whole MLP's recomputation ends before down_proj, a piece's does not
    assert rows[0] <= rows[1] <= rows[0] + down_again


def test_less_is_alive_at_once():
    peaks = []
    batch = packed_batch(random_tokens([600]))
    for tiles in (1, 8):
        model = attached(llama(PACKED, intermediate_size=1024), fused=True).train()
        base = model.get_base_model()
        tile(base, tiles)
        FullCheckpointing().apply(base)
        tracker = LiveStorages(1)
        tracker.hold(*model.parameters())
        before = tracker.live
        with tracker:
            LOSS.sum(base, batch).backward()
        peaks.append(tracker.peak - before)
    inner = 600 * 1024 * 4
    assert peaks[0] > 3 * inner and peaks[1] < peaks[0] - 2.5 * inner


@pytest.mark.parametrize("keep", list(Keep), ids=lambda keep: keep.value)
def test_a_selective_policy_keeps_nothing_of_the_pieces(keep):
    """Backward computes them again by itself, so what a policy kept of them would be kept for nothing."""
    kept = []
    batch = packed_batch(random_tokens([600]))
    for intermediate_size in (256, 1024):
        model = attached(llama(PACKED, intermediate_size=intermediate_size), fused=True)
        expected = step(model, Selective(keep), batch=batch)
        tile(model.get_base_model(), 8)
        assert_equal(expected, step(model, Selective(keep), batch=batch))
        tracker = LiveStorages(1)
        tracker.hold(*model.parameters())
        before = tracker.live
        with tracker:
            loss = LOSS.sum(model.get_base_model(), batch)
        kept.append(tracker.live - before)
        del loss
    assert kept[0] == kept[1]


def test_the_start_table_still_knows_what_is_fused():
    model = attached(llama(PACKED), fused=True)
    expected = fused.describe(model)
    tile(model.get_base_model(), 3)
    assert fused.describe(model) == expected and "2 MLPs" in expected


def test_evaluation_in_pieces():
    model = attached(llama(PACKED), fused=True).eval()
    batch = packed_batch(random_tokens([9, 14]))
    with torch.no_grad():
        expected = LOSS.sum(model.get_base_model(), batch)
        tile(model.get_base_model(), 3)
        torch.testing.assert_close(LOSS.sum(model.get_base_model(), batch), expected)


def test_auto_makes_pieces_as_long_as_the_model_is_wide():
    assert [num_tiles("auto", tokens, 64) for tokens in (1, 64, 65, 640)] == [1, 1, 2, 10]
    assert [num_tiles(8, tokens, 64) for tokens in (1, 4, 100)] == [1, 4, 8]


def test_a_block_without_an_mlp_is_refused():
    config = AutoConfig.for_model("gptj", n_embd=64, n_layer=1, n_head=4, rotary_dim=8, vocab_size=VOCABULARY)
    model = AutoModelForCausalLM.from_config(config)
    del model.transformer.h[0].mlp
    with pytest.raises(ModelError, match=r"model.mlp_tiles=4: GPTJBlock has no module mlp"):
        tile(model, 4)
    tile(model, 1)
