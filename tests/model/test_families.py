"""Each family through the whole QLoRA path on a tiny random model with its own template, and what is refused."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, BitsAndBytesConfig

from tests.data.styles import STYLES, tokenizer_of
from tests.factories import packed_batch, padded_batch, summed_loss
from tests.support import chat_rows, metrics, train_here, write_jsonl
from trainer.config.compose import compose
from trainer.config.saved import load_run
from trainer.data.tokens.tokenize import TokenSet
from trainer.errors import ModelError
from trainer.export.reload import load_trained
from trainer.model import attention
from trainer.model.families import TEXT_KEYS
from trainer.model.loading import base as load
from trainer.model.loading.architecture import skeleton
from trainer.run.beginning import Beginning
from trainer.run.clock import Clock
from trainer.run.prepare import prepare

CPU = torch.device("cpu")
WINDOW = 8
"""Sliding window: shorter than the samples."""

SMALL = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.1,
}
GEMMA = {"head_dim": 16, "sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}


@dataclass(frozen=True)
class Family:
    name: str
    model_type: str
    style: str
    fields: dict[str, Any] = field(default_factory=dict)
    adds_bos: bool = False
    targets: int = 7
    """linear layers in a block"""

    @property
    def multimodal(self) -> bool:
        return self.model_type == "gemma3"


FAMILIES = [
    Family("llama", "llama", "llama3", adds_bos=True),
    Family("mistral", "mistral", "mistral", {"sliding_window": WINDOW}, adds_bos=True),
    Family("qwen2", "qwen2", "chatml"),
    Family("qwen3", "qwen3", "qwen3", {"head_dim": 16}),
    Family("gemma3_text", "gemma3_text", "gemma", GEMMA, adds_bos=True),
    Family("gemma3_multimodal", "gemma3", "gemma", GEMMA, adds_bos=True),
    Family("phi3", "phi3", "phi", {"sliding_window": WINDOW}, targets=4),
]


def make(family: Family, folder: Path) -> Path:
    """The family's random model, saved as its authors would have."""
    tokenizer = tokenizer_of(family.style, family.adds_bos)
    ids = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")}
    fields = {**SMALL, **family.fields, **ids, "vocab_size": len(tokenizer)}
    torch.manual_seed(0)
    if family.multimodal:
        config = AutoConfig.for_model("gemma3", text_config=fields, vision_config=VISION, mm_tokens_per_image=4)
        AutoModelForImageTextToText.from_config(config).save_pretrained(folder)
    else:
        AutoModelForCausalLM.from_config(AutoConfig.for_model(family.model_type, **fields)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@dataclass
class Trial:
    family: Family
    folder: Path
    run_dir: Path
    overrides: list[str]
    summary: dict


def trial_of(family: Family, base: Path) -> Trial:
    """The family trained for three steps: NF4, LoRA on all linear layers, packed, full checkpointing."""
    folder = make(family, base / "model")
    rows = write_jsonl(base / "chats.jsonl", chat_rows())
    overrides = [
        f"model.path={folder}",
        "data=file",
        f"data.path={rows}",
        "data.max_length=128",
        "data.eval_fraction=0",
        "quant=nf4",
        "precision=fp32",
        "optim=adamw",
        "optim.learning_rate=1e-2",
        "schedule=constant",
        "schedule.warmup_ratio=0",
        "device=cpu",
        "train.micro_batch_tokens=256",
        "train.accumulation_steps=1",
        "train.max_steps=3",
        "train.save_every=0",
        "train.report=false",
    ]
    return Trial(family, folder, base / "run", overrides, train_here(overrides, base / "run"))


@pytest.fixture(scope="module", params=FAMILIES, ids=lambda family: family.name)
def trial(request, tmp_path_factory) -> Trial:
    return trial_of(request.param, tmp_path_factory.mktemp(request.param.name))


def plain_base(trial: Trial):
    """The NF4 base by transformers alone."""
    more = {}
    if trial.family.multimodal:
        more = {
            "config": AutoConfig.from_pretrained(trial.folder).get_text_config(),
            "key_mapping": TEXT_KEYS,
        }
    nf4 = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
    nf4.bnb_4bit_compute_dtype = torch.float32
    base = AutoModelForCausalLM.from_pretrained(
        trial.folder, dtype=torch.float32, quantization_config=nf4, device_map={"": CPU}, **more
    )
    for module in base.modules():  # on some CPUs bitsandbytes would go to bf16 in evaluation mode
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
    return base.eval()


def samples(vocabulary: int, lengths: list[int]) -> TokenSet:
    ids = np.random.default_rng(0).integers(10, vocabulary, sum(lengths), dtype=np.int32)
    return TokenSet(ids, np.ones(len(ids), dtype=bool), np.cumsum([0, *lengths]), sources=[])


@torch.no_grad()
def test_packed_equals_alone(trial):
    model = compose(trial.overrides).config.model
    config, dtypes = load.load_config(model), compose(trial.overrides).config.precision.build(CPU)
    chosen, _ = attention.choose(config, CPU, torch.float32)
    assert chosen == attention.PACKED
    base = load.load_base(model, config, compose(trial.overrides).config.quant, dtypes, CPU, chosen).eval()
    tokens = samples(config.vocab_size, [WINDOW + 9, 5, 2 * WINDOW])
    packed = base(**packed_batch(tokens).inputs()).logits[0]
    plain = plain_base(trial)
    alone = [plain(input_ids=padded_batch(tokens, i).input_ids, use_cache=False).logits[0] for i in range(3)]
    assert (packed - torch.cat(alone)).abs().max() <= 1e-5 * packed.abs().max()


def test_every_trainable_moves(trial):
    run = compose(trial.overrides)
    model, config = run.config.model, load.load_config(run.config.model)
    base = load.load_base(model, config, run.config.quant, run.config.precision.build(CPU), CPU, "sdpa")
    torch.manual_seed(run.config.seed)
    fresh = peft.get_peft_model_state_dict(run.config.adapter.attach(base))
    trained = load_file(trial.run_dir / "adapter" / "adapter_model.safetensors")
    if trial.family.multimodal:
        trained = {name.replace("model.language_model.", "model.", 1): tensor for name, tensor in trained.items()}
    assert trained.keys() == fresh.keys()
    assert len(trained) == 2 * trial.family.targets * SMALL["num_hidden_layers"]
    assert [name for name in fresh if torch.equal(fresh[name], trained[name])] == []


@torch.no_grad()
def test_adapter_reloads_with_peft(trial):
    ids = torch.arange(10, 40)[None]
    base = plain_base(trial)
    before = base(input_ids=ids, use_cache=False).logits
    renamed = TEXT_KEYS if trial.family.multimodal else None
    plain = peft.PeftModel.from_pretrained(base, trial.run_dir / "adapter", key_mapping=renamed).eval()
    ours = load_trained(load_run(trial.run_dir), trial.run_dir).model.eval()
    expected = plain(input_ids=ids, use_cache=False).logits
    assert (ours(input_ids=ids, use_cache=False).logits - expected).abs().max() <= 1e-5 * expected.abs().max()
    assert (before - expected).abs().max() > 1e-2


@torch.no_grad()
@pytest.mark.parametrize("by", ["AutoModelForCausalLM", "the folder's own class"])
def test_the_documented_load_is_the_runs_own_model(trial, by):
    """On the base as its folder gives it, in fp32, beside the text decoder alone with the same adapter."""
    named = getattr(transformers, AutoConfig.from_pretrained(trial.folder).architectures[0])
    model_class = AutoModelForCausalLM if by == "AutoModelForCausalLM" else named
    whole = model_class.from_pretrained(trial.folder, dtype=torch.float32)
    ids = torch.arange(10, 40)[None]
    before = whole.eval()(input_ids=ids, use_cache=False).logits
    loaded = peft.PeftModel.from_pretrained(whole, trial.run_dir / "adapter").eval()
    found = loaded(input_ids=ids, use_cache=False).logits
    run = compose([*trial.overrides, "quant=none"])
    config = load.load_config(run.config.model)
    own = load.load_base(run.config.model, config, run.config.quant, run.config.precision.build(CPU), CPU, "sdpa")
    renamed = TEXT_KEYS if trial.family.multimodal else None
    own = peft.PeftModel.from_pretrained(own, trial.run_dir / "adapter", key_mapping=renamed).eval()
    expected = own(input_ids=ids, use_cache=False).logits
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()
    assert (before - expected).abs().max() > 1e-2
    assert not [name for name, _ in loaded.named_modules() if "vision" in name and "lora" in name]


def test_targets_are_what_the_template_makes_the_assistant_say(trial):
    run = compose(trial.overrides)
    prepared = prepare(run, Beginning(trial.run_dir), Clock())
    style = STYLES[trial.family.style]
    for index, row in enumerate(chat_rows()):
        ids, is_target = prepared.train_set.sample(index)
        expected = "".join(text for text, answer in style.segments(row["messages"]) if answer)
        assert prepared.tokenizer.decode(ids[is_target]) == expected
        assert (ids == prepared.tokenizer.bos_token_id).sum() == (trial.family.adds_bos or style.writes_bos)


def test_only_the_text_decoder_of_gemma3_is_loaded(tmp_path):
    folder = make(FAMILIES[5], tmp_path)
    run = compose([f"model.path={folder}", "quant=none", "precision=fp32"])
    config = load.load_config(run.config.model)
    base = load.load_base(run.config.model, config, run.config.quant, run.config.precision.build(CPU), CPU, "sdpa")
    whole = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    ids = torch.arange(10, 40)[None]
    assert not [name for name, _ in base.named_modules() if "vision" in name or "projector" in name]
    with torch.no_grad():
        expected = whole(input_ids=ids, use_cache=False).logits
        assert torch.allclose(base.eval()(input_ids=ids, use_cache=False).logits, expected, atol=1e-5)


REFUSED = [
    ("gpt2", {"n_embd": 64, "n_layer": 1, "n_head": 2}, "gpt2.*no torch.nn.Linear"),
    ("t5", {"d_model": 64, "num_layers": 1}, "t5 is an encoder-decoder"),
    ("clip", {}, "clip is"),
    ("qwen2_vl", {}, "qwen2_vl is a multimodal model"),
]


@pytest.mark.parametrize(("model_type", "fields", "message"), REFUSED, ids=[row[0] for row in REFUSED])
def test_what_cannot_be_trained_is_refused_by_name(tmp_path, model_type, fields, message):
    config = AutoConfig.for_model(model_type, **fields)
    config.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    with pytest.raises(ModelError, match=message):
        skeleton(load.load_config(compose([f"model.path={tmp_path}"]).config.model))


def test_a_quantised_checkpoint_is_refused(tmp_path, tiny):
    for file in tiny.path.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "gptq"}}))
    with pytest.raises(ModelError, match="quantised already \\(gptq\\)"):
        load.load_config(compose([f"model.path={tmp_path}"]).config.model)


