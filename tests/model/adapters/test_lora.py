"""LoRA: which modules it targets (A2), its dtypes, and that plain PEFT reopens it with equal logits (A1)."""

from __future__ import annotations

import pytest
import torch
from peft import PeftModel
from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig

from tests.factories import llama, load, option, packed_batch, random_tokens
from tests.support import slow_but, train_here
from trainer.config.compose import compose
from trainer.errors import ModelError
from trainer.model.adapters import decoder_linears, find_targets
from trainer.run import build

ENDINGS = ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]


def lora(**changes):
    return option("adapter", "lora", **changes)


def gemma3():
    """A vision-language model: AutoModelForCausalLM builds its vision tower too, with projections of the same names."""
    text = {
        "vocab_size": 300,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
    }
    vision = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= {"image_size": 28, "patch_size": 14}
    config = AutoConfig.for_model("gemma3", text_config=text, vision_config=vision, mm_tokens_per_image=4)
    return AutoModelForCausalLM.from_config(config)


def test_all_linear_is_every_linear_of_the_decoder_and_nothing_else():
    model = llama()
    expected = {name for name, m in model.named_modules() if isinstance(m, torch.nn.Linear) and name != "lm_head"}
    assert set(find_targets(model, "all-linear")) == expected and len(expected) == 14


def test_all_linear_leaves_a_vision_tower_alone():
    model = gemma3()
    assert any("vision" in name and "q_proj" in name for name, _ in model.named_modules()), "nothing to leave alone"
    targets = find_targets(model, "all-linear")
    assert len(targets) == 14 and all("language_model" in name for name in targets)
    adapted = lora(r=4).attach(model)
    trained = [name for name, p in adapted.named_parameters() if p.requires_grad]
    assert len(trained) == 28 and not [name for name in trained if "vision" in name or "projector" in name]


@pytest.mark.parametrize(
    "wanted", [["q_proj", "v_proj"], r".*\.(q|v)_proj", r"model\.layers\.\d+\.self_attn\.[qv]_proj"]
)
def test_names_and_expressions_find_the_same(wanted):
    found = find_targets(llama(), wanted)
    assert found == [f"model.layers.{n}.self_attn.{p}_proj" for n in (0, 1) for p in "qv"]


def test_a_longer_ending_names_one_layer():
    assert find_targets(llama(), ["layers.1.self_attn.q_proj"]) == ["model.layers.1.self_attn.q_proj"]


@pytest.mark.parametrize(
    ("wanted", "named"),
    [
        (["q_porj"], "q_porj (did you mean q_proj?)"),
        (["q_proj", "query"], "query"),
        (["proj"], "proj"),
        (r"q_proj", "matches no linear layer as a whole name"),
        (r"layers\.0\.self_attn\.q_proj", "matches no linear layer as a whole name"),
        (r".*\.q_prj", "matches no linear layer"),
        (r"(", "not a regular expression"),
        (r".*norm", "matches no linear layer"),
    ],
)
def test_targets_that_do_not_exist_are_refused_with_what_there_is(wanted, named):
    """A2: a wrong name, one right and one wrong, an expression that fits a part of a name only."""
    with pytest.raises(ModelError) as error:
        lora(target_modules=wanted).check(llama())
    assert error.value.exit_code == 4 and named in str(error.value)
    if "regular" not in named:
        assert all(ending in str(error.value) for ending in ENDINGS)


