"""Packed rows against each sample alone: logits, gradients, and what may not cross a border (P1, P2)."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

from tests.factories import (
    VOCABULARY,
    gradients,
    largest_difference,
    llama,
    packed_batch,
    padded_batch,
    random_tokens,
    summed_loss,
)
from trainer.errors import ModelError
from trainer.memory.predict.trace import VARLEN, planned_attention
from trainer.model import attention, checkpointing
from trainer.model.attention import PACKED
from trainer.model.live_storages import LiveStorages
from trainer.model.model_settings import Attention as Asked
from trainer.training.losses import Full

PATHS = [PACKED, "sdpa", "eager"]
"""The per-sample path, and transformers' own attention with the block mask it builds."""


def mistral(attention: str, window: int | None):
    """A random Mistral: sliding windows in every layer."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "mistral",
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.1,
        sliding_window=window,
    )
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()


def alone(model, tokens):
    """Logits of each sample by the model's plain forward, and the gradients of the summed loss over all of them."""
    model.zero_grad()
    logits = []
    for index in range(len(tokens)):
        batch = padded_batch(tokens, index)
        out = model(input_ids=batch.input_ids, use_cache=False).logits
        summed_loss(out, batch.labels).backward()
        logits.append(out[0].detach())
    return torch.cat(logits), gradients(model)


def packed(model, tokens):
    model.zero_grad()
    batch = packed_batch(tokens)
    out = model(**batch.inputs()).logits
    summed_loss(out, batch.labels).backward()
    return out[0].detach(), gradients(model)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("lengths", [[5, 4], [1, 7, 2, 30, 3]])
def test_packed_equals_each_sample_alone(path, lengths):
    tokens = random_tokens(lengths)
    expected_logits, expected_gradients = alone(llama("eager"), tokens)
    logits, grads = packed(llama(path), tokens)
    assert (logits - expected_logits).abs().max() <= 1e-5
    assert largest_difference(grads, expected_gradients) <= 1e-5


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("window", [1, 3, 8])
def test_sliding_window_is_honoured_inside_each_sample(path, window):
    tokens = random_tokens([12, 9, 2])
    expected_logits, expected_gradients = alone(mistral("eager", window), tokens)
    logits, grads = packed(mistral(path, window), tokens)
    assert (logits - expected_logits).abs().max() <= 1e-5
    assert largest_difference(grads, expected_gradients) <= 1e-5
    unlimited, _ = alone(mistral("eager", None), tokens)
    assert (logits - unlimited).abs().max() > 1e-2, "the window changes nothing: the test proves nothing"


@pytest.mark.parametrize("make", [llama, lambda path: mistral(path, 3)], ids=["llama", "sliding window"])
@pytest.mark.parametrize("path", PATHS)
def test_a_token_of_the_first_sample_leaves_the_second_bit_identical(path, make):
    tokens = random_tokens([5, 4])
    changed = replace(tokens, input_ids=tokens.input_ids.copy())
    changed.input_ids[2] = (changed.input_ids[2] + 1) % VOCABULARY
    model = make(path)
    with torch.no_grad():
        before = model(**packed_batch(tokens).inputs()).logits[0]
        after = model(**packed_batch(changed).inputs()).logits[0]
    assert torch.equal(before[5:], after[5:])
    assert not torch.equal(before[2:5], after[2:5])
    assert torch.equal(before[:2], after[:2]), "a later token is seen by an earlier one"


@pytest.mark.parametrize("make", [llama, lambda path: mistral(path, 3)], ids=["llama", "sliding window"])
@pytest.mark.parametrize("path", PATHS)
def test_the_gradient_across_the_border_is_exactly_zero(path, make):
    batch = packed_batch(random_tokens([5, 4]))
    model = make(path)
    embedded = model.get_input_embeddings()(batch.input_ids).detach().requires_grad_()
    inputs = {**batch.inputs(), "input_ids": None, "inputs_embeds": embedded}
    model(**inputs).logits[0, 5:].square().sum().backward()
    assert torch.equal(embedded.grad[0, :5], torch.zeros(5, 64))
    assert embedded.grad[0, 5:].abs().min() > 0


