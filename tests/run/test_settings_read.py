"""Every declared setting is read by something that acts on it: runs of all options under a recording proxy."""

from __future__ import annotations

import sys
from collections import defaultdict
from dataclasses import fields, is_dataclass, replace
from pathlib import Path

import pytest

from tests.program import here
from tests.support import chat_rows, write_jsonl
from trainer.commands import train as command
from trainer.config.compose import compose, plan
from trainer.config.saved import Run
from trainer.config.schema import SECTIONS, Config
from trainer.config.shelf import options, schema_of
from trainer.registry import to_plain

ROOT = Path(command.__file__).parents[1]
ONLY_LOOKS = ("config", "registry.py", "run/screen_tables.py", "data/tokens/audit.py")
"""Parts of trainer/ that check, save, compare or show settings: a read there changes nothing that a run does."""
SWEEPS = "trainer.tracking.search"
"""Settings of sweeps: read where the trials are made, which tests/commands/test_sweep.py and test_study.py have."""
HYDRAS = {"recipe", "output_dir"}
"""Read where Hydra makes the folder: hydra.run.dir is ${output_dir}, which holds ${recipe}; tests/config has that."""

Reads = dict[tuple[str, str], set[str]]


def acts(file: str) -> str | None:
    """The file below trainer/, or None where a read does not count."""
    path = Path(file)
    if not path.is_relative_to(ROOT):
        return None
    name = str(path.relative_to(ROOT))
    return None if name.startswith(ONLY_LOOKS) else name


def test_what_only_looks_is_there():
    assert [name for name in ONLY_LOOKS if not (ROOT / name).exists()] == []


def watched(section: object, reads: Reads) -> object:
    """The same options, as an instance of a subclass that notes who reads which field."""
    cls = type(section)
    names = {field.name for field in fields(cls)}

    class Watched(cls):
        def __getattribute__(self, name):
            if name in names and (file := acts(sys._getframe(1).f_code.co_filename)) is not None:
                reads[cls.__qualname__, name].add(file)
            return super().__getattribute__(name)

    Watched.__name__, Watched.__qualname__, Watched.__module__ = cls.__name__, cls.__qualname__, cls.__module__
    copy = object.__new__(Watched)
    copy.__dict__.update(section.__dict__)
    return copy


def watched_run(run: Run, reads: Reads) -> Run:
    sections = {f.name: getattr(run.config, f.name) for f in fields(Config)}
    parts = {name: watched(value, reads) for name, value in sections.items() if is_dataclass(value)}
    return replace(run, config=watched(replace(run.config, **parts), reads))


def test_the_proxy_sees_reads_that_act_and_no_others():
    reads: Reads = defaultdict(set)
    run = watched_run(compose(["schedule=wsd"]), reads)
    run.config.seed, run.config.optim.eps  # noqa: B018 (this file is no part of the trainer)
    to_plain(run.config)
    assert not reads
    run.config.schedule.factor(1, 10)
    files = {"training/schedules.py"}
    names = ("warmup_steps", "warmup_ratio", "decay_ratio")
    assert dict(reads) == {("WarmupStableDecay", name): files for name in names}


@pytest.fixture(scope="module")
def rows(tmp_path_factory) -> Path:
    return write_jsonl(tmp_path_factory.mktemp("rows") / "rows.jsonl", chat_rows() * 2)


def declared() -> set[tuple[str, str]]:
    """(dataclass, field) of every option and of the root."""
    classes = {Config} | {schema_of(group, name) for group in (*SECTIONS, "train") for name in options(group)}
    classes = {cls for cls in classes if cls.__module__ != SWEEPS}
    sections = {*SECTIONS, "train"}
    return {(c.__qualname__, f.name) for c in classes for f in fields(c) if not (c is Config and f.name in sections)}


def jobs(model: list[str], rows: Path) -> list[list[str]]:
    """Runs of a step or two that together pick every option a CPU can run, and settings that depend on others."""
    base = "device=cpu data.max_length=128 train.micro_batch_tokens=128 train.max_steps=2 train.save_every=0 "
    base += f"train.report=false data.eval_fraction=0.25 data.path={rows}"
    mixture = f"data.sources=[{{path: '{rows}', name: a, weight: 2}}, {{path: '{rows}', name: b}}]"
    local, random = [*base.split(), *model], [*base.split(), "model.weights=random"]
    few_layers = "model.architecture.num_hidden_layers=2"
    return [
        [*local, *NF4_ROW.split()],
        [*local, *FP4_ROW.split(), mixture],
        [*random, few_layers, *INT8_ROW.split()],
        [*random, few_layers, *PLAIN_ROW.split()],
        *([*random, few_layers, "data.eval_fraction=0", *row.split()] for row in TECHNIQUES),
    ]


NF4_ROW = """data=file quant=nf4 optim=adamw schedule=linear precision=fp32 checkpointing=every_k track=wandb
train.compare_prompts=1 train.samples=[Hi] data.over_length=truncate offload=base_disk"""
FP4_ROW = """quant=fp4 optim=adamw_8bit schedule=constant precision=bf16 packing=none checkpointing=selective
track=tensorboard data.path=null model.quantized_cache=true"""
INT8_ROW = """quant=int8 optim=paged_adamw_32bit schedule=wsd precision=auto loss=full checkpointing=auto
memory.budget_gib=4 memory.probe=always data.on_bad_row=skip offload=activations
data.streaming=true data.eval_fraction=0"""
PLAIN_ROW = """quant=none adapter=none optim=paged_adamw_8bit schedule=cosine precision=fp32 loss=chunked
checkpointing=none kernels=compiled kernels.backend=aot_eager train.epochs=1 train.max_steps=null
data.chat_template=plain"""
TECHNIQUES = [
    "adapter=dora optim=adafactor checkpointing=blocks checkpointing.none=[0]",
    "adapter=rslora optim=lion_8bit model.rope_scaling=linear model.rope_factor=2",
    "adapter=lora_plus packing=auto",
    "adapter=loftq quant=nf4 optim=adamw_schedule_free schedule=constant",
    "adapter=pissa",
    "adapter=none quant=none optim=galore_adamw optim.rank=8",
    "adapter=none quant=none optim=galore_adamw_8bit optim.rank=8",
    "adapter=none quant=none optim=muon",
    "adapter=ia3",
    "adapter=peft quant=none",
]


def test_every_declared_setting_is_read(tiny, rows, tmp_path, monkeypatch, capsys):
    reads: Reads = defaultdict(set)

    def watching(words, multirun=False):
        planned = plan(words, multirun)
        return replace(planned, run=watched_run(planned.run, reads))

    monkeypatch.setattr(command, "plan", watching)
    for number, words in enumerate(jobs(tiny.overrides(), rows)):
        assert here(*words, f"output_dir={tmp_path / str(number)}") == 0, capsys.readouterr().err
    first = jobs(tiny.overrides(), rows)[0]
    assert here(*first, f"output_dir={tmp_path / '0'}") == 0  # a folder that holds a run
    assert here(*first, "data.path=none.jsonl", f"output_dir={tmp_path / 'debug'}") == 3
    unread = {pair for pair in declared() - set(reads) if pair not in {("Config", name) for name in HYDRAS}}
    assert sorted(f"{cls}.{name}" for cls, name in unread) == []
