"""The chunked loss on all its code paths against full logits and against the formula: value and gradients."""

from __future__ import annotations

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from tests.factories import (
    FP32,
    gradients,
    largest_difference,
    llama,
    option,
    packed_batch,
    padded_batch,
    random_tokens,
    summed_loss,
)
from trainer.errors import ConfigError, ModelError
from trainer.model.attention import PACKED
from trainer.training import losses
from trainer.training.frozen_head import frozen_head_sum
from trainer.training.logits import LogitMap
from trainer.training.losses import Chunked, Full, training_loss

TOKENS = random_tokens([9, 30, 4, 17])
CHUNKS = [1, 7, 1000]


@pytest.fixture(params=["linear_cross_entropy", "chunk loop"])
def path(request, monkeypatch):
    """torch's own chunked loss, and the loop that stands in where torch has none (before 2.13)."""
    if request.param == "chunk loop":
        monkeypatch.delattr(F, "linear_cross_entropy")
    else:
        assert hasattr(F, "linear_cross_entropy")
    return request.param


def value_and_gradients(loss, model, batch):
    model.zero_grad()
    with FP32.autocast():
        total = loss.sum(model, batch)
    assert total.dtype is torch.float32 and total.ndim == 0
    total.backward()
    return total.item(), gradients(model)


def assert_equal_to_full(model, batch, chunk_tokens, labels_of=None):
    expected_logits = model(**batch.inputs()).logits
    by_formula = summed_loss(expected_logits, batch.labels).item()
    full, full_gradients = value_and_gradients(Full(), model, batch)
    chunked, chunked_gradients = value_and_gradients(Chunked(chunk_tokens), model, batch)
    assert full == pytest.approx(by_formula, rel=1e-6)
    assert chunked == pytest.approx(by_formula, rel=1e-6)
    scale = max(g.abs().max().item() for g in full_gradients.values())
    assert largest_difference(chunked_gradients, full_gradients) <= 1e-6 * max(1.0, scale)


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "padded"])
@pytest.mark.parametrize("chunk_tokens", CHUNKS)
def test_frozen_head(path, chunk_tokens, packed):
    model = llama(PACKED if packed else "sdpa")
    model.requires_grad_(False)
    model.model.layers.requires_grad_(True)
    batch = packed_batch(TOKENS) if packed else padded_batch(TOKENS)
    assert_equal_to_full(model, batch, chunk_tokens)
    assert model.lm_head.weight.grad is None


class CountingProducts(TorchDispatchMode):
    """Counts matrix products with a tensor of these sizes in either place."""

    def __init__(self, sizes):
        super().__init__()
        self.sizes, self.count = sizes, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if "mm" in function.__name__:
            shapes = [tuple(x.shape) for x in args if isinstance(x, torch.Tensor)]
            self.count += self.sizes in shapes or self.sizes[::-1] in shapes
        return function(*args, **(kwargs or {}))


