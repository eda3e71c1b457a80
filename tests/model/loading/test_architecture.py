"""Configurations and weights that do not belong together, or to no model: one line each, before anything is built."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.factories import FP32, llama, option, packed_batch, random_tokens, summed_loss
from tests.support import make_model
from trainer.errors import ConfigError, ModelError
from trainer.model.attention import PACKED
from trainer.model.loading.architecture import MOST_BLOCKS, check_fields, skeleton
from trainer.model.loading.base import find, from_files, load_base, load_config
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
