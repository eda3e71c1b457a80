"""Fused adapter functions against their slow twin: PEFT's own modules on the same weights."""

from __future__ import annotations

from collections import Counter
from functools import partial

import bitsandbytes as bnb
import peft
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from transformers import AutoConfig, AutoModelForCausalLM

from tests.factories import VOCABULARY, gradients, llama, option, packed_batch, random_tokens
from trainer.model import checkpointing
from trainer.model.adapters import decoder_linears
from trainer.model.attention import PACKED
from trainer.model.fused import functions
from trainer.model.fused import modules as fused
from trainer.model.quant import NF4
from trainer.training.losses import Chunked

BATCH = packed_batch(random_tokens([9, 14, 6]))
LOSS = Chunked(chunk_tokens=16)


def quantised(model, dtype=torch.float32):
    """The model with its decoder's linear layers in NF4, as the trainer stores them."""
    quant = NF4(double_quant=True)
    for name in decoder_linears(model):
        parent, _, child = name.rpartition(".")
        linear = quant.linear(model.get_submodule(name), dtype, torch.device("cpu"))
        linear.support_avx512bf16_for_cpu = False
        setattr(model.get_submodule(parent), child, linear)
    return model


def attached(model, targets="all-linear", dropout=0.0, fused=False, seed=1):
    """LoRA on the model, with a B that is not zero: otherwise A would get no gradient."""
    adapter = option("adapter", "lora", r=4, alpha=8, dropout=dropout, target_modules=targets, fused=fused)
    torch.manual_seed(seed)
    adapted = adapter.attach(model)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    return adapted


def step(adapted, policy=None, seed=2, autocast=None, batch=BATCH):
    """Loss and gradients of one packed row in training mode."""
    base = adapted.get_base_model()
    (policy or checkpointing.NoCheckpointing()).apply(base)
    adapted.train()
    adapted.zero_grad()
    torch.manual_seed(seed)
    with torch.autocast("cpu", dtype=autocast or torch.bfloat16, enabled=autocast is not None):
        loss = LOSS.sum(base, batch) / batch.num_targets
    loss.backward()
    return loss.detach(), gradients(adapted)


def assert_equal(left, right, tolerance=1e-5):
    torch.testing.assert_close(left[0], right[0], rtol=tolerance, atol=tolerance)
    assert left[1].keys() == right[1].keys()
    assert max(g.abs().max() for g in left[1].values()) > 1e-3, "gradients too small to compare"
    for name, gradient in left[1].items():
        torch.testing.assert_close(
            right[1][name], gradient, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: n + m
        )


def other_model(model_type: str, **fields):
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        model_type,
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        initializer_range=0.1,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        **fields,
    )
    model = AutoModelForCausalLM.from_config(config, attn_implementation=PACKED)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:  # trained norms are not all ones
                parameter.copy_(0.5 + torch.rand_like(parameter))
    return model


@pytest.mark.parametrize(
    "policy", [checkpointing.NoCheckpointing(), checkpointing.FullCheckpointing()], ids=["keep", "recompute"]
)
@pytest.mark.parametrize("store", [lambda model: model, quantised], ids=["plain", "nf4"])
@pytest.mark.parametrize(
    ("targets", "parts"),
    [
        ("all-linear", "fused 2 q/k/v groups, 2 MLPs, 2 single layers, 5 norms"),
        (["q_proj", "v_proj"], "fused 2 q/k/v groups, 5 norms"),
        (["down_proj", "k_proj"], "fused 2 q/k/v groups, 2 MLPs, 5 norms"),
        (["gate_proj", "o_proj"], "fused 2 MLPs, 2 single layers, 5 norms"),
        (r"model\.layers\.1\.mlp\.up_proj", "fused 1 MLP, 5 norms"),
    ],
)
def test_gradients_equal_peft(targets, parts, store, policy):
    adapted = attached(store(llama(PACKED)), targets)
    expected = step(adapted, policy)
    fused.install(adapted)
    assert fused.describe(adapted) == parts
    assert_equal(expected, step(adapted, policy))


@pytest.mark.parametrize(
    ("model_type", "fields", "parts"),
    [
        ("llama", {"attention_bias": True, "mlp_bias": True}, "fused 2 q/k/v groups, 2 MLPs, 2 single layers, 5 norms"),
        ("qwen2", {}, "fused 2 q/k/v groups, 2 MLPs, 2 single layers, 5 norms"),
        ("qwen3", {}, "fused 2 q/k/v groups, 2 MLPs, 2 single layers, 9 norms"),  # its q and k are normalised too
        ("gemma", {}, "fused 2 q/k/v groups, 2 MLPs, 2 single layers"),  # GELU; its norm multiplies by 1 + w
        ("mistral", {"hidden_act": "gelu"}, "fused 2 q/k/v groups, 2 MLPs, 2 single layers, 5 norms"),
        ("phi3", {}, "fused 8 single layers, 5 norms"),  # one layer for q, k, v and one for gate and up
    ],
)
def test_other_architectures_equal_peft(model_type, fields, parts):
    model = quantised(other_model(model_type, **fields))
    for module in model.modules():
        if isinstance(module, bnb.nn.Linear4bit) and module.bias is not None:
            torch.nn.init.normal_(module.bias)
    adapted = attached(model)
    expected = step(adapted, checkpointing.FullCheckpointing())
    fused.install(adapted)
    assert fused.describe(adapted) == parts
    assert_equal(expected, step(adapted, checkpointing.FullCheckpointing()))


