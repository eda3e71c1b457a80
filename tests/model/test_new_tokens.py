"""A5: new tokens under NF4, tied and untied: their rows train and nothing else of the tables, and they come back."""

from __future__ import annotations

import pytest
import torch
from peft import PeftModel
from peft.tuners.trainable_tokens import TrainableTokensLayer
from safetensors.torch import load_file
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from tests.factories import LLAMA, gradients, largest_difference, option, padded_batch, random_tokens
from tests.support import make_tokenizer, train_here, write_jsonl
from trainer.config.saved import load_run
from trainer.data.chat.templates import add_new_tokens
from trainer.model.new_tokens import grow
from trainer.model.precision import Dtypes
from trainer.training.losses import Chunked, Full

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


def adapted_with_rows(kind: str, dtype: torch.dtype, tied: bool, apart: bool):
    """A LoRA with three trained rows that have moved, on PEFT's own forward or on ours."""
    torch.manual_seed(0)
    more = {"head_dim": 16} if kind == "gemma3_text" else {}
    config = AutoConfig.for_model(kind, **{**LLAMA, **more, "tie_word_embeddings": tied})
    base = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").to(dtype)
    ids = [303, 7, 301]
    grow(base, ids)
    adapted = option("adapter", "lora", fused=False).attach(base, ids)
    for name, parameter in adapted.named_parameters():
        if "trainable_tokens" in name:
            torch.nn.init.normal_(parameter)
    if not apart:
        for module in adapted.modules():
            if isinstance(module, TrainableTokensLayer):
                del module.__dict__["forward"]
    return adapted, base


@pytest.mark.parametrize("loss", [Full(), Chunked(5)], ids=["full", "chunked"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("kind", ["llama", "gemma3_text"])
def test_rows_beside_their_table_are_pefts_numbers(kind, tied, dtype, loss):
    batch = padded_batch(random_tokens([12, 20], vocabulary=304))
    batch.input_ids[:, 1:6] = torch.tensor([303, 7, 301, 7, 8])
    found = []
    for apart in (False, True):
        adapted, base = adapted_with_rows(kind, dtype, tied, apart)
        with Dtypes(dtype, "cpu").autocast():
            total = (loss if apart else Full()).sum(base, batch)  # of all logits, where PEFT makes them
        total.backward()
        rows = {n: p.grad for n, p in adapted.named_parameters() if "trainable_tokens" in n}
        assert len(rows) == (1 if tied else 2) and all(g.abs().max() > 0 for g in rows.values())
        found.append((total.item(), gradients(adapted)))
    (theirs, right), (ours, gradient) = found
    assert ours == pytest.approx(theirs, rel=1e-6 if dtype is torch.float32 else 1e-3)
    scale = max(g.abs().max().item() for g in right.values())
    assert largest_difference(gradient, right) <= (1e-6 if dtype is torch.float32 else 1e-2) * scale


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_no_forward_or_backward_makes_a_table(tied):
    """PEFT's way rises by two tables and their gradients; a table here is 304 rows of 64."""

    class Tables(TorchDispatchMode):
        made = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            made = isinstance(result, torch.Tensor) and result.shape == (304, 64) and not function.is_view
            self.made += made and function is not torch.ops.aten.detach.default
            return result

    counts = []
    for apart in (False, True):
        _, base = adapted_with_rows("llama", torch.float32, tied, apart)
        with Tables() as tables:
            Chunked(5).sum(base, padded_batch(random_tokens([12, 20], vocabulary=304))).backward()
        counts.append(tables.made)
    assert counts[0] > 0 and counts[1] == 0
