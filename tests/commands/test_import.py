"""Configurations of other trainers become recipes: what maps, what differs, what has no counterpart, nothing silent.

The files are of our own making, with the keys of those projects.
"""

import re
from pathlib import Path

import pytest
import yaml

from tests.program import here
from trainer.config.compose import compose
from trainer.config.own import OWN
from trainer.config.peers import DIFFERS, IDLE, MAPPED, NONE, PEERS, TABLES, import_file, table
from trainer.config.schema import SECTIONS, Config
from trainer.config.shelf import options, schema_of
from trainer.config.types import fields_of
from trainer.registry import to_plain

AXOLOTL = """
base_model: NousResearch/Meta-Llama-3-8B
load_in_4bit: true
adapter: qlora
lora_r: 8
lora_alpha: 24
lora_target_linear: true
datasets:
  - {path: a.jsonl, type: alpaca}
val_set_size: 0.1
sequence_len: 512
sample_packing: true
micro_batch_size: 3
gradient_accumulation_steps: 5
num_epochs: 2
optimizer: adamw_bnb_8bit
learning_rate: 3e-5
lr_scheduler: cosine
adam_beta2: 0.95
warmup_steps: 7
gradient_checkpointing: true
evals_per_epoch: 4
wandb_project:
made_up: 1
"""
LLAMA_FACTORY = """
model_name_or_path: meta-llama/Meta-Llama-3-8B-Instruct
stage: sft
finetuning_type: lora
quantization_bit: 4
double_quantization: false
lora_rank: 4
lora_target: q_proj,v_proj
dataset: identity
template: llama3
cutoff_len: 256
per_device_train_batch_size: 2
num_train_epochs: 3.0
warmup_ratio: 0.1
max_steps: -1
val_size: 100
"""
TORCHTUNE = """
model: {_component_: torchtune.models.llama3.qlora_llama3_8b, lora_rank: 8, lora_alpha: 16}
tokenizer: {_component_: torchtune.models.llama3.llama3_tokenizer, path: x, max_seq_len: 128}
checkpointer: {_component_: torchtune.training.FullModelHFCheckpointer, checkpoint_dir: '${base}/Meta-Llama-3-8B'}
base: /models
dataset: {_component_: torchtune.datasets.alpaca_dataset, packed: true}
optimizer: {_component_: torch.optim.AdamW, lr: 3e-4}
lr_scheduler: {_component_: torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup, num_warmup_steps: 9}
loss: {_component_: torchtune.modules.loss.CEWithChunkedOutputLoss}
batch_size: 2
epochs: 1
device: cpu
dtype: bf16
"""
TRL = """
model_name_or_path: HuggingFaceTB/SmolLM2-135M-Instruct
dataset_name: owner/rows
dataset_train_split: test
use_peft: true
learning_rate: 0.0001
lr_scheduler_type: constant_with_warmup
report_to: none
eval_strategy: no
assistant_only_loss: true
"""
FILES = {"axolotl": AXOLOTL, "llama_factory": LLAMA_FACTORY, "torchtune": TORCHTUNE, "trl": TRL}
EXPECTED = {
    "axolotl": {
        **{"model": "llama3_8b", "quant": "nf4", "adapter": "lora", "optim": "adamw_8bit", "packing": "best_fit"},
        **{"schedule": "cosine", "checkpointing": "full", "data": "file"},
        **{"model.path": "NousResearch/Meta-Llama-3-8B", "adapter.r": 8, "adapter.alpha": 24, "data.path": "a.jsonl"},
        **{"adapter.target_modules": "all-linear", "data.format": "alpaca", "data.eval_fraction": 0.1},
        **{"data.max_length": 512, "train.micro_batch_tokens": 1536, "train.accumulation_steps": 5, "train.epochs": 2},
        **{"optim.learning_rate": 3e-5, "optim.betas": [0.9, 0.95], "schedule.warmup_steps": 7},
        **{"schedule.final_ratio": 0.0},
    },
    "llama_factory": {
        **{"model": "llama3_8b", "quant": "nf4", "adapter": "lora", "optim": "adamw", "packing": "none"},
        **{"schedule": "linear", "checkpointing": "full", "data": "quickstart", "quant.double_quant": False},
        **{"adapter.r": 4, "adapter.alpha": 8, "adapter.target_modules": ["q_proj", "v_proj"], "train.epochs": 3},
        **{"data.max_length": 256, "train.micro_batch_size": 2, "schedule.warmup_ratio": 0.1, "train.max_steps": None},
        **{"optim.learning_rate": 5e-5, "data.eval_fraction": 0.0},
    },
    "torchtune": {
        **{"model": "llama3_8b", "quant": "nf4", "adapter": "lora", "optim": "adamw", "packing": "best_fit"},
        **{"schedule": "cosine", "loss": "chunked", "precision": "bf16", "model.path": "/models/Meta-Llama-3-8B"},
        **{"data.path": "tatsu-lab/alpaca", "data.max_length": 128, "train.micro_batch_tokens": 256, "device": "cpu"},
        **{"optim.learning_rate": 3e-4, "schedule.warmup_steps": 9, "train.max_grad_norm": None},
    },
    "trl": {
        **{"model": "smollm2_135m", "quant": "none", "adapter": "lora", "optim": "adamw", "packing": "none"},
        **{"schedule": "constant", "track": "local", "data.path": "owner/rows", "data.split": "test", "seed": 42},
        **{"adapter.dropout": 0.05, "data.max_length": 1024, "train.micro_batch_size": 8, "data.train_on": "assistant"},
    },
}


