"""A run's configuration on disk and back."""

from dataclasses import replace

import pytest
import yaml

from trainer.config.compose import compose
from trainer.config.saved import CONFIG, OVERRIDES, differences, from_saved, load_run, public_config, save_run
from trainer.device.find import Device
from trainer.errors import ConfigError, StorageError
from trainer.registry import to_plain
from trainer.training.train_settings import Resume

WORDS = ["recipe=quickstart", "quant=int8", "optim.eps=1e-5", "data.columns={prompt: question}", "seed=0", "device=cpu"]
WORDS += ["adapter.target_modules=[q_proj,v_proj]", "output_dir='a b'", "train.max_steps=3", "data.path='ä.jsonl'"]


@pytest.fixture(scope="module")
def run():
    return compose(WORDS)


def test_a_saved_run_comes_back_equal(run, tmp_path):
    """Dataclass for dataclass, enum for enum; mappings with the user's own entries too."""
    save_run(run, tmp_path)
    assert load_run(tmp_path) == run
    assert load_run(tmp_path).config.data.columns == {"prompt": "question"}
    assert [file.name for file in tmp_path.iterdir() if file.name not in (CONFIG, OVERRIDES)] == []


def test_the_files_are_plain_yaml_with_the_options_and_what_was_typed(run, tmp_path):
    save_run(run, tmp_path)
    values = yaml.safe_load((tmp_path / CONFIG).read_text())
    assert values.pop("choices")["quant"] == "int8"
    assert values == to_plain(run.config)
    assert (values["device"], values["optim"]["eps"], values["data"]["train_on"]) == ("cpu", 1e-5, "assistant")
    assert yaml.safe_load((tmp_path / OVERRIDES).read_text()) == WORDS
    assert (tmp_path / CONFIG).read_text().startswith("# ")


def test_nothing_there_is_no_run(tmp_path):
    assert load_run(tmp_path) is None
    (tmp_path / OVERRIDES).write_text("[]")
    assert load_run(tmp_path) is None


def test_a_kill_while_saving_leaves_the_old_configuration(run, tmp_path, monkeypatch):
    """Whatever write is cut off: the run in the folder stays one that can be resumed."""
    save_run(run, tmp_path)
    other = replace(run, config=replace(run.config, seed=9), overrides=["seed=9"])
    whole = {file.name: file.read_bytes() for file in tmp_path.iterdir()}

    class Killed(BaseException):
        pass

    def killed(*_):
        raise Killed

    monkeypatch.setattr("trainer.atomic.os.replace", killed)
    with pytest.raises(Killed):
        save_run(other, tmp_path)
    assert {name: (tmp_path / name).read_bytes() for name in whole} == whole


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        (CONFIG, b"choices: {optim: adam", "is damaged"),
        (CONFIG, b"", "holds no mapping"),
        (CONFIG, b"- 1", "holds no mapping"),
        (CONFIG, b"seed: 1", "is not the configuration of a run"),
        (CONFIG, b"\xff\xfe", "is damaged"),
        (OVERRIDES, b"a: 1", "holds no list"),
        (OVERRIDES, None, "cannot be read: No such file"),
    ],
)
def test_damaged_files_are_told_in_one_line(run, tmp_path, file, content, words):
    save_run(run, tmp_path)
    (tmp_path / file).write_bytes(content) if content is not None else (tmp_path / file).unlink()
    with pytest.raises(StorageError) as refused:
        load_run(tmp_path)
    assert str(refused.value).startswith(str(tmp_path / file)) and words in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_setting_younger_than_the_run_comes_from_conf(run):
    values = to_plain(run.config)
    del values["optim"]["weight_decay"], values["loss"], values["debug"]
    choices = {group: choice for group, choice in run.choices.items() if group != "loss"}
    assert from_saved(choices, values) == run.config


@pytest.mark.parametrize(
    ("choices", "values", "words"),
    [
        ({"optim": "gone"}, {}, "optim=gone: no such option"),
        ({}, {"optim": {"gone": 1}}, "gone"),
        ({}, {"gone": 1}, "gone"),
        ({}, {"seed": "x"}, "seed: Value 'x' of type 'str' could not be converted to Integer"),
        ({}, {"device": "tpu"}, "device: Invalid value 'tpu', expected one of [auto, cuda, cpu]"),
        ({}, {"optim": 3}, "optim: no mapping"),
    ],
)
def test_a_run_of_a_version_that_does_not_fit_is_refused(run, choices, values, words):
    with pytest.raises(ConfigError) as refused:
        from_saved({**run.choices, **choices}, {**to_plain(run.config), **values})
    assert "does not fit this version" in str(refused.value) and words in str(refused.value)


def test_plain_values_hold_nothing_but_what_yaml_and_json_do(run):
    assert to_plain(Device.cpu) == "cpu"
    assert to_plain([Resume.auto, (1, None)]) == ["auto", [1, None]]
    plain = public_config(run)
    assert yaml.safe_load(yaml.safe_dump(plain)) == plain
    assert plain["choices"] == run.choices


def test_differences_name_each_key_that_differs_and_no_free_one(run):
    config = replace(run.config, seed=5, debug=True, optim=replace(run.config.optim, eps=1.0))
    other = replace(run, config=config, choices={**run.choices, "track": "wandb", "optim": "adamw"})
    assert differences(run, run, ()) == []
    assert sorted(differences(run, other, ("debug", "track"))) == [
        ("choices.optim", "paged_adamw_8bit", "adamw"),
        ("optim.eps", 1e-5, 1.0),
        ("seed", 0, 5),
    ]
    assert [key for key, *_ in differences(run, other, ("optim", "seed"))] == ["debug", "choices.track"]


def test_differences_see_keys_that_only_one_of_the_two_has(run):
    other = compose([*WORDS, "quant=nf4"])
    found = {key: (old, new) for key, old, new in differences(run, other, ("output_dir",))}
    assert found == {
        "quant.outlier_threshold": (6.0, None),
        "quant.double_quant": (None, True),
        "choices.quant": ("int8", "nf4"),
    }
