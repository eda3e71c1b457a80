"""From words to typed dataclasses: every option, every recipe, sweeps."""

import types
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Union, get_args, get_origin

import pytest
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper

from trainer.config.check import parse
from trainer.config.compose import compose, configs, expand, plan, quoted
from trainer.config.rules import broken_rules
from trainer.config.schema import SECTIONS, Config
from trainer.config.shelf import default_choices, option_values, options, recipes, schema_of
from trainer.config.types import fields_of
from trainer.device.find import Device
from trainer.errors import ConfigError
from trainer.registry import to_plain
from trainer.training.optimizers.adam import AdamW
from trainer.training.train_settings import Train


def untyped(value: Any, kind: Any, where: str) -> list[str]:
    """Values whose Python type is not the declared one: the oracle for what composing must give."""
    if kind is Any:
        return []
    if get_origin(kind) in (Union, types.UnionType):
        return min((untyped(value, part, where) for part in get_args(kind)), key=len)
    if get_origin(kind) is list:
        (item,) = get_args(kind)
        if type(value) is not list:
            return [where]
        return [name for i, v in enumerate(value) for name in untyped(v, item, f"{where}[{i}]")]
    if get_origin(kind) is dict:
        return [] if type(value) is dict else [where]
    if is_dataclass(kind):
        if not isinstance(value, kind):
            return [where]
        return [n for name, f in fields_of(type(value)).items() for n in untyped(getattr(value, name), f.type, name)]
    if issubclass(kind, Enum):
        return [] if isinstance(value, kind) else [where]
    return [] if type(value) is kind else [where]


def test_the_oracle_sees_a_wrong_type():
    assert untyped("1", int, "a") == ["a"] and untyped(1, float, "a") == ["a"] and untyped(True, int, "a") == ["a"]
    assert untyped(None, int | None, "a") == [] and untyped(["x", 1], list[str], "a") == ["a[1]"]
    assert untyped("cpu", Device, "a") == ["a"]


KERNELS = [name for name in options("kernels") if name != "torch"]
ROWS = 4 * max(len(options(group)) for group in SECTIONS) + len(KERNELS)
WHOLE = {"adapter": "none", "quant": "none"}
ASKED = {"adamw_schedule_free": {"schedule": "constant"}, "galore_adamw": WHOLE, "galore_adamw_8bit": WHOLE}
"""What an optimizer asks of other groups."""


