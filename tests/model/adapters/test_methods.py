"""The methods beside LoRA: trained numbers by formula and as PEFT counts them, what they compute, what they refuse."""

from __future__ import annotations

import peft
import pytest
import torch
from peft.optimizers import create_loraplus_optimizer

from tests.factories import FP32, llama, option, packed_batch, random_tokens
from trainer.config.compose import compose
from trainer.errors import ConfigError, ModelError
from trainer.model.loading.assemble import assemble, at_random
from trainer.run.build import begin_from

SHAPES = [(64, 64), (32, 64), (32, 64), (64, 64), (128, 64), (128, 64), (64, 128)]
"""(d, k) of a block's layers, two blocks."""
R = 4
LORA = 2 * sum(R * (d + k) for d, k in SHAPES)
COUNTS = {
    "lora": LORA,
    "rslora": LORA,
    "lora_plus": LORA,
    "dora": LORA + 2 * sum(d for d, _ in SHAPES),
    "ia3": 2 * (32 + 32 + 128),
    "peft": 2 * LORA,  # LoHa: two low-rank products, multiplied
}
CONFIGS = {
    "lora": lambda: peft.LoraConfig(r=R, target_modules="all-linear"),
    "rslora": lambda: peft.LoraConfig(r=R, target_modules="all-linear", use_rslora=True),
    "lora_plus": lambda: peft.LoraConfig(r=R, target_modules="all-linear"),
    "dora": lambda: peft.LoraConfig(r=R, target_modules="all-linear", use_dora=True),
    "ia3": lambda: peft.IA3Config(target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"]),
    "peft": lambda: peft.LoHaConfig(r=R, target_modules="all-linear"),
}
CHANGES = {"ia3": {}, "peft": {"method": "LOHA", "fields": {"r": R}}}


def adapter(name: str, **changes):
    return option("adapter", name, **{**CHANGES.get(name, {"r": R}), **changes})


def trained(model) -> dict[str, torch.Tensor]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def logits(model) -> torch.Tensor:
    ids = packed_batch(random_tokens([24])).input_ids
    with torch.no_grad():
        return model(input_ids=ids, use_cache=False).logits


def shake(model) -> None:
    """Weights that do something."""
    generator = torch.Generator().manual_seed(1)
    for p in trained(model).values():
        p.data += 0.05 * torch.randn(p.shape, generator=generator)


@pytest.mark.parametrize("name", COUNTS)
def test_as_many_numbers_train_as_the_formula_says_and_peft(name):
    ours = trained(adapter(name).attach(llama()))
    theirs = trained(peft.get_peft_model(llama(), CONFIGS[name]()))
    assert {key: p.shape for key, p in ours.items()} == {key: p.shape for key, p in theirs.items()}
    assert sum(p.numel() for p in ours.values()) == COUNTS[name]
    assert all(p.dtype is torch.float32 for p in ours.values())


@pytest.mark.parametrize("name", COUNTS)
def test_a_fresh_one_changes_nothing_and_a_merged_one_answers_the_same(name):
    plain = logits(llama())
    adapted = adapter(name).attach(llama())
    assert torch.allclose(logits(adapted.eval()), plain, atol=1e-5)
    shake(adapted)
    changed = logits(adapted)
    assert (changed - plain).abs().max() > 1e-2
    assert torch.allclose(logits(adapted.merge_and_unload()), changed, atol=2e-4)


def test_rslora_scales_by_the_root_of_the_rank():
    layers = [m for m in adapter("rslora", alpha=8).attach(llama()).modules() if hasattr(m, "lora_A")]
    assert len(layers) == 14 and all(layer.scaling == {"default": 8 / R**0.5} for layer in layers)


@pytest.mark.parametrize("words", ["quant=int8", "offload=base_cpu", "offload=base_disk"])
def test_dora_is_refused_where_it_cannot_read_the_weights(words):
    compose(["data.path=x", "adapter=dora", "quant=nf4"])
    with pytest.raises(ConfigError, match=f"adapter=dora: begins from .*{words}"):
        compose(["data.path=x", "adapter=dora", words])


def test_dora_is_a_length_times_a_direction():
    """m (W + s B A) / |W + s B A| by rows, from the tensors themselves."""
    base = llama()
    weight = base.model.layers[0].mlp.up_proj.weight.detach().clone()
    adapted = adapter("dora", alpha=8).attach(base)
    shake(adapted)
    layer, x = base.model.layers[0].mlp.up_proj, torch.randn(3, 64)
    a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    length = layer.lora_magnitude_vector["default"].weight
    direction = weight + 8 / R * b @ a
    assert torch.allclose(
        layer(x), x @ (length[:, None] * direction / direction.norm(dim=1, keepdim=True)).T, atol=1e-5
    )


def test_lora_plus_has_pefts_two_rates():
    adapted = adapter("lora_plus", learning_rate_ratio=8.0).attach(llama())
    optimizer = option("optim", "adamw", learning_rate=1e-3).build(list(trained(adapted).values()))
    ours = {id(p): 1e-3 * g["rate_ratio"] for g in optimizer.param_groups for p in g["params"]}
    theirs = create_loraplus_optimizer(adapted, torch.optim.AdamW, lr=1e-3, loraplus_lr_ratio=8.0)
    assert ours == {id(p): pytest.approx(g["lr"]) for g in theirs.param_groups for p in g["params"]}


@pytest.mark.parametrize(("bias", "count"), [("none", 0), ("lora_only", 2), ("all", 14)])
def test_biases_train_as_pefts_do(bias, count):
    fields = {"attention_bias": True, "mlp_bias": True}
    ours = trained(adapter("lora", bias=bias, target_modules=["q_proj"]).attach(llama(**fields)))
    theirs = trained(peft.get_peft_model(llama(**fields), peft.LoraConfig(r=R, target_modules=["q_proj"], bias=bias)))
    assert ours.keys() == theirs.keys() and sum("bias" in name for name in ours) == count


@pytest.mark.parametrize("bias", ["lora_only", "all"])
def test_biases_that_are_not_there_are_refused(bias):
    with pytest.raises(ModelError, match=f"adapter.bias={bias}: this model has no such bias"):
        adapter("lora", bias=bias).check(llama())


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"method": "LOOHA"}, "did you mean LOHA?"),
        ({"method": "OFT", "fields": {"oft_blok_size": 4}}, "did you mean oft_block_size?"),
        ({"method": "VERA", "fields": {"task_type": "CAUSAL_LM"}}, "adapter.fields.task_type: unknown"),
        ({"method": "LOHA", "fields": {"target_modules": ["q_porj"]}}, "did you mean q_proj?"),
        ({"method": "PROMPT_TUNING", "fields": {"num_virtual_tokens": 4}}, "puts tokens before the text"),
        ({"method": "OFT", "fields": {"r": 4, "oft_block_size": 4}}, "adapter.method=OFT adapter.fields="),
    ],
)
def test_what_peft_does_not_have_is_refused_by_name(settings, named):
    with pytest.raises(ModelError) as error:
        option("adapter", "peft", **{"fields": {}, **settings}).check(llama())
    assert named in str(error.value)


