"""Memory readings on a CPU react to real bytes, at once and at the peak between two readings."""

from __future__ import annotations

import resource
import time

import pytest
import torch

from trainer.device.measure import Memory, is_out_of_memory, rss_peak
from trainer.errors import OutOfMemoryError
from trainer.memory.advice.out_of_memory import Situation, advising

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
    with pytest.raises(OutOfMemoryError, match="at step 3: CUDA error: CUBLAS_STATUS_ALLOC_FAILED") as error:
        with advising(Situation(CPU, where="step 3"), lambda: "step-00000002"):
            raise RuntimeError(OUT_OF_MEMORY[0])
    assert error.value.exit_code == 7 and "checkpoint kept: step-00000002" in str(error.value)
