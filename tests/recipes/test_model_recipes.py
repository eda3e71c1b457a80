"""The recipes for models from the hub: their architecture blocks, their arithmetic, and a step of each on a CPU."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from tests.support import train_here
from trainer.config.compose import compose
from trainer.config.shelf import recipes
from trainer.model.adapters import decoder_linears
from trainer.model.loading import base as load
from trainer.model.loading.architecture import skeleton

PUBLISHED = {
    "qlora_llama3_8b": (8_030_261_248, "llama"),
    "qlora_llama3_8b_long": (8_030_261_248, "llama"),
    "qlora_llama3_70b_24gb": (70_553_706_496, "llama"),
    "lora_llama3_8b": (8_030_261_248, "llama"),
    "qlora_qwen3_8b": (8_190_735_360, "qwen3"),
    "qlora_mistral_7b": (7_248_023_552, "mistral"),
    "qlora_gemma3_4b": (3_880_263_168, "gemma3_text"),
    "qlora_smollm2_135m": (134_515_008, "llama"),
    "full_smollm2_135m": (134_515_008, "llama"),
}
"""Parameters of the published checkpoints (Gemma 3: of its text decoder), tied embeddings counted once."""

GIB = 2**30


def skeleton_of(recipe: str):
    config = compose([f"recipe={recipe}", "model.weights=random"]).config
    return config, skeleton(load.load_config(config.model))


@pytest.mark.parametrize("recipe", PUBLISHED)
def test_the_architecture_block_is_the_published_model(recipe):
    _, model = skeleton_of(recipe)
    assert (sum(p.numel() for p in model.parameters()), model.config.model_type) == PUBLISHED[recipe]


@pytest.mark.parametrize("recipe", PUBLISHED)
def test_the_head_comment_does_the_arithmetic_right(recipe):
    """What the comment gives in GiB before the first step, counted over the modules of the skeleton."""
    text = " ".join(recipes()[recipe].comment)
    said = re.search(r"(?<=of which )([\d.]+) GiB (before the first step|in a step) by arithmetic", text)
    assert said is not None
    config, model = skeleton_of(recipe)
    everything = sum(p.numel() for p in model.parameters())
    if recipe.startswith("full"):
        expected = 16 * everything
    else:
        shapes = [model.get_submodule(name).weight.shape for name in decoder_linears(model)]
        linear = sum(out * inner for out, inner in shapes)
        lora = sum(config.adapter.r * (out + inner) for out, inner in shapes)
        blocks = linear / 64  # a scale of 8 bits a block of 64, and 32 bits for each 256 scales
        base = 2 * linear if recipe.startswith("lora") else linear / 2 + blocks + 4 * blocks / 256
        if config.offload.streams:  # two blocks at a time
            base *= 2 / model.config.num_hidden_layers
        expected = base + 2 * (everything - linear) + lora * (4 + 4 + 2.03)
    assert float(said.group(1)) == pytest.approx(expected / GIB, abs=0.06)


@pytest.mark.parametrize("recipe", [name for name in PUBLISHED if not name.endswith("smollm2_135m")])
def test_the_recipe_takes_a_step_with_small_random_weights(recipe, tmp_path):
    """As its head comment says for a machine without a GPU, and narrower still."""
    small = {
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 2000,
    }
    words = [f"recipe={recipe}", "device=cpu", "model.weights=random", "precision=fp32", "track=local"]
    words += [f"model.architecture.{key}={value}" for key, value in small.items()]
    if "head_dim" in compose(words).config.model.architecture:
        words.append("model.architecture.head_dim=16")
    if recipe.endswith("_long"):
        words += ["data.max_length=2048", "train.micro_batch_tokens=2048"]  # in 32 pieces of the width of 64
    summary = train_here([*words, "train.max_steps=1", "data.eval_fraction=0"], tmp_path / "run")
    assert (summary["status"], summary["steps"]) == ("completed", 1)
    assert torch.isfinite(torch.tensor(summary["final_loss"]))


def test_no_recipe_asks_for_foreign_code():
    for recipe in recipes().values():
        assert "trust_remote_code" not in Path(recipe.file).read_text()
