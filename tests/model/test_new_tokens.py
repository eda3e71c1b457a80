"""A5: new tokens under NF4, tied and untied: their rows train and nothing else of the tables, and they come back."""

from __future__ import annotations

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.support import make_tokenizer, train_here, write_jsonl
from trainer.config.saved import load_run
from trainer.data.chat.templates import add_new_tokens
from trainer.model.new_tokens import grow

NEW = ["<|call|>", "moocow", "<|done|>"]


@pytest.fixture
def rows(tmp_path):
    texts = [("say moocow", "moocow moocow"), ("use <|call|>", "<|call|>moo<|done|>"), ("hi", "moocow hi")]
    rows = [{"messages": [{"role": "user", "content": q}, {"role": "assistant", "content": a}]} for q, a in texts]
    return write_jsonl(tmp_path / "rows.jsonl", rows)


def test_tokens_are_added_once_and_the_templates_are_control_tokens():
    tokenizer = make_tokenizer()
    before = len(tokenizer)
    add_new_tokens(tokenizer, [*NEW, "<|eot|>"], "{{ '<|call|>' }}")
    assert len(tokenizer) == before + 3
    assert [tokenizer.added_tokens_decoder[before + i].special for i in range(3)] == [True, False, False]
    assert tokenizer("a moocow!", add_special_tokens=False).input_ids.count(before + 1) == 1


@pytest.mark.parametrize("folder", ["tiny", "tiny_tied"])
def test_new_rows_begin_as_the_mean_and_old_ones_stay(folder, request):
    model = AutoModelForCausalLM.from_pretrained(request.getfixturevalue(folder).path)
    tables = [model.get_input_embeddings().weight.clone(), model.get_output_embeddings().weight.clone()]
    grow(model, [300, 302])
    for old, new in zip(tables, (model.get_input_embeddings(), model.get_output_embeddings()), strict=True):
        assert new.weight.shape[0] == 303 and torch.equal(new.weight[: len(old)], old)
        assert torch.allclose(new.weight[len(old) :], old.mean(0).expand(303 - len(old), -1))
    grow(model, [5])
    assert model.get_input_embeddings().weight.shape[0] == 303


@pytest.mark.parametrize("folder", ["tiny", "tiny_tied"])
@pytest.mark.parametrize("loss", ["chunked", "full"])
def test_trained_saved_and_reloaded_on_the_plain_base(folder, loss, request, base_overrides, rows, tmp_path):
    model = request.getfixturevalue(folder)
    words = [word for word in base_overrides if not word.startswith(("model.path", "data.path", "quant"))]
    names = ", ".join(f"'{token}'" for token in NEW)
    words += [*model.overrides(), f"data.path={rows}", "quant=nf4", f"loss={loss}", f"model.new_tokens=[{names}]"]
    run = tmp_path / "run"
    summary = train_here([*words, "train.max_steps=4"], run)
    tied = folder == "tiny_tied"
    saved = load_file(run / "adapter" / "adapter_model.safetensors")
    trained = {name: tensor for name, tensor in saved.items() if "lora" not in name}
    assert len(trained) == (1 if tied else 2) and {tuple(t.shape) for t in trained.values()} == {(3, 64)}

    base = AutoModelForCausalLM.from_pretrained(model.path)
    tokenizer = AutoTokenizer.from_pretrained(run / "adapter")
    new_ids = tokenizer.convert_tokens_to_ids(NEW)
    grow(base, new_ids)
    for name, tensor in trained.items():
        table = base.get_input_embeddings() if "embed" in name else base.get_output_embeddings()
        assert (tensor - table.weight[new_ids]).abs().sum(1).min() > 0  # every new row has moved

    adapted = PeftModel.from_pretrained(base, run / "adapter")
    ids = torch.tensor([[5, *new_ids, 7]])
    with torch.no_grad():
        loaded = adapted(ids).logits
        merged_table = adapted.get_base_model().get_input_embeddings()(torch.tensor(new_ids))
    expected = next(t for name, t in trained.items() if "embed" in name)
    assert torch.allclose(merged_table, expected)
    assert loaded.shape[-1] == max(new_ids) + 1

    from trainer.export.reload import load_trained

    answer = load_trained(load_run(run), run)
    assert answer.model.get_input_embeddings().weight.shape[0] == max(new_ids) + 1
    assert answer.answer([{"role": "user", "content": "say moocow"}], 3) is not None
    assert summary["status"] == "completed"
    assert sum(t.numel() for t in saved.values()) == summary["trainable_parameters"]


def test_a_resumed_run_with_new_tokens_is_bit_equal(tiny, base_overrides, rows, tmp_path):
    words = [word for word in base_overrides if not word.startswith("data.path")]
    words += [f"data.path={rows}", "quant=nf4", "model.new_tokens=['moocow']", "train.save_every=2"]
    train_here([*words, "train.max_steps=4"], tmp_path / "whole")
    train_here([*words, "train.max_steps=2"], tmp_path / "parts")
    train_here([*words, "train.max_steps=4", "train.resume=force"], tmp_path / "parts")
    whole, parts = (load_file(tmp_path / n / "adapter" / "adapter_model.safetensors") for n in ("whole", "parts"))
    assert all(torch.equal(whole[name], parts[name]) for name in whole)