def test_a_packed_batch_never_carries_a_mask_or_a_cache():
    """P2: a mask of ones, or a cache, turns transformers' own detection off and samples see each other."""
    batch = packed_batch(random_tokens([5, 4]))
    inputs = batch.inputs()
    assert inputs["attention_mask"] is None and inputs["use_cache"] is False
    with pytest.raises(AssertionError, match="no attention mask"):
        llama(PACKED)(**{**inputs, "attention_mask": torch.ones(1, 9)})
    contaminated = llama("sdpa")(**{**inputs, "attention_mask": torch.ones(1, 9, dtype=torch.int64)}).logits
    clean = llama("sdpa")(**inputs).logits
    assert (contaminated - clean).abs().max() > 1e-2, "transformers now detects this by itself"


def test_packed_attention_refuses_to_run_without_the_boundaries():
    batch = packed_batch(random_tokens([5, 4]))
    with pytest.raises(AssertionError, match="boundaries"):
        llama(PACKED)(input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False)


def test_dropout_of_the_attention_reaches_the_kernel():
    """Attention dropout is on in training mode only, and drawn from torch's generator."""
    batch = packed_batch(random_tokens([9, 8]))
    model = llama(PACKED, attention_dropout=0.5)
    with torch.no_grad():
        still = model(**batch.inputs()).logits
        assert torch.equal(model(**batch.inputs()).logits, still)
        model.train()
        torch.manual_seed(1)
        first = model(**batch.inputs()).logits
        torch.manual_seed(1)
        assert torch.equal(model(**batch.inputs()).logits, first)
        assert not torch.allclose(first, still)


@pytest.mark.parametrize(
    ("model_type", "fields", "chosen", "why"),
    [
        ("llama", {}, PACKED, "one kernel call per sample"),
        ("mistral", {"sliding_window": 4}, PACKED, "one kernel call per sample"),
        ("gemma2", {}, "eager", "caps its attention logits"),
        ("gpt_oss", {}, "eager", "sinks"),
        ("llama4_text", {"attention_chunk_size": 8}, "sdpa", "chunks"),
    ],
)
def test_what_the_fast_path_does_not_do_goes_to_transformers(model_type, fields, chosen, why):
    config = AutoConfig.for_model(model_type, **fields)
    name, reason = attention.choose(config, torch.device("cpu"), torch.float32)
    assert name == chosen and why in reason


def test_cuda_in_fp32_takes_the_block_mask():
    name, _ = attention.choose(LlamaConfig(), torch.device("cuda"), torch.float32)
    assert name == "sdpa"


@pytest.mark.parametrize(
    ("capability", "chosen", "why"),
    [((7, 5), "sdpa", "flash kernels need compute capability 8.0"), ((8, 0), PACKED, "varlen flash kernel")],
)
def test_a_gpu_below_the_flash_kernels_minimum_takes_the_block_mask(capability, chosen, why, monkeypatch):
    """Said in one line of the start table; float16 stands for what an old card computes in."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    name, reason = attention.choose(LlamaConfig(), torch.device("cuda"), torch.float16)
    assert name == chosen and why in reason


@pytest.mark.parametrize(
    ("fields", "chosen"),
    [
        ({"head_dim": 80}, PACKED),
        ({"head_dim": 256}, PACKED),
        ({"head_dim": 84}, "sdpa"),
        ({"head_dim": 264}, "sdpa"),
        ({"hidden_size": 400, "num_attention_heads": 4, "num_key_value_heads": 4}, "sdpa"),  # heads of 100
    ],
)
def test_head_sizes_that_flash_refuses_take_the_block_mask(fields, chosen, monkeypatch):
    """In the run and in its plan."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    config = LlamaConfig(**fields)
    name, reason = attention.choose(config, torch.device("cuda"), torch.bfloat16)
    assert name == chosen and ("multiples of 8" in reason) == (chosen == "sdpa")
    planned = planned_attention(True, config, "cuda", torch.bfloat16)
    assert planned == (VARLEN if chosen == PACKED else "sdpa")


