"""Configurations and weights that do not belong together, or to no model: one line each, before anything is built."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from random import Random

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from tests.factories import FP32, llama, option, packed_batch, random_tokens, summed_loss
from tests.support import make_model
from trainer.config.check import check, parse
from trainer.config.compose import compose
from trainer.config.rules import broken_rules
from trainer.errors import ConfigError, ModelError, TrainerError
from trainer.model.attention import PACKED
from trainer.model.loading.architecture import MOST_BLOCKS, check_fields, skeleton
from trainer.model.loading.base import find, from_files, load_base, load_config, planned_config
from trainer.model.model_settings import Weights

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model")).path


def changed(folder, tmp_path, **fields):
    """The model with other fields in its config.json."""
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **fields}))
    return option("model", "tiny", path=str(tmp_path), weights=Weights.pretrained, architecture={})


def build(model, attention="sdpa"):
    config = load_config(model)
    skeleton(config)
    return load_base(model, config, option("quant", "none"), FP32, CPU, attention)


BAD = [
    ({"hidden_size": 10**9}, r"has the shape \[300, 64\] in model.safetensors, and \[300, 1000000000\]"),
    ({"hidden_size": -4}, "cannot be built as it is described"),
    ({"hidden_size": "banana"}, "hidden_size"),
    ({"num_hidden_layers": 10**9}, f"num_hidden_layers=1000000000: must be from 1 to {MOST_BLOCKS}"),
    ({"vocab_size": 10**12}, "parameters, more than any model"),
    ({"vocab_size": 10**18}, "cannot be built as it is described"),
    ({"dtype": "evil"}, "config.json.dtype='evil': no data type"),
    ({"dtype": "bfloat61"}, r"did you mean bfloat16\?"),
    ({"num_attention_heads": 0}, "config.json cannot be loaded|cannot be built"),
    ({"hidden_act": "evil"}, "cannot be built as it is described"),
    ({"rope_parameters": 3}, "config.json cannot be loaded|cannot be built"),
    ({"rope_parameters": {"rope_type": "evil", "rope_theta": 1.0}}, "config.json cannot be loaded|cannot be built"),
    ({"quantization_config": 5}, "config.json cannot be loaded"),
]


@pytest.mark.parametrize(("fields", "said"), BAD, ids=[str(row[0])[1:40] for row in BAD])
def test_a_configuration_that_cannot_be_is_one_line(fields, said, folder, tmp_path):
    with pytest.raises(ModelError, match=said) as error:
        build(changed(folder, tmp_path, **fields))
    assert error.value.exit_code == 4 and len(str(error.value).splitlines()) == 1


def test_nested_fields_are_checked_and_the_caller_names_the_error():
    with pytest.raises(ConfigError, match="model.architecture.text_config.num_hidden_layers=0"):
        check_fields({"text_config": {"num_hidden_layers": 0}}, "model.architecture", ConfigError)


@pytest.mark.parametrize("key", ["_attn_implementation", "attn_implementation"])
def test_a_kernel_of_the_hub_in_a_configuration_is_not_fetched(key, folder, tmp_path):
    model = changed(folder, tmp_path, **{key: "kernels-community/flash-attn3"})
    assert build(model, PACKED).config._attn_implementation == PACKED


ODD = ["banana", "''", "0", "-1", "1", "7", "10000000", "1000000000", "99999999999999999999", "2.5", "1e300", "nan"]
ODD += ["-inf", "null", "true", "[]", "[1,2]", "[a]", "{}", "{a: 1}", "[[1]]"]
FAMILIES = ("tiny", "qwen3_8b", "mistral_7b", "gemma3_4b")


def odd_words():
    """Every field that the installed transformers has for a family, with every odd value."""
    for family in FAMILIES:
        architecture = dict(option("model", family).architecture)
        fields = AutoConfig.for_model(architecture["model_type"]).to_dict().keys() | architecture.keys()
        for key in sorted(fields):
            for value in ODD:
                # two layers, where these are not what is tried
                yield [
                    f"model={family}",
                    "model.architecture.num_hidden_layers=2",
                    f"++model.architecture.{key}={value}",
                ]


def built_or_refused(words) -> int:
    """The exit code of what a command line says of a model, up to its skeleton; anything but a refusal is raised."""
    try:
        skeleton(planned_config(compose([*words, "recipe=null", "model.weights=random"]).config.model))
    except TrainerError as error:
        assert "\n" not in str(error) and error.exit_code in (2, 4), (words, error)
        return error.exit_code
    return 0


SAMPLE = Random(0).sample(list(odd_words()), 60)


@pytest.mark.parametrize("words", SAMPLE, ids=lambda words: f"{words[0]} {words[-1]}")
def test_no_odd_value_of_an_architecture_is_a_bug(words):
    assert built_or_refused(words) in (0, 2, 4)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_no_odd_value_of_any_field_is_a_bug(family, monkeypatch, record_property):
    """As above, each family composed once: that is most of the time."""
    run = compose([f"model={family}", "recipe=null", "model.weights=random"])

    def composed(words):
        check(parse(words))
        fields = {o.key_or_group.rpartition(".")[2]: o.value() for o in parse(words[1:-2])}
        model = replace(run.config.model, architecture={**run.config.model.architecture, **fields})
        problems = broken_rules(replace(run.config, model=model))
        if problems:
            raise ConfigError(problems[0])
        return replace(run, config=replace(run.config, model=model))

    monkeypatch.setitem(globals(), "compose", composed)
    codes = Counter(built_or_refused(words) for words in odd_words() if words[0] == f"model={family}")
    record_property("attacks", codes.total())
    assert set(codes) == {0, 2, 4} and codes.total() > 500


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("hidden_size=banana", "model.architecture.hidden_size=banana: must be a whole number"),
        ("hidden_size=1000000000", "model.architecture.hidden_size=1000000000: must be from 1 to 262144"),
        ("num_hidden_layers=10000000", "model.architecture.num_hidden_layers=10000000: must be from 1 to 1000"),
        (
            "model_type=lama",
            "model.architecture.model_type=lama: transformers knows no such model (did you mean llama?)",
        ),
        ("model_type=[1]", "transformers knows no such model"),
        ("attention_dropout=x", "model.architecture.attention_dropout=x: must be of the type int | float | None"),
        ("eos_token_id={a: 1}", "model.architecture.eos_token_id={'a': 1}: must be of the type int | list[int] | None"),
        ("num_attention_heads=7", "is not a multiple of the number of attention heads (7)"),
        ("hidden_act=evil", "cannot be built as it is described: hidden_act=evil"),
        ("dtype=evil", "model.architecture.dtype='evil': no data type of this name"),
    ],
)
def test_what_a_recipes_architecture_cannot_hold(word, said):
    words = ["recipe=null", "model.weights=random", f"++model.architecture.{word}"]
    with pytest.raises(TrainerError) as refused:
        skeleton(planned_config(compose(words).config.model))
    assert said in str(refused.value)


def test_biases_that_the_configuration_denies_are_refused_by_name(folder, tmp_path):
    """Oracle: with the biases the loss is another one, so leaving them out is another model."""
    with_biases = llama(attention_bias=True)
    for name, parameter in with_biases.named_parameters():
        if name.endswith("proj.bias"):
            torch.nn.init.normal_(parameter)
    with_biases.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    model = option("model", "tiny", path=str(tmp_path), weights=Weights.pretrained, architecture={})
    batch = packed_batch(random_tokens([12]))
    with torch.no_grad():
        expected = summed_loss(with_biases(batch.input_ids).logits, batch.labels)
        assert torch.isclose(summed_loss(build(model).eval()(batch.input_ids).logits, batch.labels), expected)
    (tmp_path / "config.json").write_text(json.dumps({**config, "attention_bias": False}))
    for load in (build, lambda model: from_files(model, find(model))):
        with pytest.raises(ModelError, match=r"8 weights that this llama has no place for.*self_attn.k_proj.bias"):
            load(model)


def test_weights_that_may_stay_unread_are_known(folder, tmp_path):
    model = changed(folder, tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    build(model)
    from_files(model, find(model))