def picks(row: int) -> dict[str, str]:
    """The n-th option of each group, with adapter=none where and only where quant=none allows it, and an offload that
    the others allow. The last rows have the kernels, which exclude the most."""
    chosen = {group: options(group)[row % len(options(group))] for group in (*SECTIONS, "train")}
    chosen |= ASKED.get(chosen["optim"], {})
    adapters = [name for name in options("adapter") if name != "none"]
    chosen["adapter"] = "none" if chosen["quant"] == "none" else adapters[(row + row // len(adapters)) % len(adapters)]
    recomputes = chosen["checkpointing"] not in ("none", "attention")
    streamed = {"fp4": "base_cpu", "nf4": "base_disk"}.get(chosen["quant"])
    chosen["offload"] = streamed or ("activations" if recomputes and chosen["quant"] == "none" else "none")
    if chosen["adapter"] == "dora":  # reads the base's own weights
        chosen |= {"quant": "nf4", "offload": "none"}
    chosen["kernels"] = "torch"
    if row >= ROWS - len(KERNELS):
        chosen |= {"kernels": KERNELS[row - ROWS], "quant": "nf4", "adapter": "lora"}
        chosen |= {"offload": "none", "checkpointing": "full", "optim": "adamw"}
    return chosen


def test_the_rows_hold_every_option():
    for group in (*SECTIONS, "train"):
        assert {picks(row)[group] for row in range(ROWS)} == set(options(group)), group


@pytest.mark.parametrize("row", range(ROWS))
def test_every_option_composes_and_is_typed(row):
    """Into its own dataclass, each value of its YAML with its declared type."""
    words = [f"{group}={name}" for group, name in picks(row).items()]
    needed = {"data.path": "rows.jsonl", "data.max_length": "64"}
    if picks(row)["model"] == "other":
        needed["model.path"] = "a/b"
    if picks(row)["kernels"] != "torch":
        needed["adapter.fused"] = "false"
    run = compose([*words, *(f"{key}={value}" for key, value in needed.items())])
    assert untyped(run.config, Config, "config") == []
    assert run.choices == picks(row)
    for group, name in picks(row).items():
        section = getattr(run.config, group)
        assert type(section) is schema_of(group, name)
        for key, value in option_values(group, name).items():
            if f"{group}.{key}" not in needed and "${" not in str(value):
                typed = to_plain(getattr(section, key))
                assert typed == value or typed == float(value), f"{group}={name}: {key}"


def holds(whole, part) -> bool:
    """Whether a tree has all that a recipe says, at any depth."""
    if isinstance(part, dict):
        return all(key in whole and holds(whole[key], value) for key, value in part.items())
    return whole == part


def test_the_oracle_sees_a_lost_value():
    assert holds({"a": {"b": 1, "c": 2}, "d": 3}, {"a": {"b": 1}})
    assert not holds({"a": {"b": 1}}, {"a": {"b": 2}}) and not holds({"a": {}}, {"a": {"b": 1}})


@pytest.mark.parametrize("name", sorted(recipes()))
def test_every_packaged_recipe_composes_and_is_typed(name, tmp_path, monkeypatch):
    """Also from another folder, without a word more."""
    monkeypatch.chdir(tmp_path)
    run = compose([f"recipe={name}"])
    assert untyped(run.config, Config, "config") == []
    assert run.config.recipe == name and run.choices["recipe"] == name
    plain = to_plain(run.config)
    for section, values in recipes()[name].tree().items():
        if section not in ("defaults", "hydra"):
            assert holds(plain[section], values), section


def test_the_8b_recipe_is_what_the_contract_says():
    config = compose(["recipe=qlora_llama3_8b"]).config
    plain = to_plain(config)
    assert config.device is Device.cuda
    assert plain["quant"] == {"double_quant": True} and type(config.quant).__name__ == "NF4"
    assert (plain["adapter"]["r"], plain["adapter"]["alpha"], plain["adapter"]["target_modules"]) == (
        16,
        32,
        "all-linear",
    )
    assert type(config.optim).__name__ == "PagedAdamW8bit" and type(config.checkpointing).__name__ != "NoCheckpointing"
    assert (plain["train"]["micro_batch_tokens"], plain["data"]["max_length"]) == (4096, 4096)
    assert config.packing.packed and type(config.track).__name__ == "WandB"
    architecture = plain["model"]["architecture"]
    assert (architecture["num_hidden_layers"], architecture["hidden_size"], architecture["vocab_size"]) == (
        32,
        4096,
        128256,
    )


def test_the_overrides_in_the_8b_recipes_head_comment_compose():
    lines = "\n".join(recipes()["qlora_llama3_8b"].comment).replace("\\\n", " ").splitlines()
    commands = [line.split("python -m trainer ")[1] for line in lines if "python -m trainer " in line]
    configs = [compose(command.replace("'", "").split()).config for command in commands]
    variant = next(c for c in configs if c.adapter.target_modules == ["q_proj", "v_proj"])
    assert (variant.optim.learning_rate, variant.train.accumulation_steps) == (1e-4, 16)
    small = next(c for c in configs if c.device is Device.cpu)
    assert small.model.architecture["num_hidden_layers"] == 2 and small.model.weights.value == "random"


def test_values_come_from_the_command_line_then_the_recipe_then_the_option(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes/mine.yaml").write_text(
        "defaults:\n  - override /optim: adamw\noptim:\n  eps: 1e-7\n  weight_decay: 0.2\nseed: 0\n"
    )
    run = compose(["recipe=mine", "optim.weight_decay=0.3"])
    assert run.config.optim == AdamW(learning_rate=2e-4, weight_decay=0.3, betas=[0.9, 0.999], eps=1e-7)
    assert run.config.output_dir.startswith("outputs/mine/")
    assert compose(["recipe=mine", "optim=paged_adamw_8bit"]).config.optim.eps == 1e-7
    assert run.overrides == ["recipe=mine", "optim.weight_decay=0.3"]


def test_the_users_recipe_wins_over_the_packaged_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes/quickstart.yaml").write_text("train: {epochs: 77}\n")
    assert compose(["recipe=quickstart"]).config.train.epochs == 77
    (tmp_path / "recipes/again.yaml").write_text("defaults: [quickstart]\nseed: 3\n")
    config = compose(["recipe=again"]).config
    assert (config.recipe, config.train.epochs, config.seed) == ("again", 77, 3)
    (tmp_path / "recipes/quickstart.yaml").unlink()
    assert compose(["recipe=quickstart"]).config.train.epochs != 77


@pytest.mark.parametrize("seed", [0, 1, 4294967295])
def test_every_seed_is_a_seed(seed):
    assert compose([f"seed={seed}"]).config.seed == seed


def test_without_words_the_defaults():
    run = compose([])
    assert run.config.recipe == "custom" and run.overrides == []
    assert run.choices == default_choices()
    assert compose(["recipe=null", "sweep=null"]).config.model == run.config.model


def test_an_interpolation_takes_the_others_value():
    config = compose(["data.eval_path=${data.path}", "schedule.warmup_steps=${train.accumulation_steps}"]).config
    assert config.data.eval_path == config.data.path
    assert config.schedule.warmup_steps == config.train.accumulation_steps


@pytest.mark.parametrize(
    ("word", "words"),
    [
        ("seed=${nothing}", "nothing"),
        ("train.epochs=${data.path}", "train.epochs"),
        ("hydra.foo=1", "hydra.foo"),
        ("hydra.mode=MULTI", "expected one of [RUN, MULTIRUN]"),
        ("hydra/launcher=nothing", "hydra/launcher/nothing"),
    ],
)
def test_what_only_composing_shows_is_the_users_mistake_too(word, words):
    with pytest.raises(ConfigError) as refused:
        compose([word])
    assert words in str(refused.value) and "\n" not in str(refused.value)


def test_a_mapping_of_the_users_own_can_be_written_in_each_way():
    expected = {"prompt": "question", "output": "answer"}
    for words in (
        ["data.columns={prompt:question,output:answer}"],
        ["data.columns.prompt=question", "data.columns.output=answer"],
        ["+data.columns={prompt:question}", "++data.columns.output=answer"],
    ):
        assert compose(words).config.data.columns == expected
    assert compose(["model.architecture={hidden_size: 8}"]).config.model.architecture["hidden_size"] == 8
    assert compose(["+model.architecture.mlp_bias=true"]).config.model.architecture["mlp_bias"] is True


# Sweeps


def hydras(words: list[str]) -> list[list[str]]:
    """The trials as Hydra's own sweeper counts them."""
    (batch,) = BasicSweeper.split_arguments(parse(words), None)
    return batch


@pytest.mark.parametrize(
    "words",
    [
        ["seed=1,2,3"],
        ["seed=1,2", "device=cpu", "optim=adamw,adamw_8bit"],
        ["optim.learning_rate=1e-4,2e-4", "optim.learning_rate=3e-4"],
        ["seed=range(0,6,2)", "adapter.r=choice(8,16)"],
        ["adapter.target_modules=[q_proj],[q_proj,v_proj]", "data.path='a b','c,d'"],
        ["+model.architecture.mlp_bias=true,false"],
    ],
    ids=" ".join,
)
def test_trials_are_counted_as_hydra_counts_them(words):
    ours, theirs = expand(parse(words)), hydras(words)
    assert len(ours) == len(theirs)
    for mine, hers in zip(ours, theirs, strict=True):
        assert [(o.key_or_group, o.value()) for o in parse(mine)] == [(o.key_or_group, o.value()) for o in parse(hers)]


def test_a_glob_is_the_options_of_a_group():
    assert expand(parse(["optim=glob(*adamw_8bit)", "seed=1"])) == [
        ["optim=adamw_8bit", "seed=1"],
        ["optim=galore_adamw_8bit", "seed=1"],
        ["optim=paged_adamw_8bit", "seed=1"],
    ]


@pytest.mark.parametrize("word", ["seed=range(1,1)", "optim=glob(x*)", "seed=glob(*)", "seed=interval(0,1)"])
def test_a_sweep_over_nothing_that_can_be_counted_is_refused(word):
    with pytest.raises(ConfigError, match="no values to try"):
        expand(parse([word]))


def test_each_trials_configuration_is_what_composing_it_alone_gives():
    """Oracle: Hydra, for each of them."""
    words = ["recipe=quickstart", "quant=nf4,none", "optim.learning_rate=1e-4,2e-4", "data.columns={prompt: q}"]
    words += ["+model.architecture.mlp_bias=true", "output_dir=here", "data.eval_path=${data.path}"]
    trials = expand(parse(words))
    assert list(configs(trials)) == [compose(trial).config for trial in trials]
    with pytest.raises(ConfigError, match="seed"):
        list(configs([["seed=${data.path}"]]))


def test_a_prepared_sweep_is_a_sweep_without_a_flag():
    planned = plan(["recipe=quickstart", "sweep=learning_rate", "output_dir=here"])
    assert planned.folder == Path("here")
    rates = [compose([w for w in trial if "sweep" not in w]).config.optim.learning_rate for trial in planned.trials]
    assert rates == [5e-5, 1e-4, 2e-4, 4e-4]
    assert [t[1:] for t in planned.trials] == [["recipe=quickstart", "sweep=learning_rate", "output_dir=here"]] * 4


def test_a_prepared_sweeps_values_can_be_replaced():
    planned = plan(["sweep=learning_rate", "optim.learning_rate=1e-3,2e-3"])
    assert [trial[0] for trial in planned.trials] == ["optim.learning_rate=0.001", "optim.learning_rate=0.002"]


def test_one_run_is_no_sweep():
    planned = plan(["seed=3", "output_dir=here"])
    assert planned.trials is None and planned.folder == Path("here") and planned.run.config.seed == 3
    assert planned.run == compose(["seed=3", "output_dir=here"])
    assert plan(["hydra.run.dir=there"]).folder == Path("there")


def test_a_flag_makes_a_sweep_even_of_one():
    assert plan(["seed=3"], multirun=True).trials == [["seed=3"]]


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["optim.learning_rate=1e-4,abc"], ["optim.learning_rate=abc: must be a number"]),
        (["seed=1,x,2", "data.max_length=y,8"], ["seed=x", "data.max_length=y"]),
        (["optim=adamw,adamv"], ["optim=adamv: no such option (did you mean adamw?)"]),
        (["recipe=quickstart,quikstart"], ["recipe=quikstart"]),
        (["quant=nf4,none", "quant.double_quant=true"], ["quant.double_quant: unknown key"]),
        (["sweep=learning_rate", "optim.learning_rate=1e-4,abc"], ["optim.learning_rate=abc"]),
        (
            ["optim.learning_rate=1e-4,0,-1"],
            ["optim.learning_rate=0.0", "optim.learning_rate=-1", "trial 1", "trial 2"],
        ),
        (["quant=nf4,none", "adapter=none"], ["use quant=none (trial 0)"]),
        (["hydra.sweeper.foo=1", "seed=1,2"], ["hydra.sweeper.foo"]),
    ],
)
def test_every_value_of_a_sweep_is_checked_first(words, named):
    """All mistakes of all trials, before any of them starts."""
    with pytest.raises(ConfigError) as refused:
        plan(words, multirun=True)
    assert [part for part in named if part not in str(refused.value)] == []


