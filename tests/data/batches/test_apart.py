"""Rows that keep the two sides of a model's rotary boundary apart: each sample as it is alone (LongRoPE)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.factories import LLAMA, option, padded_batch, random_tokens, summed_loss
from tests.support import chat_rows, make_tokenizer, write_jsonl
from trainer.config.compose import compose
from trainer.data.batches.apart import Apart
from trainer.data.batches.batch import collate
from trainer.errors import ModelError
from trainer.model.attention import PACKED
from trainer.model.families import rotary_boundary
from trainer.run.beginning import Beginning
from trainer.run.clock import Clock
from trainer.run.prepare import prepare
from trainer.training.losses import Full

BOUNDARY, ROW = 16, 64
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 8,
    "long_factor": [float(2 + i) for i in range(8)],
    "original_max_position_embeddings": BOUNDARY,
}
PHI3 = {**LLAMA, "max_position_embeddings": 128, "original_max_position_embeddings": BOUNDARY, "pad_token_id": 0}
TOKENS = random_tokens([10, 40, 8, 12, 30, 16])


def phi3(attention: str, **rope):
    torch.manual_seed(0)
    config = AutoConfig.for_model("phi3", **PHI3, rope_parameters={**LONGROPE, **rope})
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()


def batching(**changes):
    return replace(compose(["data.path=x.jsonl"]).config.train, micro_batch_tokens=ROW, micro_batch_size=3, **changes)


@torch.no_grad()
@pytest.mark.parametrize("name", ["best_fit", "none"])
def test_each_sample_is_as_it_is_alone(name):
    inner = option("packing", name)
    model, oracle = phi3(PACKED if inner.packed else "sdpa"), phi3("eager")
    batches = [padded_batch(TOKENS, i) for i in range(len(TOKENS))]
    alone = sum(summed_loss(oracle(b.input_ids, use_cache=False).logits, b.labels).item() for b in batches)

    def total(packing) -> float:
        rows = packing.micro_batches(TOKENS.lengths, batching(), np.random.default_rng(0))
        assert sorted(np.concatenate(rows).tolist()) == list(range(len(TOKENS)))
        return sum(Full().sum(model, collate(TOKENS, row, inner.packed)).item() for row in rows)

    assert rotary_boundary(model.config, 128) == BOUNDARY
    assert total(Apart(inner, BOUNDARY)) == pytest.approx(alone, rel=1e-6)
    assert total(inner) != pytest.approx(alone, rel=1e-4)


def test_samples_of_one_side_are_packed_as_without():
    inner = option("packing", "best_fit")
    lengths = np.array([9, 14, 16, 3, 5, 12, 11])
    found, expected = (
        packing.micro_batches(lengths, batching(), np.random.default_rng(0)) for packing in (Apart(inner, 16), inner)
    )
    assert [row.tolist() for row in found] == [row.tolist() for row in expected]


def test_a_run_on_such_a_model_packs_so(tmp_path):
    config = AutoConfig.for_model("phi3", **{**PHI3, "vocab_size": len(make_tokenizer())}, rope_parameters=LONGROPE)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    make_tokenizer().save_pretrained(tmp_path / "model")
    rows = write_jsonl(tmp_path / "rows.jsonl", chat_rows())
    words = [f"model.path={tmp_path / 'model'}", "data=file", f"data.path={rows}", "data.max_length=64", "device=cpu"]
    words += ["data.eval_fraction=0", "train.micro_batch_tokens=128", "train.max_steps=1"]
    prepared = prepare(compose(words), Beginning(tmp_path / "run"), Clock())
    assert prepared.steps.packing.boundary == BOUNDARY
    prepared.close()


def test_factors_that_change_with_each_length_are_refused_where_samples_are_that_long():
    config = phi3("sdpa").config
    config.rope_parameters = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    assert rotary_boundary(config, 128) is None
    with pytest.raises(ModelError, match=r"data.max_length=129.*rope_type=dynamic.*Use data.max_length=128"):
        rotary_boundary(config, 129)
    assert rotary_boundary(AutoConfig.for_model("llama"), 10**6) is None