def test_weights_of_another_architecture_are_refused(tmp_path, tiny):
    """transformers would fill what is missing with random numbers."""
    for file in tiny.path.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))
    run = compose([f"model.path={tmp_path}", "quant=none", "precision=fp32"])
    config = load.load_config(run.config.model)
    with pytest.raises(ModelError, match=r"do not belong to this architecture.*model.layers.2"):
        load.load_base(run.config.model, config, run.config.quant, run.config.precision.build(CPU), CPU, "sdpa")


GEMMA2 = {**GEMMA, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0, "query_pre_attn_scalar": 16}


@pytest.mark.parametrize("packing", ["none", "best_fit"])
def test_a_model_that_caps_its_attention_trains_on_rows_as_each_alone(packing, tmp_path):
    """Gemma 2: transformers' sdpa would leave the cap out. Oracle: eager, one sample at a time."""
    folder = make(Family("gemma2", "gemma2", "gemma", GEMMA2, adds_bos=True), tmp_path / "model")
    rows = write_jsonl(tmp_path / "chats.jsonl", chat_rows())
    overrides = [f"model.path={folder}", "data=file", f"data.path={rows}", "data.eval_fraction=0", "quant=none"]
    overrides += [
        "precision=fp32",
        "device=cpu",
        "train.accumulation_steps=1",
        "train.max_steps=1",
        "train.log_every=1",
    ]
    overrides += [f"packing={packing}", "train.save_every=0", "data.max_length=128"]
    overrides += ["train.micro_batch_size=8"] if packing == "none" else ["train.micro_batch_tokens=1024"]
    train_here(overrides, tmp_path / "run")
    tokens = prepare(compose(overrides), Beginning(tmp_path / "other"), Clock()).train_set
    oracle = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32).eval()
    total = targets = 0
    for index in range(len(tokens.lengths)):
        batch = padded_batch(tokens, index)
        with torch.no_grad():
            total += summed_loss(oracle(batch.input_ids, use_cache=False).logits, batch.labels).item()
        targets += batch.num_targets
    assert metrics(tmp_path / "run")[0]["loss"] == pytest.approx(total / targets, rel=1e-5)
    answers = load_trained(load_run(tmp_path / "run"), tmp_path / "run").model
    assert answers.config._attn_implementation == "eager"


@pytest.mark.parametrize("trial", FAMILIES[:1], indirect=True, ids=lambda family: family.name)
def test_a_tampered_adapter_is_one_line(trial, tmp_path):
    for change in ({"peft_type": "EVIL"}, {"r": "x"}, {"r": 3}, {"target_modules": 5}):
        run_dir = shutil.copytree(trial.run_dir, tmp_path / f"{change}"[2:8], dirs_exist_ok=True)
        file = run_dir / "adapter" / "adapter_config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
        with pytest.raises(ModelError, match="adapter: cannot be loaded: ") as error:
            load_trained(load_run(run_dir), run_dir)
        assert len(str(error.value).splitlines()) == 1
