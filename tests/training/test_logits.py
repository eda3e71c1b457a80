"""Scales, caps and biases between hidden states and loss: every loss against the model's own logits, gradients too."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM

from tests.factories import LLAMA, gradients, largest_difference, option, padded_batch, random_tokens, summed_loss
from trainer.errors import ModelError
from trainer.model.precision import Dtypes
from trainer.training.logits import LogitMap, check_logit_map, logit_map
from trainer.training.losses import Chunked, Full

TOKENS = random_tokens([9, 30, 4, 17])
GEMMA = {"head_dim": 16, "tie_word_embeddings": False}
MODELS = {
    "granite": ("granite", {"logits_scaling": 8.0, "embedding_multiplier": 3.0}, LogitMap(scale=0.125)),
    "granite by 6": ("granite", {"logits_scaling": 6.0}, LogitMap(scale=1 / 6)),
    "cohere": ("cohere", {"logit_scale": 0.0625, "tie_word_embeddings": False}, LogitMap(scale=0.0625)),
    "gemma2": ("gemma2", {**GEMMA, "final_logit_softcapping": 5.0}, LogitMap(cap=5.0)),
    "gemma3": ("gemma3_text", {**GEMMA, "final_logit_softcapping": 5.0}, LogitMap(cap=5.0)),
    "phi": ("phi", {"tie_word_embeddings": False}, LogitMap()),
}


def model_of(name: str, dtype=torch.float32):
    kind, fields, _ = MODELS[name]
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **{**LLAMA, **fields}, bos_token_id=1, eos_token_id=2, pad_token_id=0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    if model.lm_head.bias is not None:
        torch.nn.init.normal_(model.lm_head.bias)
    with torch.no_grad():  # outputs of the head large enough for a cap to bend them
        model.lm_head.weight *= 8 if model.config.model_type != "phi" else 1
    return model.to(dtype)


def library(name: str, module: str, monkeypatch, **functions):
    """A library whose function is written out in plain torch."""
    parts = module.split(".")
    for length in range(1, len(parts) + 1):
        monkeypatch.setitem(sys.modules, ".".join(parts[:length]), ModuleType(parts[length - 1]))
    for key, value in functions.items():
        setattr(sys.modules[module], key, value)
    return option("loss", name)


def written_out(hidden, weight, labels, bias=None, softcap=None, reduction="sum", **_):
    logits = F.linear(hidden, weight, bias).float()
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    return F.cross_entropy(logits, labels, reduction=reduction)


@pytest.fixture(params=["chunked", "trained head", "liger", "cut_cross_entropy"])
def loss(request, monkeypatch):
    if request.param == "liger":

        class Fused:
            def __init__(self, **settings):
                self.settings = settings

            def __call__(self, weight, hidden, labels, bias):
                return written_out(hidden, weight, labels, bias, **self.settings)

        return library("liger", "liger_kernel.transformers", monkeypatch, LigerFusedLinearCrossEntropyLoss=Fused)
    if request.param == "cut_cross_entropy":
        return library(request.param, request.param, monkeypatch, linear_cross_entropy=written_out)
    return option("loss", "chunked", chunk_tokens=7)


@pytest.mark.parametrize("name", MODELS)
def test_every_loss_is_the_models_own_one_sample_at_a_time(name, loss, request):
    if name == "phi" and loss.__class__.__name__ == "CutCrossEntropy":
        pytest.skip("its kernel takes no bias, and says so")
    model = model_of(name)
    assert logit_map(model.config) == MODELS[name][2]
    model.get_output_embeddings().requires_grad_("trained head" in request.node.name)
    expected = 0.0
    for index in range(len(TOKENS)):
        batch = padded_batch(TOKENS, index)
        one = summed_loss(model(input_ids=batch.input_ids, use_cache=False).logits, batch.labels)
        one.backward()
        expected += one.item()
    right = gradients(model)
    model.zero_grad()
    total = loss.sum(model, padded_batch(TOKENS))
    total.backward()
    assert total.item() == pytest.approx(expected, rel=1e-5)
    scale = max(g.abs().max().item() for g in right.values())
    assert largest_difference(gradients(model), right) <= 2e-5 * scale


def test_granite_in_bf16_has_one_loss_and_one_gradient():
    """Seen: 7.09 and a gradient norm of 0.82 by chunks, 7.05 and 0.10 in full."""
    model, batch = model_of("granite", torch.bfloat16), padded_batch(TOKENS)
    model.lm_head.requires_grad_(False)

    def run(loss):
        model.zero_grad()
        with Dtypes(torch.bfloat16, "cpu").autocast():
            total = loss.sum(model, batch)
        total.backward()
        norm = torch.nn.utils.get_total_norm([p.grad.float() for p in model.parameters() if p.grad is not None])
        return total.item(), norm.item()

    chunked, full = run(Chunked(7)), run(Full())
    assert chunked == (pytest.approx(full[0], rel=5e-3), pytest.approx(full[1], rel=2e-2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", MODELS)
def test_what_the_configuration_says_is_proven_on_the_model(name, dtype):
    check_logit_map(model_of(name, dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("does", [lambda z: 1.1 * z, lambda z: 30 * torch.tanh(z / 30), lambda z: z + 0.3 * z.sin()])
def test_what_it_does_not_say_is_refused_by_a_loss_that_calls_the_head(does, dtype):
    """Also where the model's own outputs are small: a cap of 30 is nothing at 0.1."""
    model = model_of("phi", dtype)
    with torch.no_grad():
        model.lm_head.weight *= 0.01
        model.lm_head.bias *= 0.0
    forward = type(model).forward

    class Other(type(model)):
        def forward(self, *args, **kwargs):
            output = forward(self, *args, **kwargs)
            output["logits"] = does(output.logits)
            return output

    model.__class__ = Other
    with pytest.raises(ModelError, match="does more between its head and its logits.*loss=full"):
        Chunked(7).check_model(model)
    Full().check_model(model)