def test_wrong_targets_are_refused_before_any_weight_is_read(base_overrides, tmp_path, monkeypatch):
    monkeypatch.setattr(build, "load_base", lambda *_: pytest.fail("the weights were read"))
    with pytest.raises(ModelError):
        train_here([*base_overrides, "adapter.target_modules=[q_proj,wrong]"], tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_modules_to_save_must_exist_and_train_whole():
    with pytest.raises(ModelError, match="no_such"):
        lora(modules_to_save=["no_such"]).check(llama())
    adapted = lora(modules_to_save=["embed_tokens"]).attach(llama())
    trained = {name for name, p in adapted.named_parameters() if p.requires_grad}
    assert any("embed_tokens" in name for name in trained)


@pytest.mark.parametrize("quant", ["nf4", "fp4", "int8"])
@pytest.mark.parametrize("ending", ["down_proj", "mlp"])
def test_what_is_quantised_cannot_train_whole(quant, ending):
    model = llama()
    with pytest.raises(ModelError, match=f"modules_to_save=.'{ending}'.*use quant=none"):
        option("quant", quant).check(lora(modules_to_save=[ending, "embed_tokens"]).trained_whole(model))
    option("quant", quant).check(lora(modules_to_save=["embed_tokens", "norm"]).trained_whole(model))
    option("quant", "none").check(lora(modules_to_save=[ending]).trained_whole(model))


def test_trainables_are_fp32_over_a_bf16_base_and_nothing_else_trains():
    base = llama().to(torch.bfloat16)
    adapted = lora().attach(base)
    for name, p in adapted.named_parameters():
        assert p.requires_grad == ("lora_" in name)
        assert p.dtype is (torch.float32 if p.requires_grad else torch.bfloat16), name


def test_adapter_none_trains_everything_in_fp32():
    model = option("adapter", "none").attach(llama().to(torch.bfloat16))
    assert all(p.requires_grad and p.dtype is torch.float32 for p in model.parameters())


def test_the_update_is_alpha_over_r_times_b_times_a():
    """W x + (alpha / r) B A x, computed from the tensors themselves."""
    base = llama()
    x = torch.randn(3, 64)
    layer = base.model.layers[0].self_attn.q_proj
    before = layer(x)
    lora(r=8, alpha=24).attach(base)
    wrapped = base.model.layers[0].self_attn.q_proj
    a, b = wrapped.lora_A["default"].weight, wrapped.lora_B["default"].weight
    assert torch.equal(wrapped(x), before), "a fresh adapter changes nothing"
    torch.nn.init.normal_(b)
    assert torch.allclose(wrapped(x), before + 3.0 * (x @ a.T @ b.T), atol=1e-4)


@pytest.mark.parametrize("quant", slow_but(["nf4"], ["none", "nf4", "int8"]))
@pytest.mark.parametrize("targets", ["all-linear", "[q_proj,v_proj]", r"'.*\.0\..*_proj'", "[q_proj,lm_head]"])
def test_plain_peft_reopens_the_adapter_with_equal_logits(targets, quant, base_overrides, tiny, tmp_path, monkeypatch):
    """A1: two tensors a target, B not zero, and no difference at all to the model that was trained."""
    from safetensors.torch import load_file

    from trainer.run import export as export_module

    kept = {}
    real = export_module.export

    def export(adapted, base, *rest):
        kept["model"] = base
        return real(adapted, base, *rest)

    monkeypatch.setattr(export_module, "export", export)
    run = tmp_path / "run"
    words = [*base_overrides, f"quant={quant}", f"adapter.target_modules={targets}", "train.max_steps=3"]
    train_here(words, run)
    weights = load_file(run / "adapter/adapter_model.safetensors")
    count = len(find_targets(load(tiny.path), compose(words).config.adapter.target_modules))
    assert len(weights) == 2 * count
    assert all(w.abs().max() > 0 and w.dtype is torch.float32 for w in weights.values())

    settings = {
        "none": None,
        "nf4": BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=torch.float32,
        ),
        "int8": BitsAndBytesConfig(load_in_8bit=True),
    }
    base = AutoModelForCausalLM.from_pretrained(
        tiny.path, dtype=torch.float32, quantization_config=settings[quant], device_map={"": "cpu"}
    )
    reopened = PeftModel.from_pretrained(base, run / "adapter").eval()
    for module in base.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
    trained = kept["model"].eval()
    trained.set_attn_implementation("sdpa")
    ids = packed_batch(random_tokens([24], vocabulary=280)).input_ids
    with torch.no_grad():
        ours = trained(input_ids=ids, use_cache=False).logits
        theirs = reopened(input_ids=ids, use_cache=False).logits
        with reopened.disable_adapter():
            plain = reopened(input_ids=ids, use_cache=False).logits
    assert torch.equal(ours, theirs)
    assert (plain - theirs).abs().max() > 1e-2, "the adapter does nothing"


def test_decoder_linears_need_no_prefix():
    """Some models are their own decoder's parent under another name."""
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(
            "opt",
            num_hidden_layers=1,
            hidden_size=32,
            ffn_dim=64,
            num_attention_heads=2,
            vocab_size=300,
            word_embed_proj_dim=32,
        )
    )
    names = decoder_linears(model)
    assert names and all(isinstance(model.get_submodule(name), torch.nn.Linear) for name in names)
    assert "lm_head" not in names
