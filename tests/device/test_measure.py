"""Memory readings on a CPU react to real bytes, at once and at the peak between two readings."""

from __future__ import annotations

import resource
import time
from types import SimpleNamespace

import pytest
import torch

from tests.bench._memory_step import peak_of
from tests.factories import llama
from trainer.device.measure import Memory, Pace, is_out_of_memory, rss_peak
from trainer.errors import OutOfMemoryError
from trainer.memory.advice.out_of_memory import Situation, advising
from trainer.model.checkpointing import FullCheckpointing

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
        memory.expect("a tensor")
        tensor = torch.ones(16 * MIB)
        time.sleep(1)
        del tensor
        assert memory.read().peak - before >= 63 * MIB


def test_a_peak_inside_backward_is_that_of_the_allocators_events():
    model = llama(hidden_size=256, intermediate_size=1024, num_hidden_layers=4, max_position_embeddings=1024).train()
    FullCheckpointing().apply(model)
    ids = torch.randint(5, 300, (8, 512))

    def forward() -> torch.Tensor:
        return model.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state.sum()

    def step() -> None:
        forward().backward()
        model.zero_grad(set_to_none=True)

    step()
    peak, live = peak_of(step)
    with Memory(CPU) as memory:
        held = memory.read().allocated
        found = 0
        for size in range(1, 60):  # a busy machine gives the watching thread its turn late
            if found == pytest.approx(peak - live, rel=0.03):
                break
            memory.expect("step", size)
            step()
            found = memory.read().peak - held
        loss = forward()
        kept = memory.read().allocated - held
        del loss
    assert kept < 0.5 * (peak - live), "no height that a look at the end of forward would find"
    assert found == pytest.approx(peak - live, rel=0.03)


def test_a_larger_one_of_a_kind_is_watched_closely_and_the_next_like_it_is_not(monkeypatch):
    turns = []
    monkeypatch.setattr(Pace, "turn", lambda self, close, now: turns.append(close))
    memory = Memory(CPU)
    for kind, size in (("row", 10), ("row", 10), ("row", 9), ("row", 11), ("evaluation", 5), ("row", 11)):
        memory.expect(kind, size)
    assert turns == [True, False, False, True, True, False]


@pytest.mark.parametrize(("close", "share"), [(True, Pace.CLOSE_SHARE), (False, Pace.SHARE)])
def test_readings_take_their_share_of_the_time(close, share):
    cost, seconds = 0.003, 1000.0
    pace, now, spent = Pace(), 0.0, 0.0
    pace.turn(close, now)
    while now < seconds:
        pace.read(cost, now)
        spent += cost
        assert pace.wait(now) > 0.99 * Pace.INTERVAL_SECONDS
        now += pace.wait(now)
    assert spent == pytest.approx(share * seconds, rel=0.05)


def test_something_new_gets_a_burst_of_readings():
    pace, now, times = Pace(), 0.0, []
    pace.read(0.002, now)
    for begin in (100.0, 200.0):
        pace.turn(True, begin)
        now = begin
        while now < begin + 0.06:
            times.append(now)
            pace.read(0.002, now)
            now += max(pace.wait(now), 1e-9)
    assert len(times) == 2 * 10, "0.02 s of readings of 0.002 s each, 5 ms apart"


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


OUT_OF_MEMORY = [
    "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",
    "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
    "cuDNN error: CUDNN_STATUS_NOT_INITIALIZED when calling cudnnCreate(&handle)",
    "CUDA out of memory. Tried to allocate 2.00 GiB",
]
OTHER = [
    "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasGemmEx(handle)`",
    "CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm(handle)`",
    "CUDA error: an illegal memory access was encountered",
]


@pytest.mark.parametrize("text", OUT_OF_MEMORY + OTHER)
def test_out_of_memory_is_known_by_all_its_names(text):
    assert is_out_of_memory(RuntimeError(text)) == (text in OUT_OF_MEMORY)
    assert not is_out_of_memory(ValueError(text))


def test_a_librarys_failed_allocation_ends_as_out_of_memory_with_advice():
    plan = SimpleNamespace(prediction=None)  # of a model that could not be traced
    with pytest.raises(OutOfMemoryError, match="at step 3: CUDA error: CUBLAS_STATUS_ALLOC_FAILED") as error:
        with advising(lambda: Situation(CPU, "step 3", plan, 96, "step-00000002", 0, {})):
            raise RuntimeError(OUT_OF_MEMORY[0])
    assert error.value.exit_code == 7 and "checkpoint kept: step-00000002" in str(error.value)
