"""Merged models: what plain transformers makes of the folder against the adapter, and against PEFT's own merge."""

from __future__ import annotations

import json
import shutil
from collections import namedtuple

import peft
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.program import here
from tests.support import slow_but, train_here
from trainer.config.compose import compose
from trainer.config.saved import load_run
from trainer.device.measure import tensor_bytes
from trainer.errors import ConfigError, ModelError, StorageError
from trainer.export.merge import Wanted, merge
from trainer.export.merging import Merger, Onto, _cast, in_effect
from trainer.export.reload import load_trained
from trainer.export.rows import held_out_rows
from trainer.model.new_tokens import grow
from trainer.tracking.console import Screen

IDS = torch.arange(5, 45)[None]
NEW = "model.new_tokens=['<|call|>', moocow]"
CASES = {
    "lora": ["adapter=lora"],
    "lora of the head": ["adapter=lora", "adapter.target_modules=[lm_head, q_proj]"],
    "rslora": ["adapter=rslora"],
    "dora": ["adapter=dora"],
    "lora_plus": ["adapter=lora_plus", "optim.learning_rate=2e-3"],
    "pissa": ["adapter=pissa"],
    "ia3": ["adapter=ia3", "optim.learning_rate=0.1"],
    "loha": ["adapter=peft", "adapter.method=LOHA", "adapter.fields={r: 4}"],
    "vera": ["adapter=peft", "adapter.method=VERA", "adapter.fields={r: 8}", "optim.learning_rate=0.1"],
    "norms": ["adapter=peft", "adapter.method=LN_TUNING", "adapter.fields={target_modules: [input_layernorm]}"],
    "embeddings whole": ["adapter=lora", "adapter.modules_to_save=[embed_tokens]"],
    "new tokens": ["adapter=lora", NEW],
}
QUANTISED = {
    "lora": CASES["lora"],
    "dora": CASES["dora"],
    "pissa": CASES["pissa"],
    "loftq": ["adapter=loftq"],
    "ia3": CASES["ia3"],
    "new tokens": CASES["new tokens"],
}


def wanted(target, **changes) -> Wanted:
    values = {"onto": Onto.original, "dtype": torch.float32, "shard": 50_000, "rows": 0, "max_kl": None}
    return Wanted(target, **{**values, **changes})


def logits_of(folder) -> torch.Tensor:
    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()(IDS, use_cache=False).logits


def logits_with_adapter(run_dir) -> torch.Tensor:
    with torch.no_grad():
        return load_trained(load_run(run_dir), run_dir).model.eval()(IDS, use_cache=False).logits


def merged_by_peft(model, run_dir) -> torch.Tensor:
    """Oracle: the README's way to load a result, and PEFT's merge of the whole model at once."""
    base = AutoModelForCausalLM.from_pretrained(model.path, dtype=torch.float32)
    new = AutoTokenizer.from_pretrained(run_dir / "adapter").convert_tokens_to_ids(["<|call|>", "moocow"])
    if None not in new:
        grow(base, new)
    if base.config.tie_word_embeddings:  # PEFT merges into what the head shares with the embedding, too
        adapted = peft.PeftModel.from_pretrained(base, run_dir / "adapter").eval()
    else:
        adapted = peft.PeftModel.from_pretrained(base, run_dir / "adapter").merge_and_unload().eval()
    with torch.no_grad():
        return adapted(IDS, use_cache=False).logits


FAST = [("lora of the head", "tiny_tied"), ("embeddings whole", "tiny_tied")]


@pytest.mark.parametrize(
    ("case", "folder"), slow_but(FAST, [(case, folder) for case in CASES for folder in ("tiny", "tiny_tied")])
)
def test_on_the_original_base_it_is_the_adapter_and_peft_s_merge(case, folder, request, base_overrides, tmp_path):
    model, run = request.getfixturevalue(folder), tmp_path / "run"
    train_here([*base_overrides, *model.overrides(), *CASES[case], "train.max_steps=3"], run)
    merge(load_run(run), run, wanted(tmp_path / "merged"), Screen())
    ours = logits_of(tmp_path / "merged")
    assert (ours - logits_with_adapter(run)).abs().max() < 1e-4
    assert (ours - merged_by_peft(model, run)).abs().max() < 1e-4
    assert (ours[..., :300] - logits_of(model.path)).abs().max() > 1e-2  # the adapter does something