@pytest.mark.parametrize("asks", [True, False])
def test_grouped_heads_are_named_where_torchs_kernel_asks(asks, monkeypatch):
    """torch 2.11's varlen_attn has no enable_gqa and takes fewer key/value heads as they are; later ones want it."""
    given = {}

    def kernel_2_11(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale=None, window_size=(-1, -1)):
        given["window"], given["gqa"] = window_size, None
        return query

    def later(
        query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale=None, window_size=(-1, -1), enable_gqa=False
    ):
        given["window"], given["gqa"] = window_size, enable_gqa
        return query

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", later if asks else kernel_2_11)
    attention.asks_for_grouped_heads.cache_clear()
    query, key = torch.zeros(1, 4, 6, 8), torch.zeros(1, 2, 6, 8)
    boundaries = torch.tensor([0, 6], dtype=torch.int32)
    try:
        out = attention._varlen(query, key, key, None, 3, boundaries, 6)
    finally:
        attention.asks_for_grouped_heads.cache_clear()
    assert out.shape == (1, 6, 4, 8)
    assert given == {"window": (2, 0), "gqa": True if asks else None}


def test_a_model_that_caps_its_logits_is_isolated_on_its_path():
    """Gemma 2: soft-capped attention and sliding windows in every other layer, through the block mask."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "gemma2",
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        sliding_window=4,
        attn_logit_softcapping=5.0,
        initializer_range=0.1,
    )
    name, _ = attention.choose(config, torch.device("cpu"), torch.float32)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=name).eval()
    tokens = random_tokens([11, 9])
    expected, expected_gradients = alone(model, tokens)
    logits, grads = packed(model, tokens)
    assert (logits - expected).abs().max() <= 1e-5
    scale = max(g.abs().max().item() for g in expected_gradients.values())
    assert largest_difference(grads, expected_gradients) <= 1e-5 * max(1.0, scale)


@pytest.mark.parametrize("window", [1, 2, 5])
def test_window_mask_is_the_last_window_positions(window):
    mask = attention._window_mask(6, window, torch.device("cpu"))
    expected = np.array([[i - window < j <= i for j in range(6)] for i in range(6)])
    assert np.array_equal(mask.numpy(), expected)


class CountedBoundaries:
    """cu_seqlens that counts how often its lengths are asked for."""

    def __init__(self, cu_seqlens):
        self.lengths, self.asked = cu_seqlens.diff().tolist(), 0

    def diff(self):
        return self

    def tolist(self):
        self.asked += 1
        return self.lengths


@pytest.mark.parametrize("window", [None, 4])
def test_layers_share_boundaries_and_window_masks(window):
    """Lengths are read once a micro-batch, and a window's masks built once, also when layers are recomputed."""
    model = mistral(PACKED, window).train()
    checkpointing.FullCheckpointing().apply(model)
    batch = packed_batch(random_tokens([9, 3, 6]))
    boundaries = CountedBoundaries(batch.cu_seqlens)
    with OperationCounter() as operations:
        model(**replace(batch, cu_seqlens=boundaries).inputs()).logits.sum().backward()
    assert boundaries.asked == 1
    assert operations.counts["aten::masked_fill_.Scalar"] == (0 if window is None else 2)
    kernels = operations.counts["aten::_scaled_dot_product_flash_attention_for_cpu"]
    assert kernels == 2 * 2 * 3  # layers, forward and recomputation, samples


def test_keys_and_values_are_kept_unexpanded():
    """What backward keeps of a layer: q, k, v, the output once for attention and o_proj, a number a head."""
    query, key, value = (torch.randn(1, heads, 12, 16, requires_grad=True) for heads in (4, 2, 2))
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        attention.packed_attention(
            None, query, key, value, None, cu_seq_lens_q=torch.tensor([0, 5, 12], dtype=torch.int32), max_length_q=7
        )
    assert sorted(t.numel() for t in kept) == sorted([4 * 12 * 16, 2 * 12 * 16, 2 * 12 * 16, 4 * 12 * 16, 4 * 5, 4 * 7])


