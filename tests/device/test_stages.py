"""The gap between reserved and allocated bytes is named, with the setting that helps where it is large."""

from __future__ import annotations

import pytest
import torch

from trainer.device.measure import Memory, tensor_bytes
from trainer.device.stages import Stage, fragmentation, sentence
from trainer.units import GIB

STAGES = {"weights loaded": Stage(4 * GIB, 5 * GIB, 4 * GIB), "first backward": Stage(6 * GIB, 9 * GIB, 8 * GIB)}


@pytest.mark.parametrize(("device", "setting"), [("cuda", "expandable_segments:True"), ("cpu", "MALLOC_MMAP")])
def test_a_large_gap_is_named_with_what_helps(device, setting):
    words = fragmentation(STAGES, device)
    assert words.startswith("at most 2.00 of 8.00 GiB reserved, after first backward")
    assert setting in words


def test_a_small_gap_needs_no_setting():
    assert fragmentation({"first step": Stage(95, 99, 100)}, "cuda") == (
        "at most 0.00 of 0.00 GiB reserved, after first step"
    )


def test_all_stages_on_one_line():
    assert sentence(STAGES) == "weights loaded 4.00, first backward 6.00"


def test_a_stage_knows_the_highest_since_the_one_before_and_a_recording_hears_of_all():
    memory = Memory(torch.device("cpu"))
    heard = []
    memory.recording = lambda *what: heard.append(what)
    memory.at("one")
    tensor = torch.ones(16 * 2**20)
    memory.sample()
    del tensor
    for name in ("two", "two"):
        memory.at(name)
    one, two = memory.stages["one"], memory.stages["two"]
    assert two.peak - two.allocated > 60 * 2**20 > two.allocated - one.allocated
    assert [name for name, _, _ in heard] == ["one", "two", "two"]
    assert heard[1][1:] == (two.allocated, two.peak) and heard[2][2] - heard[2][1] < 2**20
    assert memory.read().peak - two.allocated > 60 * 2**20, "the peak of the reading counts it too"


def test_a_small_runs_gap_is_nobodys_trouble():
    assert "helps" not in fragmentation({"first step": Stage(GIB // 100, GIB // 50, GIB // 10)}, "cuda")


def test_what_libraries_took_is_held_by_no_tensor():
    """malloc's own blocks beside a tensor: the tensor is not counted, the blocks are."""
    memory = Memory(torch.device("cpu"))
    before = memory.libraries()
    tensor = torch.ones(16 * 2**20)
    blocks = [bytearray(2**20) for _ in range(32)]
    assert memory.libraries() - before == pytest.approx(32 * 2**20, rel=0.05)
    assert tensor_bytes() >= tensor.nbytes and len(blocks) == 32