@pytest.mark.parametrize("folder", slow_but(["tiny_tied"], ["tiny", "tiny_tied"]))
@pytest.mark.parametrize("case", slow_but(["new tokens"], QUANTISED))
def test_on_what_quantising_made_of_the_base_it_is_the_adapter(case, folder, request, base_overrides, tmp_path):
    run, model = tmp_path / "run", request.getfixturevalue(folder)
    train_here([*base_overrides, *model.overrides(), *QUANTISED[case], "quant=nf4", "train.max_steps=3"], run)
    saved = load_run(run)
    assert in_effect(saved.config) is Onto.dequantized
    theirs, off = logits_with_adapter(run), {}
    for onto in Onto:
        receipt = merge(saved, run, wanted(tmp_path / onto.value, onto=onto, rows=3), Screen())
        assert receipt["trained_against"] == "dequantized" and receipt["base"] == onto.value
        off[onto] = (logits_of(tmp_path / onto.value) - theirs).abs().max()
    assert off[Onto.dequantized] < 1e-4 and off[Onto.original] > 1e-2
    assert receipt["kl_divergence"] < 1e-8 and receipt["top1_agreement"] == 1.0
    assert receipt["adapter_loss"] == pytest.approx(receipt["merged_loss"], abs=1e-5)


def test_a_run_that_trained_all_is_written_in_another_form(base_overrides, tiny_tied, tmp_path):
    run = tmp_path / "run"
    train_here([*base_overrides, *tiny_tied.overrides(), "adapter=none", "train.max_steps=2"], run)
    receipt = merge(load_run(run), run, wanted(tmp_path / "half", dtype=torch.float16, shard=2**30), Screen())
    whole, half = (load_file(folder / "model.safetensors") for folder in (run / "model", tmp_path / "half"))
    assert receipt["tied_embeddings"] and whole.keys() == half.keys()
    assert all(torch.equal(half[name], tensor.half()) for name, tensor in whole.items())
    with pytest.raises(ConfigError, match="this run trained every weight"):
        merge(load_run(run), run, wanted(tmp_path / "other", onto=Onto.dequantized), Screen())


@pytest.fixture(scope="module")
def run(tmp_path_factory, tiny, chats):
    """A QLoRA run."""
    folder = tmp_path_factory.mktemp("merge") / "run"
    words = [*tiny.overrides(), "data=file", f"data.path={chats}", "data.max_length=128", "data.eval_fraction=0.25"]
    words += ["quant=nf4", "precision=fp32", "optim=adamw", "optim.learning_rate=1e-2", "device=cpu", "train.epochs=2"]
    words += ["train.micro_batch_tokens=128", "train.save_every=0", "train.compare_prompts=0"]
    train_here([*words, "schedule.warmup_ratio=0"], folder)
    return folder


def test_the_command_writes_shards_receipt_tokenizer_and_template(run, tmp_path, capsys):
    target = tmp_path / "out"
    words = [f"run={run}", f"to={target}", "merge.dtype=fp16", "merge.shard_gib=0.00005"]
    assert here("merge", *words) == 0
    assert "onto the base as nf4 has it, which the adapter was trained against" in capsys.readouterr().out
    index = json.loads((target / "model.safetensors.index.json").read_text())
    files = {name: load_file(target / name) for name in set(index["weight_map"].values())}
    assert len(files) > 4 and {f"model-{k + 1:05d}-of-{len(files):05d}.safetensors" for k in range(len(files))} == set(
        files
    )
    assert all(sum(t.nbytes for t in held.values()) <= 0.00005 * 2**30 or len(held) == 1 for held in files.values())
    assert sum(t.nbytes for held in files.values() for t in held.values()) == index["metadata"]["total_size"]
    assert {t.dtype for held in files.values() for t in held.values()} == {torch.float16}
    loaded, kept = AutoTokenizer.from_pretrained(target), AutoTokenizer.from_pretrained(run / "adapter")
    assert loaded.chat_template == kept.chat_template and loaded.get_vocab() == kept.get_vocab()
    assert (target / "generation_config.json").read_text() == (run / "adapter/generation_config.json").read_text()
    assert AutoModelForCausalLM.from_pretrained(target).dtype is torch.float16
    receipt = json.loads((target / "merge_receipt.json").read_text())
    assert receipt["num_samples"] == 2 and receipt["rows"] == "held-out" and receipt["max_kl"] == 0.02
    assert receipt["peak_memory_gib"] >= 0 and receipt["kl_divergence"] < 1e-4
    assert here("merge", *words) == 5 and "is there already" in capsys.readouterr().err


def test_a_method_that_does_not_merge_is_refused_by_name(run, tiny, tmp_path):
    folder = shutil.copytree(run, tmp_path / "run")
    model = AutoModelForCausalLM.from_pretrained(tiny.path)
    settings = peft.LilyConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "v_proj"])
    peft.get_peft_model(model, settings).save_pretrained(folder / "adapter")
    with pytest.raises(ModelError, match="adapter LILY: PEFT merges no layers of this method"):
        merge(load_run(folder), folder, wanted(tmp_path / "merged"), Screen())
    assert not (tmp_path / "merged").exists() and not list(tmp_path.glob(".building*"))