def test_a_frozen_head_is_multiplied_twice_a_chunk_and_once_without_gradients():
    model = llama(PACKED).requires_grad_(False)
    model.model.layers.requires_grad_(True)
    batch = packed_batch(TOKENS)
    chunks = -(-batch.num_targets // 7)
    with CountingProducts((300, 64)) as trained:
        Chunked(7).sum(model, batch).backward()
    with CountingProducts((300, 64)) as evaluated, torch.no_grad():
        Chunked(7).sum(model, batch)
    assert (trained.count, evaluated.count) == (2 * chunks, chunks)


def test_a_frozen_heads_gradient_in_bf16_is_within_its_rounding():
    """Against full logits of the same bf16 model in fp32, next to what full logits in bf16 are off by."""
    model = llama(PACKED).requires_grad_(False)
    model.model.layers[1].mlp.down_proj.requires_grad_(True)
    model.to(torch.bfloat16)
    exact_model, batch = copy.deepcopy(model).float(), packed_batch(TOKENS)

    def error(loss):
        _, found = value_and_gradients(loss, model, batch)
        return max((g.float() - exact[name]).norm() / exact[name].norm() for name, g in found.items()).item()

    _, exact = value_and_gradients(Full(), exact_model, batch)
    assert error(Chunked(7)) <= 1.2 * error(Full()) < 0.02


def test_a_frozen_heads_loss_of_extreme_logits():
    """One logit far above the others: the loss of another label is their distance, and nothing overflows."""
    hidden = torch.tensor([[1.0, 0.0], [0.0, 1.0]], requires_grad=True)
    weight = torch.tensor([[2e4, 0.0], [0.0, 0.0], [-2e4, 1.0]])
    total = frozen_head_sum(hidden, weight, None, torch.tensor([1, 2]), 1, LogitMap())
    total.backward()
    others = torch.tensor([0.0, 0.0, 1.0])
    assert total.item() == pytest.approx(2e4 + (others.logsumexp(0) - 1).item(), rel=1e-6)
    expected = torch.stack([weight[0] - weight[1], others.softmax(0) @ weight - weight[2]])
    torch.testing.assert_close(hidden.grad, expected)


@pytest.mark.parametrize("mapped", [LogitMap(), LogitMap(0.5, 2.0)], ids=["plain", "scaled and capped"])
def test_a_frozen_head_with_a_few_rows_that_train(mapped):
    """Against autograd through a whole head with the rows in it, and all logits at once."""
    torch.manual_seed(0)
    hidden, weight, bias, rows = (torch.randn(size) for size in ((12, 8), (20, 8), (20,), (3, 8)))
    labels, ids = torch.randint(0, 20, (12,)), [17, 3, 5]
    labels[:3] = torch.tensor(ids)
    found = []
    for whole in (True, False):
        h, r = hidden.clone().requires_grad_(), rows.clone().requires_grad_()
        if whole:
            table = weight.index_copy(0, torch.tensor(ids), r)
            total = F.cross_entropy(mapped(F.linear(h, table, bias)), labels, reduction="sum")
        else:
            total = frozen_head_sum(h, weight, bias, labels, 5, mapped, r, ids)
        (2 * total).backward()
        found.append((total.detach(), h.grad, r.grad))
    torch.testing.assert_close(found[1], found[0])


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("chunk_tokens", CHUNKS)
def test_a_head_that_trains(path, chunk_tokens, tied):
    """adapter=none: with tied embeddings the head's gradient joins the embedding's."""
    model = llama(PACKED, tie_word_embeddings=tied)
    assert_equal_to_full(model, packed_batch(TOKENS), chunk_tokens)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    assert model.lm_head.weight.grad.abs().sum() > 0


@pytest.mark.parametrize("chunk_tokens", CHUNKS)
def test_a_head_with_a_bias(path, chunk_tokens):
    model = llama(PACKED)
    bare = copy.deepcopy(model)
    model.lm_head.bias = torch.nn.Parameter(torch.randn(300))
    assert_equal_to_full(model, packed_batch(TOKENS), chunk_tokens)
    with torch.no_grad():
        without = Chunked(chunk_tokens).sum(bare, packed_batch(TOKENS))
        assert abs(without - Chunked(chunk_tokens).sum(model, packed_batch(TOKENS))) > 1


@pytest.mark.parametrize("chunk_tokens", CHUNKS)
def test_a_head_with_an_adapter(path, chunk_tokens):
    """A LoRA on lm_head: the head's own weight alone would be the wrong loss."""
    base = llama(PACKED)
    adapted = get_peft_model(base, LoraConfig(r=4, target_modules=["lm_head", "q_proj"], init_lora_weights=False))
    model = adapted.base_model.model
    batch = packed_batch(TOKENS)
    assert_equal_to_full(model, batch, chunk_tokens)
    assert any("lm_head.lora_B" in name for name in gradients(model))
    with torch.no_grad(), adapted.disable_adapter():
        plain = Chunked(chunk_tokens).sum(model, batch)
    assert abs(plain - Chunked(chunk_tokens).sum(model, batch)) > 1e-2


@pytest.mark.parametrize("loss", [Full(), Chunked(5)], ids=["full", "chunked"])
def test_bf16_sums_in_fp32(path, loss):
    """The head runs in bf16 as on a GPU, its sum does not: within rounding of the same model's fp32 loss."""
    from trainer.model.precision import Dtypes

    model = llama(PACKED)
    model.to(torch.bfloat16)
    batch = packed_batch(TOKENS)
    with torch.no_grad():
        with Dtypes(torch.bfloat16, "cpu").autocast():
            half = loss.sum(model, batch)
        exact = loss.sum(copy.deepcopy(model).float(), batch)
    assert half.dtype is torch.float32
    assert half.item() == pytest.approx(exact.item(), rel=2e-3)


@pytest.mark.parametrize("name", ["liger", "cut_cross_entropy"])
def test_a_gpu_kernel_asked_for_by_name_is_refused_where_it_cannot_run(name, monkeypatch):
    """No GPU, no package, or a head that it does not take: each an error that says what to use."""
    loss = option("loss", name)
    with pytest.raises(ConfigError, match=f"loss={name}: its kernels need a GPU.*loss=chunked"):
        loss.check(torch.device("cpu"))
    monkeypatch.setattr(losses.importlib.util, "find_spec", lambda module: None)
    with pytest.raises(ConfigError, match=f"loss={name}: the package {loss.package} is not installed.*loss=chunked"):
        loss.check(torch.device("cuda"))
    monkeypatch.setattr(losses.importlib.util, "find_spec", lambda module: object())
    loss.check(torch.device("cuda"))
    model = llama(PACKED)
    model.lm_head = torch.nn.Sequential(model.lm_head)
    with pytest.raises(ModelError, match=f"loss={name}: the output head is a Sequential"):
        loss.sum(model, packed_batch(TOKENS))


@pytest.mark.parametrize("trained", ["blocks", "head", "head with a bias"])
@pytest.mark.parametrize("cap", [None, 5.0], ids=["plain", "capped"])
def test_smoothed_labels_are_torchs(path, trained, cap):
    smoothing = 0.2
    model = llama("sdpa")
    model.config.final_logit_softcapping = cap  # the model's own forward does not know it: Chunked alone does
    if trained == "head with a bias":
        model.lm_head.bias = torch.nn.Parameter(torch.randn(model.lm_head.out_features))
    model.requires_grad_(False)
    model.model.layers.requires_grad_(True)
    model.lm_head.requires_grad_(trained != "blocks")
    batch = padded_batch(TOKENS)
    total = Chunked(5).sum(model, batch, smoothing)
    total.backward()
    ours = gradients(model)
    model.zero_grad()
    logits = LogitMap(cap=cap)(model(**batch.inputs()).logits)
    labels = batch.labels.flatten()
    expected = F.cross_entropy(logits.flatten(0, 1), labels, reduction="sum", label_smoothing=smoothing)
    expected.backward()
    assert total.item() == pytest.approx(expected.item(), rel=1e-6)
    scale = max(g.abs().max().item() for g in ours.values())
    assert largest_difference(ours, gradients(model)) <= 2e-6 * max(1.0, scale)
    if cap is None:
        assert Full().sum(model, batch, smoothing).item() == pytest.approx(expected.item(), rel=1e-6)
        assert abs(Full().sum(model, batch).item() - expected.item()) > 1


def test_a_run_trains_on_smoothed_labels_and_evaluates_on_whole_ones():
    model, batch = llama("sdpa"), padded_batch(TOKENS)
    assert training_loss(Full(), 0.0) == Full()
    smoothed = training_loss(Chunked(5), 0.3).sum(model, batch)
    assert smoothed.item() == pytest.approx(Full().sum(model, batch, 0.3).item(), rel=1e-6)
