"""Every checkpointing option: the same gradients as keeping everything, bit for bit, dropout included (A3)."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from tests.factories import gradients, load, option, options, packed_batch, random_tokens
from tests.support import slow_but, train_here
from trainer.config.compose import compose
from trainer.errors import ConfigError, ModelError
from trainer.model import checkpointing as module
from trainer.model.attention import PACKED
from trainer.model.checkpointing import Attention, EveryK, FullCheckpointing, NoCheckpointing, PerBlock, Selective, Sqrt
from trainer.model.recompute import Keep, kept_operations
from trainer.training.losses import Chunked

OPTIONS = options("checkpointing")
POLICIES = [name for name in OPTIONS if name != "auto"]  # which resolves to them, by a plan
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
@pytest.mark.parametrize("policy", POLICIES)
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


@pytest.mark.parametrize("policy", POLICIES)
def test_a_policy_takes_the_place_of_the_one_before(policy, tiny):
    """After each of the others a step runs as many MLPs and attentions, and keeps as many tensors, as after none."""

    def kept_and_ran(*policies: str) -> tuple[int, int, int]:
        base = load(tiny.path, PACKED)
        for name in policies:
            option("checkpointing", name).apply(base)
        kept, ran = [], {"mlp": 0, "self_attn": 0}
        for layer in base.get_decoder().layers:
            for part in ran:
                getattr(layer, part).register_forward_pre_hook(lambda *_, part=part: ran.update({part: ran[part] + 1}))
        projections = [layer.self_attn.q_proj for layer in base.get_decoder().layers]
        ran["q_proj"] = 0
        for projection in projections:
            projection.register_forward_pre_hook(lambda *_: ran.update(q_proj=ran["q_proj"] + 1))
        base.train()
        batch = packed_batch(random_tokens([20, 7, 12], vocabulary=280))
        with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.nbytes) or x, lambda x: x):
            Chunked(16).sum(base, batch).backward()
        return sum(kept), *ran.values()

    alone = kept_and_ran(policy)
    for other in POLICIES:
        assert kept_and_ran(other, policy) == alone, other


def test_full_runs_every_layer_twice(tiny):
    assert step(tiny, "none", LORA)[2] == 2
    assert step(tiny, "full", LORA)[2] == 4


@pytest.mark.parametrize("policy", OPTIONS)
@pytest.mark.parametrize("quant", slow_but(["nf4"], ["none", "nf4"]))
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
    module.FullCheckpointing().apply(base)
    base.train()
    seen = []
    base.get_decoder().layers[0].register_forward_pre_hook(
        lambda _, args, kwargs: seen.append(args[0]), with_kwargs=True
    )
    Chunked(16).sum(base, packed_batch(random_tokens([9, 4], vocabulary=280))).backward()
    assert not seen[0].requires_grad


def test_a_model_without_layers_to_checkpoint_is_refused():
    with pytest.raises(ModelError, match="Use checkpointing=none"):
        module.FullCheckpointing().apply(torch.nn.Linear(2, 2))
    module.NoCheckpointing().apply(torch.nn.Linear(2, 2))


def test_transformers_layers_are_what_the_policy_sets(tiny):
    base = load(tiny.path)
    module.FullCheckpointing().apply(base)
    layers = list(base.get_decoder().layers)
    assert all(layer.gradient_checkpointing for layer in layers)
    assert all(layer._gradient_checkpointing_func.func is checkpoint for layer in layers)
    assert all(layer._gradient_checkpointing_func.keywords == {"use_reentrant": False} for layer in layers)
    module.NoCheckpointing().apply(base)
    assert not any(layer.gradient_checkpointing for layer in layers)


DEPTH = 5
DEEP = {
    "full": FullCheckpointing(),
    "every_k of 1": EveryK(k=1),
    "every_k of 2": EveryK(k=2),
    "every_k of 3": EveryK(k=3),
    "every_k of all": EveryK(k=DEPTH),
    "sqrt": Sqrt(),
    "attention": Attention(),
    "selective": Selective(keep=Keep.attention),
    "selective linear": Selective(keep=Keep.linear),
    "selective both": Selective(keep=Keep.both),
    "per block": PerBlock([FullCheckpointing(), Selective(keep=Keep.attention), *[NoCheckpointing()] * (DEPTH - 2)]),
}


def _deep_model(quantised: bool = False):
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
    adapted = option("adapter", "lora", r=4, alpha=8.0, dropout=0.2, fused=False).attach(base)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    return base, adapted


def _deep_step(policy, quantised=False):
    """(loss, gradients by name)."""
    base, adapted = _deep_model(quantised)
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
    return {quantised: _deep_step(NoCheckpointing(), quantised) for quantised in (False, True)}


@pytest.mark.parametrize("quantised", [False, True], ids=["fp32", "nf4"])
@pytest.mark.parametrize("name", DEEP)
def test_five_blocks_give_the_gradients_of_keeping_everything(name, quantised, kept_whole):
    loss, gradients = _deep_step(DEEP[name], quantised)
    expected_loss, expected = kept_whole[quantised]
    assert torch.equal(loss, expected_loss)
    assert gradients.keys() == expected.keys()
    for parameter, gradient in gradients.items():
        assert gradient is not None, parameter
        assert torch.equal(gradient, expected[parameter]), parameter


def test_a_segment_runs_its_blocks_in_evaluation_too():
    base, _ = _deep_model()
    base.eval()
    ids = torch.arange(10)[None]
    with torch.no_grad():
        expected = base(input_ids=ids, use_cache=False).logits
        EveryK(k=2).apply(base)
        assert torch.equal(base(input_ids=ids, use_cache=False).logits, expected)


def test_every_k_larger_than_the_depth_is_refused():
    base, _ = _deep_model()
    with pytest.raises(ConfigError, match=r"checkpointing\.k=6.*5 blocks.*1 to 5"):
        EveryK(k=6).apply(base)


def test_a_dequantised_weight_is_in_no_set_of_kept_operations():
    for keep in Keep:
        names = [str(operation) for operation in kept_operations(keep)]
        assert names and not any("dequant" in name for name in names)


def test_a_policy_a_block_by_hand(tiny):
    chosen = option("checkpointing", "blocks", none=["0-1", "4"], selective=["3"])
    kinds = [type(policy) for policy in chosen.blocks(6)]
    none, full = NoCheckpointing, FullCheckpointing
    assert kinds == [none, none, full, Selective, none, full]
    assert chosen.cuts_blocks and not option("checkpointing", "blocks", none=["0"]).cuts_blocks
    for wrong, why in ({"none": ["6"]}, "the model's are 0 to 5"), ({"none": ["5-4"]}, "0 to 5"):
        with pytest.raises(ConfigError, match=why):
            option("checkpointing", "blocks", **wrong).blocks(6)
    with pytest.raises(ConfigError, match="selective=1-2: block 2 has a policy already"):
        option("checkpointing", "blocks", none=["2"], selective=["1-2"]).blocks(6)
    with pytest.raises(ConfigError, match="checkpointing.none=first: must be a block's number"):
        compose(["checkpointing=blocks", "checkpointing.none=[first]"])
    base = load(tiny.path, PACKED)
    compose(
        ["checkpointing=blocks", "checkpointing.none=[0]", "checkpointing.attention=[1]"]
    ).config.checkpointing.apply(base)
    runs = [layer.gradient_checkpointing for layer in base.get_decoder().layers]
    assert runs == [False, False, *[True] * (len(runs) - 2)]
