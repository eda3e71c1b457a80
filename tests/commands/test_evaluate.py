"""evaluate against plain transformers, a sample at a time; intervals against the textbook's standard error."""

from __future__ import annotations

import json

import numpy as np
import peft
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.program import here
from tests.support import CHATS, chat_rows, slow_but, train_here, write_jsonl
from trainer.config.saved import load_run
from trainer.export.evaluation import by_length, summarised
from trainer.export.reload import load_trained
from trainer.export.rows import asked_rows


@pytest.fixture(scope="module")
def run(tmp_path_factory, tiny, chats):
    return trained(tmp_path_factory.mktemp("evaluate") / "run", tiny, chats, "adapter=lora")


def trained(folder, model, chats, *more):
    words = [*model.overrides(), "data=file", f"data.path={chats}", "data.max_length=128", "data.eval_fraction=0.25"]
    words += ["quant=none", "precision=fp32", "optim=adamw", "optim.learning_rate=1e-2", "device=cpu"]
    words += ["train.micro_batch_tokens=128", "train.save_every=0", "train.compare_prompts=0", "train.max_steps=4"]
    train_here([*words, "schedule.warmup_ratio=0", *more], folder)
    return folder


def plain_losses(model, rows, run):
    """Oracle: summed cross-entropy and targets of each chat, its answer and end token as training renders them."""
    tokenizer = AutoTokenizer.from_pretrained(run / "adapter")
    found = []
    for row in rows:
        before = tokenizer.apply_chat_template(row["messages"][:1], add_generation_prompt=True, return_dict=False)
        ids = tokenizer.apply_chat_template(row["messages"], return_dict=False)
        labels = torch.tensor([[-100] * len(before) + ids[len(before) :]])
        number = len(ids) - len(before)
        with torch.no_grad():
            found.append((model(input_ids=torch.tensor([ids]), labels=labels).loss.item() * number, number))
    return np.array(found).T


def test_each_source_is_the_plain_loss_of_base_and_adapter(run, tiny, tmp_path, capsys):
    sources = {"a": chat_rows(CHATS[:5]), "b": chat_rows([(q, a.upper()) for q, a in CHATS[3:]])}
    files = [
        {"name": name, "path": str(write_jsonl(tmp_path / f"{name}.jsonl", rows))} for name, rows in sources.items()
    ]
    words = ", ".join(f"{{name: {file['name']}, path: {file['path']}}}" for file in files)
    assert here("evaluate", f"run={run}", f"data.sources=[{words}]", f"to={tmp_path / 'out.json'}") == 0
    found = json.loads((tmp_path / "out.json").read_text())["sources"]
    assert set(found) == {"a", "b", "all"} and "perplexity" in capsys.readouterr().out
    base = AutoModelForCausalLM.from_pretrained(tiny.path, dtype=torch.float32).eval()
    expected = {("base", name): plain_losses(base, rows, run) for name, rows in sources.items()}
    adapted = peft.PeftModel.from_pretrained(base, run / "adapter").eval()
    expected |= {("trained", name): plain_losses(adapted, rows, run) for name, rows in sources.items()}
    for who in ("base", "trained"):
        expected[who, "all"] = np.concatenate([expected[who, name] for name in sources], axis=1)
    for (who, name), (sums, counts) in expected.items():
        one = found[name]
        assert one["num_targets"] == counts.sum() and one["num_samples"] == len(counts)
        assert one[who]["loss"] == pytest.approx(sums.sum() / counts.sum(), abs=2e-5)
        assert one[who]["perplexity"] == pytest.approx(np.exp(sums.sum() / counts.sum()), rel=1e-4)
        assert one[who]["loss_low"] <= one[who]["loss"] <= one[who]["loss_high"]
    assert found["a"]["gain"]["loss"] == pytest.approx(found["a"]["base"]["loss"] - found["a"]["trained"]["loss"])
    assert found["a"]["gain"]["loss"] > 0.1


def test_without_words_it_is_the_run_s_own_last_evaluation(run):
    assert here("evaluate", f"run={run}") == 0
    found = json.loads((run / "evaluation.json").read_text())
    summary = json.loads((run / "summary.json").read_text())
    assert found["rows"] == "held-out"
    (only,) = found["sources"].values()
    assert only["trained"]["loss"] == pytest.approx(summary["eval_loss"], abs=1e-5)


