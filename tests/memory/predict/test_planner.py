"""`trainer plan`: every shipped recipe, the answer to a budget, the files it writes, what it does not import."""

from __future__ import annotations

import json
import re
import resource
import subprocess
import sys
from dataclasses import replace
from xml.etree import ElementTree

import pytest

from trainer.commands import plan as command
from trainer.config.compose import compose
from trainer.config.shelf import all_options, recipes
from trainer.device.find import Device
from trainer.errors import ConfigError, ModelError, StorageError
from trainer.memory.advice import whatif
from trainer.memory.advice.report import full_plan
from trainer.memory.predict.moments import Moment
from trainer.memory.predict.planner import GIB, Planner, largest_shape
from trainer.memory.snapshot import StageMark, step_shape, timeline_shape

RECIPES = [name for name in recipes() if recipes()[name].file.parent.name == "recipes"]


def words_of(name: str) -> list[str]:
    """A recipe without its weights, with some data path where it leaves that to the user, and in the dtype and on the
    device that its figures are for, where it leaves those to the machine."""
    words = [f"recipe={name}", "model.weights=random", "data.path=rows.jsonl", "precision=bf16"]
    return words if compose(words).config.device is Device.cuda else [*words, "device=cpu"]


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_plans_and_those_for_24_gib_fit(name):
    config = compose(words_of(name)).config
    planner = Planner(config)
    prediction = planner.predict()
    assert 0 < prediction.static.total < prediction.peak
    assert sum(prediction.lines().values()) == prediction.peak
    said = re.search(r"Memory: ([\d.]+) GiB \(planned peak", "\n".join(recipes()[name].comment))
    if said is not None:
        assert float(said.group(1)) == round(planner.needed(prediction) / GIB, 1), "the head comment's figure"
    if planner.device_type == "cuda":
        assert config.memory.budget_gib is not None
    if config.memory.budget_gib == 24:
        assert planner.needed(prediction) < 24 * GIB


def test_an_8b_plans_within_a_gibibyte():
    config = compose([*words_of("qlora_llama3_8b"), "memory.budget_gib=24"]).config
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    plan = full_plan(Planner(config), all_options()).plain()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**20  # KiB
    assert plan["fits"] is True
    assert [card["fits"] for card in plan["cards"]] == [False, True, True, True, True, True]
    longest = [card["longest_micro_batch_tokens"] for card in plan["cards"]]
    assert longest == sorted(longest)
    limits = {card["limited_by"]: card["longest_micro_batch_tokens"] for card in plan["cards"]}
    assert limits["the model's positions"] == 8192 == max(longest) and limits["memory"] < 8192
    roof = plan["tokens_per_second"]["RTX 4090"]["roof"]
    assert 3061 < roof < 3535  # between 8,192 and 2,048 tokens a sample, full checkpointing
    assert any("not needed" in sentence for sentence in plan["advice"])


@pytest.fixture(scope="module")
def planner():
    config = compose(["recipe=quickstart", "device=cpu", "precision=fp32"]).config
    return Planner(config)


def test_a_budget_that_is_too_small_gets_ranked_ways(planner):
    needed = planner.needed(planner.predict())
    config = replace(planner.config, memory=replace(planner.config.memory, budget_gib=needed * 0.9 / GIB))
    plan = full_plan(Planner(config, planner.model_config), all_options()).plain()
    assert plan["fits"] is False
    assert plan["ways_to_fit"]
    assert all(way["needed_gib"] <= config.memory.budget_gib for way in plan["ways_to_fit"])


@pytest.mark.parametrize(
    "words",
    [
        [],
        pytest.param(
            ["checkpointing=none", "optim=adamw", "loss=full", "train.accumulation_steps=1"], marks=pytest.mark.slow
        ),
        pytest.param(["packing=none", "quant=none", "checkpointing=selective"], marks=pytest.mark.slow),
        pytest.param(["device=cuda", "quant=int8", "precision=bf16"], marks=pytest.mark.slow),
    ],
    ids=["nf4", "adamw", "padded", "cuda int8"],
)
def test_every_row_is_the_plan_of_that_configuration(words):
    """To the byte, with the words of the row on the command line."""
    base = ["recipe=quickstart", "device=cpu", "precision=fp32", *words]
    rows = whatif.rows(Planner(compose(base).config), all_options())
    kinds = {row.change.partition("=")[0] for row in rows}
    assert {"checkpointing", "optim", "quant", "adapter.r", "loss", "packing", "offload"} <= kinds
    for row in rows:
        changed = Planner(compose([*base, *row.change.split()]).config)
        assert row.needed == changed.needed(changed.predict()), row.change