class OperationCounter(TorchDispatchMode):
    """Counts operations by name."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        self.counts[operation.name()] += 1
        return operation(*args, **(kwargs or {}))


def test_fp32_masters_under_bf16_autocast():
    """Rotary embeddings leave queries in fp32 and values in bf16: the same loss as through torch's own function."""
    batch = packed_batch(random_tokens([20]))
    losses = []
    for name in (attention.PACKED, "sdpa"):
        model = llama(name)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            losses.append(Full().sum(model, batch))
    assert losses[0].item() == pytest.approx(losses[1].item(), rel=2e-3)


@pytest.mark.parametrize(("tokens", "gib"), [(4096, 0.127), (131_072, 4.018)])
def test_flash_backwards_scratch_of_an_8b(tokens, gib):
    """dq in fp32, and dk and dv for all 32 query heads of 8 key/value heads (FlashAttention-2's mha_varlen_bwd)."""
    size = attention.flash_backward_bytes((tokens, 32, 128), (tokens, 8, 128), 1, itemsize=2)
    assert size / 2**30 == pytest.approx(gib, abs=5e-4)
    alone = attention.flash_backward_bytes((tokens, 32, 128), (tokens, 32, 128), 1, itemsize=2)
    assert size - alone == 2 * tokens * 32 * 128 * 2


def test_the_plan_counts_flash_backwards_scratch():
    """While the kernel runs, beside its gradients, and not after."""
    heads, keys, lengths, size = 4, 2, (40, 24), 48
    with FakeTensorMode(), LiveStorages(1) as tracker:
        q, k, v = (torch.empty(1, n, 64, size, dtype=torch.bfloat16, requires_grad=True) for n in (heads, keys, keys))
        boundaries = torch.empty(len(lengths) + 1, dtype=torch.int32)
        out = attention._varlen(q, k, v, None, None, boundaries, 40)
        grad = torch.empty_like(out)
        tracker.hold(q, k, v)
        before, _ = tracker.mark()
        out.backward(grad)
        after, peak = tracker.mark()
    gradients = sum(x.nbytes for x in (q, k, v))
    scratch = (64 + 2 * 128) * heads * (4 * 64 + 4) + 2 * 64 * heads * size * 2  # heads of 48 are summed as 64
    assert peak - before >= gradients + scratch
    assert after - before <= gradients


@pytest.mark.parametrize(
    ("asked", "model_type", "packed", "chosen"),
    [
        ("auto", "llama", True, PACKED),
        ("varlen", "llama", True, PACKED),
        ("sdpa", "llama", True, "sdpa"),
        ("eager", "llama", True, "eager"),
        ("eager", "llama", False, "eager"),
        ("auto", "gemma2", False, "eager"),
        ("varlen", "gemma2", True, "varlen cannot serve here .* caps its attention logits"),
        ("sdpa", "gemma2", False, "caps its attention logits"),
        ("varlen", "llama", False, "for packed rows"),
        ("flash", "llama", True, "needs a GPU and the package flash-attn"),
    ],
)
def test_attention_asked_for_by_name(asked, model_type, packed, chosen):
    config, cpu = AutoConfig.for_model(model_type), torch.device("cpu")
    choose = attention.choose if packed else attention.choose_padded
    if " " not in chosen:
        assert choose(config, cpu, torch.float32, Asked[asked])[0] == chosen
        return
    with pytest.raises(ModelError, match=f"model.attention={asked}.*{chosen}" if asked != "varlen" else chosen):
        choose(config, cpu, torch.float32, Asked[asked])


@pytest.mark.parametrize(("size", "chosen"), [(128, attention.FLASH), (84, None)])
def test_flash_by_name_takes_what_its_kernels_take(size, chosen, monkeypatch):
    monkeypatch.setattr(attention.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    what = LlamaConfig(head_dim=size), torch.device("cuda"), torch.bfloat16, Asked.flash
    if chosen is None:
        with pytest.raises(ModelError, match="multiples of 8"):
            attention.choose(*what)
    else:
        assert attention.choose(*what)[0] == attention.choose_padded(*what)[0] == chosen
