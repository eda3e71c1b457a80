"""Bases made at random and loaded: the same quantised bits; the peak stays near the quantised size; bad folders."""

from __future__ import annotations

import shutil

import pytest
import torch
from transformers import AutoConfig

from tests.factories import FP32, LLAMA, gradients, option, packed_batch, random_tokens
from tests.support import make_model
from trainer.device.measure import Memory
from trainer.errors import ConfigError, ModelError
from trainer.model.attention import PACKED
from trainer.model.loading.architecture import skeleton
from trainer.model.loading.base import load_base, load_config, load_tokenizer, planned_config
from trainer.model.model_settings import Model, Weights
from trainer.model.precision import Dtypes
from trainer.training.losses import Chunked

CPU = torch.device("cpu")
QUANTS = ["none", "nf4", "fp4", "int8"]


def random_model(**fields) -> Model:
    architecture = {"model_type": "llama", **LLAMA, **fields}
    return option("model", "tiny", path=None, weights=Weights.random, architecture=architecture)


def pretrained(folder) -> Model:
    return option("model", "tiny", path=str(folder), weights=Weights.pretrained, architecture={})


def build(model: Model, quant: str, dtypes: Dtypes = FP32, seed: int = 0, attention: str = "sdpa"):
    torch.manual_seed(seed)
    return load_base(model, load_config(model), option("quant", quant), dtypes, CPU, attention)


def stored(model) -> dict[str, torch.Tensor]:
    """Everything that decides the model's numbers: weights, scales and code tables, buffers."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for name, p in list(model.named_parameters()):
        state = getattr(p, "quant_state", None)
        if state is not None:
            tensors |= {f"{name}.{k}": v for k, v in state.as_dict(packed=True).items() if isinstance(v, torch.Tensor)}
        if getattr(p, "SCB", None) is not None:
            tensors[f"{name}.SCB"] = p.SCB
    return {name: tensor.detach() for name, tensor in tensors.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("quant", QUANTS)
def test_random_and_loaded_bases_are_the_same_bits(quant, tied, dtype, tmp_path):
    """The source weights are the random unquantised model's; one seed makes them twice."""
    dtypes = Dtypes(dtype, "cpu")
    model = random_model(tie_word_embeddings=tied)
    build(model, "none", dtypes).save_pretrained(tmp_path / "source")
    made, loaded = build(model, quant, dtypes), build(pretrained(tmp_path / "source"), quant, dtypes)
    ours, theirs = stored(made), stored(loaded)
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert tensor.dtype == theirs[name].dtype and torch.equal(tensor, theirs[name]), name
    ids = packed_batch(random_tokens([12])).input_ids
    with torch.no_grad():
        assert torch.equal(made(ids, use_cache=False).logits, loaded(ids, use_cache=False).logits)
    assert (made.lm_head.weight is made.model.embed_tokens.weight) == tied


@pytest.mark.parametrize("quant", QUANTS)
def test_only_the_decoders_linears_are_quantised_and_precision_sets_the_rest(quant):
    model = build(random_model(), quant, Dtypes(torch.bfloat16, "cpu"))
    kind = {"none": "Linear", "nf4": "Linear4bit", "fp4": "Linear4bit", "int8": "Linear8bitLt"}[quant]
    assert {type(m).__name__ for n, m in model.named_modules() if n.endswith("_proj")} == {kind}
    assert type(model.lm_head) is torch.nn.Linear
    for name, p in model.named_parameters():
        if "_proj" not in name:
            assert p.dtype is torch.bfloat16, name


@pytest.mark.parametrize(("quant", "relative"), [("nf4", 0.12), ("fp4", 0.15), ("int8", 0.012)])
def test_quantised_layers_are_near_the_unquantised(quant, relative):
    exact, quantised = build(random_model(), "none"), build(random_model(), quant)
    x = torch.randn(5, 64)
    a, b = (m.model.layers[0].mlp.up_proj(x) for m in (exact, quantised))
    assert 0 < ((a - b).norm() / a.norm()).item() < relative


def test_random_weights_follow_the_models_own_initialisation():
    model = build(random_model(initializer_range=0.05), "none")
    weights = torch.cat([p.flatten() for n, p in model.named_parameters() if "_proj" in n])
    assert weights.std().item() == pytest.approx(0.05, rel=0.02) and abs(weights.mean().item()) < 1e-3
    assert torch.equal(model.model.norm.weight, torch.ones(64))
    other = build(random_model(initializer_range=0.05), "none", seed=1)
    assert not torch.equal(other.lm_head.weight, model.lm_head.weight)