def test_the_command_writes_the_plan_and_a_picture(tmp_path, capsys):
    assert command.run(["recipe=quickstart", "device=cpu", "explain=true", f"output_dir={tmp_path / 'p'}"]) == 0
    plan = json.loads((tmp_path / "p" / "plan.json").read_text())
    assert sum(plan["lines_gib"].values()) == pytest.approx(plan["peak_gib"])
    picture = ElementTree.parse(tmp_path / "p" / "plan.svg").getroot()
    words = [element.text for element in picture.iter() if element.tag.endswith("text")]
    assert all(name in words for name in plan["lines_gib"])
    shown = capsys.readouterr().out
    assert "16 P" in shown and "adapter=none" in shown and "streamed base" in shown


def test_a_wrong_word_is_refused_without_torch():
    code = (
        "import sys\n"
        "from trainer.commands.plan import run\n"
        "from trainer.errors import ConfigError\n"
        "try:\n    run(['recipe=quickstart', 'memory.budgetgib=3'])\n"
        "except ConfigError as error:\n    print(error)\n"
        "print('torch' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert "budget_gib" in done.stdout and done.stdout.endswith("False\n")


@pytest.mark.parametrize("word", ["explain=maybe", "-m"])
def test_words_that_are_no_setting_are_refused(word):
    with pytest.raises(ConfigError):
        command.run([word])


def test_the_largest_micro_batch_of_settings():
    config = compose(["recipe=quickstart", "data.max_length=300", "train.micro_batch_tokens=1000"]).config
    assert largest_shape(config).lengths == (300, 300, 300, 100)


def test_the_peak_is_the_highest_moment_and_not_the_sum(planner):
    prediction = planner.predict()
    assert isinstance(prediction.highest, Moment)
    assert prediction.peak == prediction.static.total + max(moment.peak for moment in prediction.moments)


@pytest.mark.parametrize(
    ("heights", "word"),
    [
        ([10, 20, 30, 40], "a staircase: 100,000 bytes more after every step, a leak"),
        ([10, 40, 50, 60], "a staircase: 100,000 bytes"),
        ([10, 10, 10, 10], "level"),
        ([0, 0.009, 0.018, 0.027], "level"),  # less than a thousandth of the peak a step
        ([0, 0.1, 0, 0.1], "level"),  # a hundredth
        ([10, 20, 20, 20], "optimizer state"),
        ([10, 20, 10, 20], "uneven"),
        ([1, 1, 1], "few"),
    ],
)
def test_shapes_of_a_timeline_are_named(heights, word):
    assert word in timeline_shape([round(height * 10_000) for height in heights], peak=100_000)


def test_shapes_within_a_step_are_named():
    def step(forward, backward, workspace):
        rows = [("forward", forward, forward), ("backward", 10, backward), ("step", 10, workspace)]
        return step_shape([StageMark(1, *row) for row in rows])

    assert step(110, 130, 20) == (
        "a plateau of activations: 100 bytes are kept when forward ends, 120 at the highest, in backward"
    )
    assert step(30, 40, 90).startswith("a spike of 80 bytes at the optimizer's step")
    assert step_shape([StageMark(1, "forward", 3, 3)]) == "no whole step was recorded"


def test_a_hub_model_is_planned_from_the_recipes_block_without_a_connection():
    """The same numbers as for random weights of that architecture: nothing is asked of the hub."""
    from trainer.memory.predict.planner import Planner

    hub = Planner(compose(["recipe=qlora_llama3_8b"]).config)
    block = Planner(compose(["recipe=qlora_llama3_8b", "model.weights=random"]).config)
    assert hub.model_config.hidden_size == 4096 and hub.model_config.num_hidden_layers == 32
    assert sum(p.numel() for p in hub.skeleton.parameters()) == sum(p.numel() for p in block.skeleton.parameters())


def test_a_plan_that_cannot_be_written_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match=r"output_dir=.*the plan cannot be written: Not a directory"):
        command.run(["recipe=quickstart", f"output_dir={tmp_path}/file/plan"])


def test_a_plan_refuses_what_the_run_would():
    with pytest.raises(ModelError, match=r"modules_to_save=\['mlp'\].*offload=none"):
        command.run(["recipe=quickstart", "quant=none", "offload=base_disk", "adapter.modules_to_save=[mlp]"])