def test_the_users_own_sweep_keys_are_checked_too(tmp_path, monkeypatch):
    """A recipe may hold a sweep."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipes").mkdir()
    text = "hydra:\n  mode: MULTIRUN\n  sweeper:\n    params:\n      optim.{}: 1e-4,2e-4\n"
    (tmp_path / "recipes/mine.yaml").write_text(text.format("learning_rate"))
    assert [trial[0] for trial in plan(["recipe=mine"]).trials] == [f"optim.learning_rate={r}" for r in (1e-4, 2e-4)]
    (tmp_path / "recipes/mine.yaml").write_text(text.format("lerning_rate"))
    with pytest.raises(ConfigError, match=r"optim\.lerning_rate: unknown key \(did you mean optim.learning_rate"):
        plan(["recipe=mine"])
    with pytest.raises(ConfigError, match="hydra cannot compose this"):
        plan(["hydra.sweeper.params={seed: '1,2'}"], multirun=True)


@pytest.mark.parametrize("path", ["a", "a b", "a=b,c", "it's", 'say "hi"', "a:b{c}[d]", "ä", "#1", "a\\b"])
def test_any_path_can_be_quoted(path):
    (override,) = parse([f"output_dir={quoted(path)}"])
    assert override.value() == path
    assert compose([f"output_dir={quoted(path)}"]).config.output_dir == path


def test_rules_hold_for_what_is_composed():
    """compose refuses exactly what broken_rules finds."""
    with pytest.raises(ConfigError) as refused:
        compose(["train.epochs=0", "optim.eps=0"])
    assert str(refused.value).splitlines()[0] == "2 problems:"
    assert broken_rules(compose([]).config) == []


def test_train_is_the_one_section_without_options():
    assert options("train") == ["default"]
    assert type(compose([]).config.train) is Train
    assert {f.name for f in fields(Config)} == {"recipe", "seed", "device", "output_dir", "debug", *SECTIONS, "train"}
