"""The result folder: what plain transformers makes of model/, and what lies beside the weights."""

from __future__ import annotations

import json

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from tests.support import train_here
from trainer.run import export as export_module


def test_a_whole_model_reloads_in_plain_transformers_with_equal_logits(
    base_overrides, tiny_tied, tmp_path, monkeypatch
):
    kept = {}
    real = export_module.export

    def export(adapted, base, *rest):
        kept["model"] = base
        return real(adapted, base, *rest)

    monkeypatch.setattr(export_module, "export", export)
    run = tmp_path / "run"
    words = [*base_overrides, *tiny_tied.overrides(), "adapter=none", "train.max_steps=2", "optim.learning_rate=1e-3"]
    summary = train_here(words, run)
    assert summary["adapter"] == "model" and not (run / "adapter").exists()
    loaded = AutoModelForCausalLM.from_pretrained(run / "model", dtype=torch.float32).eval()
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    start = AutoModelForCausalLM.from_pretrained(tiny_tied.path, dtype=torch.float32).eval()
    trained = kept["model"].eval()
    trained.set_attn_implementation("sdpa")
    ids = torch.arange(5, 40)[None]
    with torch.no_grad():
        ours, theirs = (model(ids, use_cache=False).logits for model in (trained, loaded))
        assert torch.equal(ours, theirs)
        assert (start(ids, use_cache=False).logits - theirs).abs().max() > 1e-2


def test_tokenizer_template_and_stop_token_lie_beside_the_adapter(base_overrides, tokenizer, tmp_path):
    run = tmp_path / "run"
    train_here([*base_overrides, "train.max_steps=1"], run)
    saved = AutoTokenizer.from_pretrained(run / "adapter")
    chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    assert saved.apply_chat_template(chat, tokenize=False) == tokenizer.apply_chat_template(chat, tokenize=False)
    generation = GenerationConfig.from_pretrained(run / "adapter")
    assert generation.eos_token_id in (tokenizer.eos_token_id, [tokenizer.eos_token_id])
    assert generation.pad_token_id == tokenizer.pad_token_id
    config = json.loads((run / "adapter/adapter_config.json").read_text())
    assert config["r"] == 16 and config["lora_alpha"] == 32
    assert not list(run.rglob("*.bin")) and not list(run.rglob(".building*"))