def test_the_peak_of_a_random_base_is_near_its_quantised_size():
    """Layer by layer: the whole model in fp32 would be eight times the quantised size."""
    fields = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 8, "num_attention_heads": 8}
    with Memory(CPU) as memory:
        build(random_model(), "nf4")  # libraries load what they load
        before = memory.read().allocated
        model = build(random_model(**fields), "nf4")
        reading = memory.read()
    whole = 4 * sum(p.numel() for p in skeleton(model.config).parameters())
    held, peak = reading.allocated - before, reading.peak - before
    largest = 4 * 2048 * 512
    assert held < whole / 5
    assert peak <= held + 4 * largest, f"peak {peak >> 20} MiB, held {held >> 20} MiB, whole {whole >> 20} MiB"


def test_the_skeleton_has_every_shape_and_no_byte():
    config = AutoConfig.for_model("llama", **{**LLAMA, "hidden_size": 4096, "num_hidden_layers": 32})
    with Memory(CPU) as memory:
        before = memory.read().allocated
        shape = skeleton(config)
        assert memory.read().allocated - before < 64 * 2**20
    assert all(p.is_meta for p in shape.parameters())
    small = skeleton(AutoConfig.for_model("llama", **LLAMA))
    real = build(random_model(), "none")
    assert {n: p.shape for n, p in small.named_parameters()} == {n: p.shape for n, p in real.named_parameters()}


@pytest.mark.parametrize("path", ["random", "loaded"])
def test_an_evaluation_pass_neither_repacks_a_weight_nor_stops_gradients(path, tiny):
    """On CPUs with AVX512-BF16 bitsandbytes repacks a 4-bit weight in evaluation mode, and training then learns
    nothing."""
    base = build(random_model() if path == "random" else pretrained(tiny.path), "nf4", attention=PACKED)
    adapted = option("adapter", "lora").attach(base)
    before = {name: tensor.clone() for name, tensor in stored(base).items()}
    batch = packed_batch(random_tokens([9, 14], vocabulary=280))

    def learn():
        base.train()
        base.zero_grad()
        Chunked(16).sum(base, batch).backward()
        return gradients(adapted)

    first = learn()
    base.eval()
    with torch.no_grad():
        Chunked(16).sum(base, batch)
        base(
            input_ids=batch.input_ids[:, :1],
            position_ids=batch.position_ids[:, :1],
            use_cache=False,
            cu_seq_lens_q=torch.tensor([0, 1], dtype=torch.int32),
            max_length_q=1,
        )
    after = stored(base)
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    again = learn()
    assert again.keys() == first.keys() and len(first) == 28
    assert all(torch.equal(gradient, again[name]) for name, gradient in first.items())
    assert any(gradient.abs().max() > 0 for gradient in first.values())


def test_a_config_field_that_does_not_exist_is_refused():
    with pytest.raises(ConfigError, match=r"hiden_size \(did you mean hidden_size\?\)"):
        load_config(random_model(hiden_size=3))
    with pytest.raises(ConfigError, match=r"model_type=lama: .*\(did you mean llama\?\)"):
        load_config(random_model(model_type="lama"))
    with pytest.raises(ConfigError, match="model_type is missing"):
        load_config(option("model", "tiny", weights=Weights.random, architecture={"hidden_size": 8}))


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda f: shutil.rmtree(f), "there is no such folder"),
        (lambda f: (f / "config.json").unlink(), "no config.json"),
        (lambda f: (f / "model.safetensors").unlink(), "no weights"),
        (lambda f: (f / "model.safetensors").rename(f / "pytorch_model.bin"), "only pickled weights"),
        (lambda f: (f / "config.json").write_text("{"), "config.json:1: not JSON"),
        (lambda f: (f / "config.json").write_text('{"model_type": "no_such_type"}'), "config.json cannot be loaded"),
        (lambda f: (f / "model.safetensors").write_bytes(b"x" * 100), "model.safetensors is damaged or cut off"),
    ],
)
def test_a_bad_model_folder_is_a_model_error(damage, said, tmp_path):
    folder = tmp_path / "model"
    make_model(folder)
    damage(folder)
    with pytest.raises(ModelError, match=said) as error:
        build(pretrained(folder), "none")
    assert error.value.exit_code == 4 and str(folder) in str(error.value)


def test_a_folder_without_a_tokenizer_is_a_model_error(tmp_path):
    folder = tmp_path / "model"
    make_model(folder)
    for file in folder.glob("token*"):
        file.unlink()
    with pytest.raises(ModelError, match="tokenizer"):
        load_tokenizer(pretrained(folder))


def test_random_weights_take_the_embedded_tokenizer():
    assert load_tokenizer(random_model()).chat_template


def test_a_plan_without_an_architecture_says_what_to_fetch():
    with pytest.raises(ModelError, match=r"model.path=nobody/nothing: its config.json is not here.*hf download"):
        planned_config(option("model", "other", path="nobody/nothing"))
