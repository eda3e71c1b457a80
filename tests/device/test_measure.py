"""Memory readings on a CPU react to real bytes, at once and at the peak between two readings."""

from __future__ import annotations

import resource
import time

import torch

from trainer.device.measure import Memory, rss_peak

MIB = 2**20
CPU = torch.device("cpu")


def test_a_tensor_of_64_mib_shows_and_goes():
    with Memory(CPU) as memory:
        before = memory.read().allocated
        tensor = torch.ones(16 * MIB)
        held = memory.read()
        assert abs(held.allocated - before - 64 * MIB) < MIB
        assert held.peak >= held.allocated
        del tensor
        after = memory.read()
        assert abs(after.allocated - before) < MIB
        assert after.peak - before >= 63 * MIB, "it was there when the last reading was taken"
        assert memory.read().peak - before < MIB, "a peak counts from the last reading on"


def test_the_watching_thread_catches_a_peak_between_two_readings():
    with Memory(CPU) as memory:
        before = memory.read().allocated
        tensor = torch.ones(16 * MIB)
        time.sleep(20 * Memory.INTERVAL_SECONDS)
        del tensor
        assert memory.read().peak - before >= 63 * MIB


def test_a_sample_catches_a_peak_without_the_thread():
    memory = Memory(CPU)
    before = memory.read().allocated
    tensor = torch.ones(16 * MIB)
    memory.sample()
    del tensor
    assert memory.read().peak - before >= 63 * MIB


def test_what_was_held_before_is_not_counted():
    held = torch.ones(16 * MIB)
    with Memory(CPU) as memory:
        assert memory.baseline > 64 * MIB
        assert memory.read().peak < MIB
    del held
    assert memory.read().allocated == 0


def test_rss_peak_is_in_bytes():
    assert rss_peak() == resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 > 100 * MIB