@pytest.mark.parametrize("method", ["OFT", "VERA", "LOKR", "HRA", "BOFT", "RANDLORA", "FOURIERFT", "LN_TUNING"])
def test_any_method_moves_all_that_trains(method):
    fields = {"FOURIERFT": {"n_frequency": 10}, "LN_TUNING": {"target_modules": ["input_layernorm"]}}.get(method, {})
    adapted = option("adapter", "peft", method=method, fields=fields).attach(llama())
    before = {name: p.detach().clone() for name, p in trained(adapted).items()}
    assert before and sum(p.numel() for p in before.values()) < 60_000
    optimizer = torch.optim.SGD(trained(adapted).values(), lr=1.0)
    ids = packed_batch(random_tokens([24])).input_ids
    for _ in range(2):  # what multiplies a zero has its gradient in the second step
        adapted(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()
    still = [name for name, p in trained(adapted).items() if torch.equal(p, before[name])]
    assert not still


def test_ranks_that_move_between_steps_are_refused():
    with pytest.raises(ModelError, match="by a call that the loop does not make"):
        option("adapter", "peft", method="ADALORA", fields={"total_step": 10}).attach(llama())


@pytest.mark.parametrize("name", ["lora", "dora", "ia3", "peft"])
def test_a_run_begins_from_another_adapter(name, tmp_path):
    first = adapter(name).attach(llama())
    shake(first)
    first.save_pretrained(tmp_path / "run" / "adapter")
    for folder in ("run", "run/adapter"):
        begun = adapter(name, init_from=str(tmp_path / folder))
        begun.check(llama())
        second = begun.attach(llama())
        begin_from(begun, second)
        assert all(torch.equal(a, b) for a, b in zip(trained(first).values(), trained(second).values(), strict=True))


@pytest.mark.parametrize(
    ("name", "changes", "named"),
    [
        ("lora", {"r": 8}, "r=4 (here 8)"),
        ("lora", {"alpha": 8.0}, "lora_alpha=32 (here 8.0)"),
        ("dora", {}, "use_dora=None (here True)"),
        ("ia3", {}, "peft_type=LORA (here IA3)"),
        ("lora", {"target_modules": ["q_proj"]}, "target_modules="),
    ],
)
def test_an_adapter_of_another_kind_is_no_beginning(name, changes, named, tmp_path):
    adapter("lora").attach(llama()).save_pretrained(tmp_path)
    with pytest.raises(ModelError) as error:
        adapter(name, init_from=str(tmp_path), **changes).check(llama())
    assert named in str(error.value)


def test_a_folder_without_an_adapter_is_no_beginning(tmp_path):
    with pytest.raises(ModelError, match=r"has no adapter_config.json and no adapter_model.safetensors"):
        adapter("lora", init_from=str(tmp_path)).check(llama())


def test_an_adapter_of_another_model_is_refused(tmp_path):
    adapter("lora").attach(llama(hidden_size=32, intermediate_size=64)).save_pretrained(tmp_path)
    begun = adapter("lora", init_from=str(tmp_path))
    with pytest.raises(ModelError, match="does not fit this model"):
        begin_from(begun, begun.attach(llama()))


def quantised():
    base = assemble(llama().config, option("quant", "nf4"), FP32, torch.device("cpu"), "sdpa", at_random)
    option("quant", "nf4").mark(base)
    return base


@pytest.mark.parametrize("name", ["dora", "ia3"])
def test_as_many_numbers_train_on_quantised_layers(name):
    assert sum(p.numel() for p in trained(adapter(name).attach(quantised())).values()) == COUNTS[name]


def test_a_method_without_quantised_layers_is_refused_there():
    """PEFT itself takes the shape of the packed weights for that of the layer."""
    option("adapter", "peft", method="RANDLORA").attach(quantised())
    with pytest.raises(ModelError, match="no layers of this method for quantised weights"):
        adapter("peft").attach(quantised())