def test_an_interval_is_as_wide_as_the_ratio_s_standard_error_says():
    """Oracle: the linearised standard error of a ratio of sums (Cochran 1977, section 2.11).

    Of 1,000 resamples a tail's percentile is itself known to 0.085 of that error."""
    rng = np.random.default_rng(1)
    counts = rng.integers(5, 50, 800)
    sums = counts * rng.gamma(4.0, 0.5, 800)
    one = summarised(np.stack([sums, sums + counts]), counts)
    loss = sums.sum() / counts.sum()
    error = np.sqrt(((sums - loss * counts) ** 2).sum()) / counts.sum()
    assert one["trained"]["loss"] == pytest.approx(loss)
    assert one["trained"]["loss_low"] == pytest.approx(loss - 1.96 * error, abs=0.3 * error)
    assert one["trained"]["loss_high"] == pytest.approx(loss + 1.96 * error, abs=0.3 * error)
    gain = one["gain"]  # every target costs the base one nat more: paired, that is certain
    assert [gain[key] for key in ("loss", "loss_low", "loss_high")] == pytest.approx([1.0, 1.0, 1.0])


def test_batches_hold_every_sample_once_within_the_tokens():
    lengths = np.array([7, 3, 90, 12, 3, 40])
    rows = list(by_length(lengths, 40))
    assert sorted(np.concatenate(rows).tolist()) == [0, 1, 2, 3, 4, 5]
    assert all(len(row) == 1 or len(row) * lengths[row].max() <= 40 for row in rows) and len(rows) == 4


@pytest.mark.parametrize("adapter", slow_but([], ["pissa", "lora"]))
def test_the_base_is_the_base_again(adapter, tiny, chats, tmp_path):
    """Also where the adapter took a part of its weights."""
    folder = trained(tmp_path / "run", tiny, chats, f"adapter={adapter}")
    reloaded, ids = load_trained(load_run(folder), folder), torch.arange(5, 45)[None]
    with torch.no_grad():
        changed = reloaded.model.eval()(ids, use_cache=False).logits
        with reloaded.without_adapter():
            base = reloaded.model(ids, use_cache=False).logits
        again = reloaded.model(ids, use_cache=False).logits
    plain = AutoModelForCausalLM.from_pretrained(tiny.path, dtype=torch.float32).eval()(ids).logits
    assert (base - plain).abs().max() < 1e-3 and (changed - plain).abs().max() > 1e-1 and torch.equal(changed, again)


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["data.pth=x"], 2, "data.pth=x: no such setting (did you mean data.path?)"),
        (["data.path=/nowhere.jsonl"], 3, "data.path=/nowhere.jsonl"),
        (["data.max_length=many"], 2, "max_length"),
        (["tasks_limit=0", "tasks=x"], 2, "tasks_limit=0: must be a whole number above 0"),
    ],
)
def test_mistakes_are_one_block_with_their_code(words, code, said, run, capsys):
    assert here("evaluate", f"run={run}", *words) == code
    assert said in capsys.readouterr().err


def test_tasks_without_the_harness_name_what_to_install(run, monkeypatch, capsys):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert here("evaluate", f"run={run}", "tasks=arc_easy") == 2
    assert "tasks=arc_easy: needs lm-evaluation-harness: pip install 'trainer[tasks]'" in capsys.readouterr().err


@pytest.mark.slow
def test_a_local_task_through_the_harness(run, tmp_path):
    """Which of two answers is likelier: counted here from the model's own logits."""
    pytest.importorskip("lm_eval")
    rows = [{"q": q, "choices": [a, "No idea at all."], "gold": 0} for q, a in CHATS]
    file = write_jsonl(tmp_path / "rows.jsonl", rows)
    task = f"""task: chats
dataset_path: json
dataset_kwargs:
  data_files: {{test: {file}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{q}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: gold
target_delimiter: " "
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
"""
    (tmp_path / "chats.yaml").write_text(task)
    assert here("evaluate", f"run={run}", "tasks=chats", f"tasks_path={tmp_path}", f"to={tmp_path / 'out.json'}") == 0
    found = json.loads((tmp_path / "out.json").read_text())["tasks"]["chats"]
    reloaded = load_trained(load_run(run), run)
    tokenizer, right = reloaded.encoder.tokenizer, 0
    for row in rows:
        scores = []
        for choice in row["choices"]:
            ids, before = (tokenizer(t, add_special_tokens=False).input_ids for t in (f"{row['q']} {choice}", row["q"]))
            with torch.no_grad():
                logarithms = reloaded.model.eval()(torch.tensor([ids]), use_cache=False).logits[0].log_softmax(-1)
            scores.append(sum(logarithms[k - 1, ids[k]].item() for k in range(len(before), len(ids))))
        right += scores[0] > scores[1]
    assert found["trained"]["acc,none"] == pytest.approx(right / len(rows)) and "base" in found


def test_which_rows_are_said(run):
    config = load_run(run).config
    tokenizer = AutoTokenizer.from_pretrained(run / "adapter")
    assert [asked_rows(config, run, named, tokenizer)[1] for named in (False, True)] == ["held-out", "given"]
