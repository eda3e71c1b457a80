"""What a process holds with its base in files: two blocks, not the model."""

from __future__ import annotations

import pytest

from tests.bench.offload import A, in_a_process


@pytest.mark.slow
def test_a_model_several_times_larger_than_what_is_held():
    words = ["quant=none", "train.micro_batch_tokens=16", "data.max_length=16", "train.accumulation_steps=1"]
    words += [f"{A}num_hidden_layers=12", f"{A}vocab_size=512", "adapter.r=2"]
    kept, streamed = in_a_process(words, "none"), in_a_process(words, "base_disk")
    assert (streamed["losses"], streamed["gradients"]) == (kept["losses"], kept["gradients"])
    assert streamed["blocks"] == 6 * streamed["slots"]
    assert kept["held"] > streamed["blocks"]
    assert streamed["held"] < streamed["blocks"] / 3
