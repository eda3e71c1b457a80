"""Every checkpointing option: the same gradients as keeping everything, bit for bit, dropout included (A3)."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from tests.factories import gradients, load, option, options, packed_batch, random_tokens
from tests.support import train_here
from trainer.errors import ModelError
from trainer.model import checkpointing as module
from trainer.model.attention import PACKED
from trainer.training.losses import Chunked

OPTIONS = options("checkpointing")
LORA = option("adapter", "lora", dropout=0.1)


def step(tiny, policy: str, adapter) -> tuple[dict, dict, int]:
    """Gradients after one backward, every trainable weight after one optimizer step, and layers run."""
    base = load(tiny.path, PACKED)
    torch.manual_seed(0)
    adapted = adapter.attach(base)
    option("checkpointing", policy).apply(base)
    ran = []
    for layer in base.get_decoder().layers:
        layer.mlp.register_forward_pre_hook(lambda *_: ran.append(1))
    base.train()
    torch.manual_seed(1)
    Chunked(16).sum(base, packed_batch(random_tokens([20, 7, 12], vocabulary=280))).backward()
    grads = gradients(adapted)
    torch.optim.AdamW([p for p in adapted.parameters() if p.requires_grad], lr=1e-2).step()
    weights = {name: p.detach().clone() for name, p in adapted.named_parameters() if p.requires_grad}
    return grads, weights, len(ran)


@pytest.mark.parametrize("adapter", [LORA, option("adapter", "none")], ids=["lora", "all"])
@pytest.mark.parametrize("policy", OPTIONS)
def test_gradients_are_those_of_keeping_everything(policy, adapter, tiny):
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*requires_grad")  # "None of the inputs have ..."
        grads, weights, _ = step(tiny, policy, adapter)
    expected, expected_weights, _ = step(tiny, "none", adapter)
    assert grads.keys() == expected.keys() and len(grads) == (28 if adapter is LORA else 21)
    for name, gradient in grads.items():
        assert torch.equal(gradient, expected[name]), name
    for name, weight in weights.items():
        assert torch.equal(weight, expected_weights[name]), name
        if ".lora_B." in name:
            assert weight.abs().max() > 0, f"{name} did not learn"


def test_full_runs_every_layer_twice(tiny):
    assert step(tiny, "none", LORA)[2] == 2
    assert step(tiny, "full", LORA)[2] == 4


@pytest.mark.parametrize("policy", OPTIONS)
@pytest.mark.parametrize("quant", ["none", "nf4"])
def test_every_b_changes_in_the_first_step_of_a_run(policy, quant, base_overrides, tmp_path):
    """A3, from the command's words to the saved adapter, without a warning about inputs that need no gradient."""
    from safetensors.torch import load_file

    run = tmp_path / "run"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train_here([*base_overrides, f"checkpointing={policy}", f"quant={quant}", "train.max_steps=1"], run)
    assert not [str(w.message) for w in caught if "requires_grad" in str(w.message)]
    weights = load_file(run / "adapter/adapter_model.safetensors")
    learnt = [name for name in weights if "lora_B" in name]
    assert len(learnt) == 14
    assert all(weights[name].abs().max() > 0 for name in learnt)


def test_full_does_not_make_the_embedding_require_gradients(tiny):
    """Block 0's q, k and v need no backward through the base: transformers' own switch would cost it."""
    base = load(tiny.path, PACKED)
    LORA.attach(base)
    module.Full().apply(base)
    base.train()
    seen = []
    base.get_decoder().layers[0].register_forward_pre_hook(
        lambda _, args, kwargs: seen.append(args[0]), with_kwargs=True
    )
    Chunked(16).sum(base, packed_batch(random_tokens([9, 4], vocabulary=280))).backward()
    assert not seen[0].requires_grad


def test_a_model_without_layers_to_checkpoint_is_refused():
    with pytest.raises(ModelError, match="Use checkpointing=none"):
        module.Full().apply(torch.nn.Linear(2, 2))
    module.NoCheckpointing().apply(torch.nn.Linear(2, 2))


def test_transformers_layers_are_what_the_policy_sets(tiny):
    base = load(tiny.path)
    module.Full().apply(base)
    layers = list(base.get_decoder().layers)
    assert all(layer.gradient_checkpointing for layer in layers)
    assert all(layer._gradient_checkpointing_func.func is checkpoint for layer in layers)
    assert all(layer._gradient_checkpointing_func.keywords == {"use_reentrant": False} for layer in layers)
    module.NoCheckpointing().apply(base)
    assert not any(layer.gradient_checkpointing for layer in layers)
