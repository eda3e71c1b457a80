"""PiSSA and LoftQ: what they take out of each weight, on plain and on quantised bases, and what a run leaves behind."""

from __future__ import annotations

import peft
import pytest
import torch
from peft.utils.integrations import dequantize_module_weight

from tests.factories import FP32, llama, load, option, packed_batch, random_tokens
from tests.support import train_here
from trainer.config.compose import compose
from trainer.config.saved import load_run
from trainer.errors import ConfigError, ModelError
from trainer.export.reload import load_trained
from trainer.model.adapters.weight_share import low_rank
from trainer.model.loading.base import load_base, load_config
from trainer.training.weights import load_trainable

CPU = torch.device("cpu")


def begun(name: str, quant: str, model_words: list[str], **changes):
    """(base, adapted) as a run has them before its first step."""
    config = compose(model_words).config
    adapter = option("adapter", name, **changes)
    quantisation = option("quant", quant)
    weight_share = adapter.weight_share(quantisation, torch.float32, CPU)
    base = load_base(config.model, load_config(config.model), quantisation, FP32, CPU, "sdpa", weight_share)
    adapted = adapter.attach(base)
    weight_share.put(adapted)
    return weight_share, adapted


def effective(adapted) -> dict[str, torch.Tensor]:
    """W + s B A of each adapted layer."""
    return {
        name: dequantize_module_weight(m.base_layer).float() + m.get_delta_weight("default").detach()
        for name, m in adapted.get_base_model().named_modules()
        if hasattr(m, "lora_A")
    }


def error(weights: dict[str, torch.Tensor], model) -> float:
    return sum((w - model.get_submodule(name).weight).square().sum().item() for name, w in weights.items())


def test_pissa_is_pefts_on_plain_weights(tiny):
    _, adapted = begun("pissa", "none", tiny.overrides(), r=4, alpha=8.0, svd_iterations=None)
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", init_lora_weights="pissa")
    theirs = peft.get_peft_model(load(tiny.path), config)
    layers = dict(theirs.get_base_model().named_modules())
    for name, module in adapted.get_base_model().named_modules():
        if hasattr(module, "lora_A"):
            assert torch.allclose(module.base_layer.weight, layers[name].base_layer.weight, atol=1e-5)
            product, other = (m.get_delta_weight("default") for m in (module, layers[name]))
            assert torch.allclose(product, other, atol=1e-5) and product.abs().max() > 0.1


@pytest.mark.parametrize("quant", ["nf4", "int8"])
def test_loftq_makes_up_for_more_of_what_quantising_loses(quant, tiny):
    """Squared distance of W + s B A from the weights in full: less in turns than in one, and than PiSSA's."""
    plain = load(tiny.path)
    lost = {
        (name, turns): error(effective(begun(name, quant, tiny.overrides(), r=16, **turn)[1]), plain)
        for name, turns, turn in (("pissa", 1, {}), ("loftq", 1, {"iterations": 1}), ("loftq", 5, {"iterations": 5}))
    }
    assert lost["loftq", 5] < lost["loftq", 1] and lost["loftq", 5] < 0.9 * lost["pissa", 1], lost


def test_a_randomised_decomposition_is_close_to_the_exact_one():
    torch.manual_seed(0)
    weight = torch.randn(96, 64) @ torch.diag(0.9 ** torch.arange(64.0))
    state = torch.get_rng_state()
    products = [2.0 * b @ a for a, b in (low_rank(weight, 8, 2.0, n) for n in (None, 16, 16))]
    assert torch.allclose(products[0], products[1], atol=1e-3)
    assert torch.equal(products[1], products[2]) and torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(("name", "quant"), [("pissa", "none"), ("pissa", "nf4"), ("loftq", "nf4")])
def test_the_result_is_a_lora_of_twice_the_rank_for_the_base_as_it_was(name, quant, tiny, base_overrides, tmp_path):
    """Our own reload answers as the run did; plain PEFT has the same on the base's own weights."""
    run = tmp_path / "run"
    words = [f"adapter={name}", f"quant={quant}", "adapter.r=4", "optim.learning_rate=1e-2", "train.max_steps=3"]
    train_here([*base_overrides, *words], run)
    trained = load_trained(load_run(run), run).model.eval()
    adapter = option("adapter", name, r=4)
    weight_share, adapted = begun(name, quant, tiny.overrides(), r=4)
    steps = sorted((run / "checkpoints").glob("step-*"))
    load_trainable(adapted, steps[-1])
    ids = packed_batch(random_tokens([24], vocabulary=280)).input_ids

    def logits(model):
        with torch.no_grad():
            return model(input_ids=ids, use_cache=False).logits

    ours = logits(adapted.eval())
    assert torch.allclose(logits(trained), ours, atol=1e-5)
    reopened = peft.PeftModel.from_pretrained(load(tiny.path), run / "adapter").eval()
    assert reopened.peft_config["default"].r == 8
    with weight_share.as_begun(adapted):
        first = logits(adapted)
    assert torch.equal(logits(adapted), ours) and (ours - first).abs().max() > 1e-2
    plain = logits(load(tiny.path))
    if quant == "none":
        assert torch.allclose(logits(reopened), ours, atol=1e-4)
        assert torch.allclose(first, plain, atol=1e-4)
    else:  # both are off the full-precision base by what quantising lost, and by nothing else
        assert (logits(reopened) - ours).abs().mean() <= 1.5 * (first - plain).abs().mean()
    assert adapter.alpha / adapter.r == reopened.base_model.model.model.layers[0].mlp.up_proj.scaling["default"]


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["adapter=loftq", "quant=none"], "adapter=loftq: makes up for what quantising loses"),
        (
            ["adapter=pissa", "adapter.init_from=a"],
            "adapter.init_from: this adapter begins from the base's own weights",
        ),
        (["adapter=pissa", "model.quantized_cache=true"], "model.quantized_cache=false"),
    ],
)
def test_what_cannot_be_is_refused(words, named):
    with pytest.raises(ConfigError) as refused:
        compose(["recipe=quickstart", *words])
    assert named in str(refused.value)


def test_a_rank_above_the_weights_own_is_refused():
    with pytest.raises(ModelError, match="adapter.r=40: .*k_proj has 32 x 64 weights"):
        option("adapter", "pissa", r=40).check(llama())