@pytest.mark.parametrize(
    "policy", [checkpointing.NoCheckpointing(), checkpointing.FullCheckpointing()], ids=["keep", "recompute"]
)
def test_dropout_draws_the_masks_that_peft_draws(policy):
    adapted = attached(quantised(llama(PACKED)), dropout=0.3)
    expected = step(adapted, policy)
    fused.install(adapted)
    assert_equal(expected, step(adapted, policy))
    assert not torch.equal(step(adapted, policy)[0], step(adapted, policy, seed=3)[0])


def test_autocast_is_as_close_to_fp32_as_peft():
    def error(adapted, truth):
        _, got = step(adapted, checkpointing.FullCheckpointing(), autocast=torch.bfloat16)
        assert all(g.dtype is torch.float32 for g in got.values())
        return torch.stack([(got[name] - g).norm() / g.norm() for name, g in truth.items()]).mean()

    model = quantised(llama(PACKED).to(torch.bfloat16), torch.bfloat16)
    _, truth = step(attached(quantised(llama(PACKED))))
    adapted = attached(model)
    peft_error = error(adapted, truth)
    fused.install(adapted)
    fused_error = error(adapted, truth)
    assert fused_error < 1.2 * peft_error < 0.2


def test_selective_checkpointing_keeps_the_gradients():
    adapted = attached(quantised(llama(PACKED)))
    expected = step(adapted)
    fused.install(adapted)

    def policy(context, op, *args, **kwargs):
        keep = op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    class Selective:
        def apply(self, model):
            for layer in model.get_decoder().layers:
                layer.gradient_checkpointing = True
                layer._gradient_checkpointing_func = partial(
                    checkpoint, use_reentrant=False, context_fn=lambda: create_selective_checkpoint_contexts(policy)
                )

    assert_equal(expected, step(adapted, Selective()))


class Dequantisations(TorchDispatchMode):
    """Counts kernels that unpack a 4-bit weight, by the weight's memory; 8-bit scales are not weights."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if op.name() in ("bitsandbytes::dequantize_4bit", "bitsandbytes::dequantize_4bit.out"):
            self.counts[args[0].data_ptr()] += 1
        elif op.name() == "bitsandbytes::gemm_4bit":
            self.counts[args[1].data_ptr()] += 1
        return op(*args, **(kwargs or {}))


@pytest.mark.parametrize("recomputed", [0, 1, 2])
def test_dequantisations_a_weight_and_micro_batch(recomputed):
    """2 + rho, where rho is 1 in a recomputed layer: forward, recomputation, backward. Block 0's q, k and v have no
    gradient to pass on, and a recomputation ends before the last product, down_proj's."""
    adapted = attached(quantised(llama(PACKED)), fused=True)

    class Some:
        def apply(self, model):
            checkpointing.FullCheckpointing().apply(model)
            for layer in model.get_decoder().layers[recomputed:]:
                layer.gradient_checkpointing = False

    with Dequantisations() as counter:
        step(adapted, Some())
    for index, layer in enumerate(adapted.get_base_model().get_decoder().layers):
        rho = int(index < recomputed)
        for name, module in layer.named_modules():
            if isinstance(module, bnb.nn.Linear4bit):
                no_backward = index == 0 and name.split(".")[1] in ("q_proj", "k_proj", "v_proj")
                expected = 2 + rho - no_backward - (rho if "down_proj" in name else 0)
                assert counter.counts.pop(module.weight.data_ptr()) == expected, (index, name)
    assert not counter.counts


