"""Every policy: gradients equal to keeping everything, bit for bit, dropout included."""

from __future__ import annotations

import pytest
import torch

from tests.support import train_here
from trainer.errors import ConfigError, ModelError
from trainer.model.adapters import LoRA
from trainer.model.checkpointing import (
    Attention,
    EveryK,
    Full,
    Keep,
    NoCheckpointing,
    PerBlock,
    Selective,
    Sqrt,
    kept_operations,
)

DEPTH = 5
POLICIES = {
    "full": Full(),
    "every_k of 1": EveryK(k=1),
    "every_k of 2": EveryK(k=2),
    "every_k of 3": EveryK(k=3),
    "every_k of all": EveryK(k=DEPTH),
    "sqrt": Sqrt(),
    "attention": Attention(),
    "selective": Selective(keep=Keep.attention),
    "selective linear": Selective(keep=Keep.linear),
    "selective both": Selective(keep=Keep.both),
    "per block": PerBlock([Full(), Selective(keep=Keep.attention), *[NoCheckpointing()] * (DEPTH - 2)]),
}


def _model(quantised: bool = False):
    """A small adapted Llama with dropout in adapters and attention."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=DEPTH, num_attention_heads=4,
        num_key_value_heads=2, attention_dropout=0.1,
    )  # fmt: skip
    base = LlamaForCausalLM(config)
    if quantised:
        from trainer.model.adapters import decoder_linears
        from trainer.model.quant import NF4

        for name in decoder_linears(base):
            parent, _, child = name.rpartition(".")
            linear = NF4(double_quant=True).linear(base.get_submodule(name), torch.float32, torch.device("cpu"))
            setattr(base.get_submodule(parent), child, linear)
    settings = {"r": 4, "alpha": 8.0, "dropout": 0.2, "target_modules": "all-linear", "modules_to_save": []}
    settings["fused"] = False
    adapted = LoRA(**settings).attach(base)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    return base, adapted


def _step(policy, quantised=False):
    """(loss, gradients by name)."""
    base, adapted = _model(quantised)
    policy.apply(base)
    base.train()
    ids = torch.arange(96).remainder(64)[None]

    torch.manual_seed(1)
    logits = base(input_ids=ids, use_cache=False).logits
    loss = torch.nn.functional.cross_entropy(logits.float()[0], ids[0])
    loss.backward()
    gradients = {name: p.grad for name, p in adapted.named_parameters() if p.requires_grad}
    return loss.detach(), gradients


@pytest.fixture(scope="module")
def kept_whole():
    return {quantised: _step(NoCheckpointing(), quantised) for quantised in (False, True)}


@pytest.mark.parametrize("quantised", [False, True], ids=["fp32", "nf4"])
@pytest.mark.parametrize("name", POLICIES)
def test_gradients_are_those_of_keeping_everything_bit_for_bit(name, quantised, kept_whole):
    loss, gradients = _step(POLICIES[name], quantised)
    expected_loss, expected = kept_whole[quantised]
    assert torch.equal(loss, expected_loss)
    assert gradients.keys() == expected.keys()
    for parameter, gradient in gradients.items():
        assert gradient is not None, parameter
        assert torch.equal(gradient, expected[parameter]), parameter


def test_a_segment_runs_its_blocks_in_evaluation_too():
    base, _ = _model()
    base.eval()
    ids = torch.arange(10)[None]
    with torch.no_grad():
        expected = base(input_ids=ids, use_cache=False).logits
        EveryK(k=2).apply(base)
        assert torch.equal(base(input_ids=ids, use_cache=False).logits, expected)


def test_every_k_larger_than_the_depth_is_refused():
    base, _ = _model()
    with pytest.raises(ConfigError, match=r"checkpointing\.k=6.*5 blocks.*1 to 5"):
        EveryK(k=6).apply(base)


def test_a_model_without_blocks_is_refused():
    with pytest.raises(ModelError, match="no layers that transformers can checkpoint"):
        Full().apply(torch.nn.Sequential(torch.nn.Linear(2, 2)))


def test_a_dequantised_weight_is_in_no_set_of_kept_operations():
    for keep in Keep:
        names = [str(operation) for operation in kept_operations(keep)]
        assert names and not any("dequant" in name for name in names)


@pytest.mark.parametrize("words", [["checkpointing=every_k", "checkpointing.k=2"], ["checkpointing=selective"]])
def test_a_run_ends_with_the_same_loss_as_without_checkpointing(words, base_overrides, tmp_path):
    settings = ["adapter.dropout=0.1", "train.max_steps=2"]
    expected = train_here([*base_overrides, *settings, "checkpointing=none"], tmp_path / "none")
    found = train_here([*base_overrides, *settings, *words], tmp_path / "policy")
    assert found["final_loss"] == expected["final_loss"]