@pytest.fixture
def place(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(place: Path, text: str, name: str = "theirs.yml") -> Path:
    (place / name).write_text(text)
    return place / name


@pytest.mark.parametrize("peer", PEERS)
def test_a_file_becomes_the_recipe_that_means_the_same(peer, place, capsys):
    """The oracle is the configuration that the recipe composes to, against values worked out by hand."""
    write(place, FILES[peer])
    assert here("import", "theirs.yml") == 0
    out = capsys.readouterr().out
    run = compose(["recipe=theirs"])
    for key, value in EXPECTED[peer].items():
        section, _, name = key.partition(".")
        if key in SECTIONS:
            assert run.choices[key] == value, key
        else:
            holder = getattr(run.config, section)
            assert to_plain(getattr(holder, name) if name else holder) == value, key
    assert f"a configuration of {table(peer)['name']}" in out and "written: recipes/theirs.yaml" in out


@pytest.mark.parametrize("peer", PEERS)
def test_nothing_is_dropped_in_silence(peer, place):
    """Each key with a value has a row, and each row a verdict with a reason where nothing of ours came of it."""
    found = import_file(write(place, FILES[peer]))
    shown = {row.key for row in found.rows} | set(found.empty)
    tree = yaml.safe_load(FILES[peer])
    for key, value in tree.items():
        inner = {f"{key}.{name}" for name in value} if isinstance(value, dict) else set()
        assert key in shown or inner <= shown, key
    assert all(row.verdict in (MAPPED, DIFFERS, NONE, IDLE) for row in found.rows)
    assert all(row.ours or row.says for row in found.rows)
    assert all(row.ours for row in found.rows if row.verdict == MAPPED)


def test_what_has_no_counterpart_says_why(place):
    rows = {row.key: row for row in import_file(write(place, AXOLOTL)).rows}
    assert rows["made_up"].verdict == NONE and rows["made_up"].says == "is not known"
    assert "train.eval_every" in rows["evals_per_epoch"].says
    rows = {row.key: row for row in import_file(write(place, LLAMA_FACTORY)).rows}
    assert rows["val_size"].verdict == NONE and "number of rows" in rows["val_size"].says
    found = import_file(write(place, AXOLOTL.replace("adamw_bnb_8bit", "adafactor")))
    rows = {row.key: row for row in found.rows}
    assert rows["adam_beta2"].verdict == NONE and rows["optimizer"].ours == {"optim": "adafactor"}


def test_several_data_sets_and_their_own_columns(place):
    text = AXOLOTL.replace(
        "  - {path: a.jsonl, type: alpaca}",
        "  - {path: json, data_files: a.jsonl, type: chat_template, field_messages: turns, roles: {user: [human]}}\n"
        "  - {path: owner/b, type: completion, split: test}",
    )
    (row,) = (row for row in import_file(write(place, text)).rows if row.key == "datasets")
    assert row.ours["data.sources"] == [
        {"path": "a.jsonl", "format": "messages", "columns": {"messages": "turns"}},
        {"path": "owner/b", "split": "test", "format": "text"},
    ]
    assert row.verdict == DIFFERS and "roles=" in row.says


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (AXOLOTL + "rl: dpo\n", "rl: dpo: preference"),
        (LLAMA_FACTORY.replace("stage: sft", "stage: dpo"), ":3: stage: dpo: only supervised"),
        (LLAMA_FACTORY.replace("finetuning_type: lora", "finetuning_type: freeze"), "finetuning_type: freeze"),
        (TRL + "reward_funcs: [x]\n", "reward_funcs"),
    ],
)
def test_another_kind_of_training_is_refused(text, line, place, capsys):
    write(place, text)
    assert here("import", "theirs.yml") == 2
    assert line in capsys.readouterr().err and not (place / "recipes").exists()