def saved_bytes(adapted, autocast) -> int:
    """Bytes of distinct storages that one layer keeps for backward: the difference of three layers and two."""
    parameters = {p.untyped_storage().data_ptr() for p in adapted.parameters()}
    storages: dict[int, int] = {}
    kept = []

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            storages[storage.data_ptr()] = storage.nbytes()
            kept.append(tensor)  # so that no address is used twice
        return tensor

    batch = packed_batch(random_tokens([200, 180, 132]))
    adapted.train()
    with (
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
        torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast),
    ):
        hidden = adapted.get_base_model().get_decoder()(**batch.inputs()).last_hidden_state
    assert hidden.requires_grad
    return sum(storages.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_saved_bytes_a_layer(dtype):
    """At most 55 % of PEFT's eager path in transformers' own model, in the proportions of Llama-3-8B (1/16)."""

    def per_layer(attention, use_fused):
        totals = []
        for layers in (2, 3):
            model = llama(
                attention,
                hidden_size=256,
                intermediate_size=896,
                num_attention_heads=16,
                num_key_value_heads=4,
                num_hidden_layers=layers,
            )
            adapted = attached(quantised(model.to(dtype), dtype), fused=use_fused)
            totals.append(saved_bytes(adapted, dtype is not torch.float32))
        return totals[1] - totals[0]

    assert per_layer(PACKED, True) <= 0.55 * per_layer("sdpa", False)


def test_the_saved_adapter_is_peft_s(tmp_path):
    model = llama(PACKED)
    model.config._attn_implementation = "sdpa"
    ours, theirs = attached(llama(PACKED), fused=True), attached(llama(PACKED))
    ours.save_pretrained(tmp_path / "ours")
    theirs.save_pretrained(tmp_path / "theirs")
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        assert (tmp_path / "ours" / name).read_bytes() == (tmp_path / "theirs" / name).read_bytes()
    plain = peft.PeftModel.from_pretrained(llama("sdpa"), tmp_path / "ours").eval()
    logits = ours.train()(**BATCH.inputs()).logits
    with torch.no_grad():
        position_ids = BATCH.position_ids
        expected = plain(input_ids=BATCH.input_ids, position_ids=position_ids, use_cache=False).logits
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)


def test_what_the_functions_do_not_know_keeps_peft_s_forward():
    model = quantised(llama(PACKED))
    model.requires_grad_(False)
    config = peft.LoraConfig(r=4, use_dora=True, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
    adapted = peft.get_peft_model(model, config)
    expected = step(adapted)
    fused.install(adapted)
    assert fused.describe(adapted) == "fused 5 norms; PEFT's own forward for 4 adapted layers"
    assert_equal(expected, step(adapted))


def test_switched_off_and_merged_adapters_are_honoured():
    adapted = attached(llama(PACKED), fused=True).train()
    with_adapter = adapted(**BATCH.inputs()).logits
    with adapted.disable_adapter():
        base = adapted(**BATCH.inputs()).logits
    torch.testing.assert_close(base, llama(PACKED)(**BATCH.inputs()).logits)
    adapted.merge_adapter()
    torch.testing.assert_close(adapted(**BATCH.inputs()).logits, with_adapter, rtol=1e-4, atol=1e-4)
    assert (with_adapter - base).abs().max() > 0.01


def test_hooks_on_an_inner_layer_are_called():
    adapted, calls = attached(llama(PACKED), fused=True), []
    layer = adapted.get_base_model().model.layers[0]
    for module in (layer.mlp.up_proj.base_layer, layer.self_attn.k_proj, layer.self_attn.o_proj.base_layer):
        module.register_forward_hook(lambda *args: calls.append(1))
    expected = attached(llama(PACKED))
    assert_equal(step(expected), step(adapted))
    assert len(calls) == 3


def test_remove_gives_every_module_its_own_forward_back():
    adapted = attached(llama(PACKED), fused=True)
    fused.remove(adapted)
    assert not any("forward" in module.__dict__ for module in adapted.modules())
    assert fused.describe(adapted) == "PEFT's own forward for 14 adapted layers"


def norm_gradient(x, weight, grad):
    """Through a transposed view, as a norm of each head sees it."""
    x = x.clone().requires_grad_()
    functions.rms_norm(x.transpose(1, 2), weight, 1e-6).backward(grad)
    return x.grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_norms_backward_in_pieces_of_rows_is_the_whole(dtype, monkeypatch):
    """Bit for bit, with a last piece of its own length, and with fp32 copies of a piece only."""
    generator = torch.Generator().manual_seed(0)
    x, grad = torch.randn(2, 3, 50, 16, generator=generator), torch.randn(2, 50, 3, 16, generator=generator)
    x, grad, weight = x.to(dtype), grad.to(dtype), torch.linspace(0.5, 2, 16).to(dtype)
    whole = norm_gradient(x, weight, grad)
    rows_at_once = 7
    monkeypatch.setattr(functions, "NORM_NUMBERS", rows_at_once * 16)
    with Counted() as made:
        assert torch.equal(norm_gradient(x, weight, grad), whole)
    pieces = [shape for shape in made.shapes if shape[-1] == 16 and len(shape) == 2]
    assert max(shape[0] for shape in pieces) == rows_at_once and (300 % rows_at_once, 16) in pieces


class Counted(TorchDispatchMode):
    """Shapes of the tensors that `addcmul_` works on."""

    def __init__(self):
        super().__init__()
        self.shapes = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.addcmul_.default:
            self.shapes.append(tuple(args[0].shape))
        return function(*args, **(kwargs or {}))


def test_a_norm_with_a_zero_weight_keeps_its_own_forward():
    model = llama(PACKED)
    model.model.norm.weight.data[3] = 0
    adapted = attached(model)
    expected = step(adapted)
    fused.install(adapted)
    assert fused.describe(adapted).endswith("4 norms")
    assert_equal(expected, step(adapted))