def test_the_receipt_is_the_difference_written_out(run, tmp_path):
    """Oracle: both models' logits at every target, by plain transformers and torch's own divergence."""
    target = tmp_path / "out"
    receipt = merge(load_run(run), run, wanted(target, onto=Onto.original, rows=50), Screen())
    tokens, which = held_out_rows(load_run(run).config, run, AutoTokenizer.from_pretrained(run / "adapter"))
    adapter, merged = load_trained(load_run(run), run).model.eval(), AutoModelForCausalLM.from_pretrained(target).eval()
    kl, loss, largest = [], [], 0.0
    for k in range(len(tokens)):
        ids, is_target = (torch.from_numpy(array.copy()) for array in tokens.sample(k))
        with torch.no_grad():
            p, q = (
                model(ids[None].long(), use_cache=False).logits[0, :-1][is_target[1:]] for model in (adapter, merged)
            )
        kl.append(
            torch.nn.functional.kl_div(q.log_softmax(-1), p.log_softmax(-1), log_target=True, reduction="none").sum(1)
        )
        loss.append(torch.nn.functional.cross_entropy(q, ids[1:][is_target[1:]].long(), reduction="none"))
        largest = max(largest, (p - q).abs().max().item())
    assert which == "held-out" and receipt["num_targets"] == sum(map(len, kl))
    assert (
        receipt["kl_divergence"] == pytest.approx(torch.cat(kl).mean().item(), rel=1e-3)
        and receipt["kl_divergence"] > 0
    )
    assert receipt["merged_loss"] == pytest.approx(torch.cat(loss).mean().item(), rel=1e-5)
    assert receipt["largest_logit_difference"] == pytest.approx(largest, rel=1e-4)


def test_too_far_apart_leaves_nothing_and_is_code_4(run, tmp_path, capsys):
    words = [f"run={run}", f"to={tmp_path / 'out'}", "merge.base=original", "merge.max_kl=1e-9"]
    assert here("merge", *words) == 4
    assert "further than that from the adapter: " in capsys.readouterr().err and not list(tmp_path.iterdir())
    assert here("merge", *words[:-1]) == 0  # another base on purpose: no limit but a given one
    assert "trained against the base as nf4 has it" in capsys.readouterr().out


def test_a_full_disk_is_said_before_a_weight_is_read(run, tmp_path, monkeypatch):
    monkeypatch.setattr(Merger, "tensors", None)
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(1, 1, 1000))
    with pytest.raises(StorageError, match=r"the merged model needs 0\.00 GiB, and .* has 0\.00 GiB free"):
        merge(load_run(run), run, wanted(tmp_path / "out"), Screen())
    assert not list(tmp_path.iterdir())


def test_a_half_is_no_model(run, tmp_path, monkeypatch):
    seen = []

    def interrupted(merger, dtype):
        yield from list(real(merger, dtype))[:12]
        seen.extend(file.name for file in tmp_path.glob(".building-out/*"))
        raise KeyboardInterrupt

    real = Merger.tensors
    monkeypatch.setattr(Merger, "tensors", interrupted)
    with pytest.raises(KeyboardInterrupt):
        merge(load_run(run), run, wanted(tmp_path / "out"), Screen())
    assert any(name.endswith(".safetensors") for name in seen) and "config.json" not in seen
    assert not list(tmp_path.iterdir())


def test_no_more_than_a_shard_and_a_layer_is_held(run, tmp_path, monkeypatch):
    """The shard that is written and the tensors that a layer's merge makes: all that is alive when a tensor comes."""
    heights, real = [], Merger.tensors

    def watched(merger, dtype):
        before = tensor_bytes()
        for item in real(merger, dtype):
            heights.append(tensor_bytes() - before)
            yield item

    monkeypatch.setattr(Merger, "tensors", watched)
    merge(load_run(run), run, wanted(tmp_path / "out", onto=Onto.dequantized), Screen())
    layer = 300 * 64 * 4
    assert len(heights) == 21 and max(heights) <= 50_000 + 2 * layer


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["merge.base=orginal"], 2, "must be one of original, dequantized (did you mean original?)"),
        (["merge.dtype=int8"], 2, "merge.dtype=int8: must be one of bf16, fp16, fp32"),
        (["merge.rows=-1"], 2, "merge.rows=-1: must be a whole number above -1"),
        (["merge.max_kl=much"], 2, "merge.max_kl=much: must be a number, 0 or more"),
        (["device=tpu"], 2, "device=tpu: must be one of auto, cuda, cpu"),
        (["merge.bse=original"], 2, "merge.bse=original: unknown argument (did you mean merge.base?)"),
    ],
)
def test_mistakes_are_one_block_with_their_code(words, code, said, run, capsys):
    assert here("merge", f"run={run}", *words) == code
    assert said in capsys.readouterr().err


def test_a_base_that_there_is_not_and_values_that_do_not_fit(tiny, tmp_path):
    config = compose([*tiny.overrides(), "device=cpu", "precision=fp32", "quant=none", "adapter=lora"]).config
    with pytest.raises(ConfigError, match="this run's base was not quantised"):
        Merger(
            config,
            tmp_path / "adapter",
            Onto.dequantized,
            torch.device("cpu"),
            config.precision.build(torch.device("cpu")),
        )
    with pytest.raises(ModelError, match="w has values above 65504"):
        _cast(torch.tensor([7e4]), torch.float16, "w")