HOSTILE = {
    "bomb": "a: &a [1,1,1,1,1,1,1,1,1]\n"
    + "".join(f"{n}: &{n} [{','.join(['*' + p] * 9)}]\n" for p, n in zip("abcdefg", "bcdefgh", strict=True)),
    "tag": "base_model: !!python/object/apply:os.system ['touch pwned']\nsequence_len: 4\n",
    "twice": "base_model: a\nbase_model: b\nsequence_len: 4\n",
    "itself": "base_model: &x [*x]\nsequence_len: 4\n",
    "no mapping": "- base_model\n",
    "broken": "base_model: [1\n",
    "binary": "\x00\x01",
    "nothing of theirs": "colour: red\n",
    "empty": "",
    "long": "x: " + "a" * 70_000,
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_files_are_one_block_and_write_nothing(kind, place, capsys):
    write(place, HOSTILE[kind])
    assert here("import", "theirs.yml") == 2
    err = capsys.readouterr().err
    assert err.startswith("trainer: configuration: theirs.yml") and "Traceback" not in err and len(err) < 2000
    assert sorted(path.name for path in place.iterdir()) == ["theirs.yml"]


def test_secrets_calls_and_foreign_code_are_not_taken_over(place, capsys):
    token = "hf_" + "a" * 30
    write(
        place,
        AXOLOTL + f"hub_token: {token}\nlora_model_dir: https://me:{token}@host/x\ntrust_remote_code: true\n"
        "chat_template_jinja: '${oc.env:HOME}'\nrevision_of_model: '${oc.env:HOME}'\n",
    )
    assert here("import", "theirs.yml") == 0
    out = capsys.readouterr().out
    written = (place / "recipes/theirs.yaml").read_text()
    assert token not in out + written and "holds a secret" in out
    assert "trust_remote_code" not in written and "oc.env" not in written
    assert not compose(["recipe=theirs"]).config.model.trust_remote_code


def test_where_it_is_written(place, capsys):
    write(place, TRL)
    assert here("import", "theirs.yml", "to=elsewhere/mine.yaml") == 0
    assert (place / "elsewhere/mine.yaml").is_file() and not (place / "recipes").exists()
    before = (place / "elsewhere/mine.yaml").read_bytes()
    assert here("import", "theirs.yml", "to=elsewhere/mine.yaml") == 5
    assert (place / "elsewhere/mine.yaml").read_bytes() == before
    assert here("import", "theirs.yml", "to=mine.txt") == 2
    assert here("import", "theirs.yml", "from=axolotle") == 2
    assert "did you mean axolotl?" in capsys.readouterr().err
    assert here("import") == 2 and here("import", "none.yml") == 2
    assert OWN.folders == []


def targets(entry: dict) -> dict[str, object]:
    """Every setting of ours that an entry may give, with the value where the table says it."""
    found = {entry["to"]: None} if "to" in entry else {}
    for ours in entry.get("values", {}).values():
        found |= ours if isinstance(ours, dict) else {}
    found |= entry.get("also", {})
    found |= {key: None for key in [entry.get("double"), re.sub(r"\.\d$", "", entry.get("pair", ""))] if key}
    return found


def is_ours(key: str, value: object) -> bool:
    """Whether an option has this name, or some option of the section this field."""
    section, _, name = key.partition(".")
    if key in SECTIONS:
        return value is None or value in options(key)
    if not name:
        return section in fields_of(Config)
    return any(name in fields_of(schema_of(section, option)) for option in options(section))


@pytest.mark.parametrize("peer", PEERS)
def test_the_tables_name_what_there_is(peer):
    """A setting that is renamed here fails this, and not a user's import."""
    said = table(peer)
    assert [key for key, value in said["start"].items() if not is_ours(key, value)] == []
    allowed = {"to", "values", "also", "double", "differs", "none", "idle", "stop", "whole", "positive", "share"}
    allowed |= {"names", "pair", "batch", "rows"}
    for key, entry in said["keys"].items():
        assert set(entry) <= allowed and entry, key
        assert [ours for ours, value in targets(entry).items() if not is_ours(ours, value)] == [], key
        names = [ours for ours in entry.get("values", {}).values() if isinstance(ours, str)]
        if entry.get("to") in SECTIONS:
            assert set(names) <= set(options(entry["to"])), key
        for pattern in entry.get("values", {}):
            re.compile(pattern)
    bases = yaml.safe_load((TABLES / "bases.yaml").read_text())
    assert set(bases.values()) <= set(options("model"))


def test_the_oracle_of_the_tables_sees_what_is_not_ours():
    assert not is_ours("optim.learning_rte", None) and not is_ours("optim", "adamw2") and not is_ours("epochs", 1)
