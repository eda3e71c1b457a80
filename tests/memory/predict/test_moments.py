"""Predictions against torch.profiler's allocator events on real steps, and against a trace at full depth."""

from __future__ import annotations

import contextlib
import subprocess
import sys

import pytest
import torch

from tests.bench._memory_cases import BASE, A
from tests.bench._memory_step import worst_shape
from tests.bench.memory import compare
from trainer.config.compose import compose
from trainer.memory.predict.moments import predict
from trainer.memory.predict.planner import Planner
from trainer.memory.predict.profile import Shape
from trainer.memory.predict.trace import trace
from trainer.model.checkpointing import FullCheckpointing, NoCheckpointing
from trainer.model.fused import tiles
from trainer.model.fused.pieces import pieces
from trainer.training import frozen_head

TOLERANCE = 0.05


@pytest.mark.parametrize(
    "words",
    [
        [],
        [f"{A}num_hidden_layers=9", "checkpointing=none", "loss=full"],
        ["checkpointing=every_k", "checkpointing.k=3"],
        ["quant=int8", "checkpointing=attention"],
        ["quant=none", "adapter=none", "optim=adamw_8bit", "train.accumulation_steps=1"],
        [f"{A}model_type=gemma2", f"{A}head_dim=32", "checkpointing=none"],
        ["checkpointing=selective", "checkpointing.keep=linear", "model.mlp_tiles=7"],
        ["model.new_tokens=[aa,bb]", f"{A}tie_word_embeddings=false", f"{A}vocab_size=20000"],
    ],
    ids=[
        "nf4 full",
        "deep none full loss",
        "every_k",
        "int8 attention",
        "all parameters",
        "block mask",
        "tiles",
        "new tokens",
    ],
)
def test_the_peak_of_a_real_step_is_as_predicted(words):
    predicted, real = compare(words)
    assert predicted == pytest.approx(real, rel=TOLERANCE)


@pytest.mark.parametrize("policy", [FullCheckpointing(), NoCheckpointing()], ids=["full", "none"])
def test_depth_is_a_matter_of_repeating_the_middle_block(policy):
    config = compose([*BASE, f"{A}num_hidden_layers=7"]).config
    planner = Planner(config, shape=worst_shape(config))
    short = planner.predict(policy)
    whole = trace(config, planner.model_config, planner.dtypes, "cpu", planner.shape, policy, depth=planner.depth)
    long = predict(planner.static, [whole] * planner.depth, planner.optimizer.workspace, planner.accumulates)
    assert whole.depth == 7
    assert short.peak == long.peak


@pytest.mark.parametrize("policy", [FullCheckpointing(), NoCheckpointing()], ids=["full", "none"])
@pytest.mark.parametrize(
    "words",
    [[], ["adapter.fused=false"], ["adapter=none", "quant=none"], ["adapter.dropout=0.1", "packing=none"]],
    ids=["fused", "PEFT", "all parameters", "dropout, padded"],
)
def test_pieces_that_a_trace_leaves_out_change_nothing(policy, words, monkeypatch):
    """Seven pieces of the MLP's rows and nine of the loss's, the last shorter, against a loop over all of them."""
    config = compose([*BASE, *words, "model.mlp_tiles=7", "loss.chunk_tokens=120"]).config
    shape = Shape((251,) * 4, 1000, packed=config.packing.packed)

    def profile_and_lengths():
        lengths = []
        with monkeypatch.context() as patch:
            for module in (tiles, frozen_head):
                patch.setattr(module, "pieces", lambda found: lengths.append(len(pieces(found))) or pieces(found))
            return Planner(config, shape=shape).profile(policy), lengths

    short, run = profile_and_lengths()
    monkeypatch.setattr("trainer.memory.predict.trace.shortened", contextlib.nullcontext)
    whole, run_whole = profile_and_lengths()
    assert set(run) == {3}
    assert min(run_whole) == 7 and len(run) == len(run_whole)
    assert short == whole


def test_the_first_trace_of_a_process_sees_what_later_ones_see():
    """torch registers the chunked loss's operation when it is first called: in a process of its own."""
    code = (
        "from tests.memory.predict.test_moments import *\n"
        "config = compose([*BASE, 'quant=none', 'adapter=none']).config\n"
        "first, second = (Planner(config, shape=worst_shape(config)).profile(FullCheckpointing()) for _ in range(2))\n"
        "assert first == second, (first.loss, second.loss)\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr


def test_full_checkpointing_keeps_one_input_a_block():
    config = compose([*BASE, "precision=fp32"]).config
    shape = worst_shape(config)
    profile = Planner(config, shape=shape).profile(FullCheckpointing())
    one_input = shape.num_tokens * 128 * 4
    assert profile.forward[1].delta == pytest.approx(one_input, rel=0.02)


def test_row_length_lies_on_a_line():
    config = compose(BASE).config
    planner = Planner(config, shape=Shape((256, 256), 510, packed=True))
    at_768 = planner.predict(tokens=768)
    traced = Planner(config, shape=Shape((256,) * 3, 765, packed=True)).predict()
    assert at_768.peak == pytest.approx(traced.peak, rel=0.01)


def test_cuda_is_planned_on_a_machine_without_it():
    config = compose(["recipe=qlora_llama3_8b", "model.weights=random"]).config
    planner = Planner(config)
    lines = {name: size / 2**30 for name, size in planner.static.lines().items()}
    assert lines["quantised weights"] == 3.25
    assert lines["scales of quantised weights"] == pytest.approx(0.103, abs=0.001)
    assert lines["embeddings"] == lines["head"] == pytest.approx(0.979, abs=0.001)
    assert lines["adapter"] == lines["gradients"] == pytest.approx(0.156, abs=0.001)
    assert planner.static.trainable == 41_943_040
    kept = planner.profile(FullCheckpointing()).forward[1].delta
    assert kept >= 4096 * 4096 * 2  # each block's bf16 input: 8 KiB a token, 256 KiB in all 32 blocks
    assert planner.dtypes.compute is torch.bfloat16
