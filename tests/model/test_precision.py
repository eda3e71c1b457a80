"""The dtypes of a run: what each option gives, and that auto follows what the device has."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.factories import option
from trainer.errors import ConfigError
from trainer.model import precision as module

CPU = torch.device("cpu")


@pytest.mark.parametrize(("name", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16)])
def test_a_named_precision_is_what_it_says(name, dtype):
    dtypes = option("precision", name).build(CPU)
    assert dtypes.compute is dtype
    a = torch.ones(2, 2)
    with dtypes.autocast():
        assert (a @ a).dtype is dtype
    assert (a @ a).dtype is torch.float32


@pytest.mark.parametrize(
    ("found", "dtype"),
    [
        ({"avx512_bf16": True, "amx_bf16": False}, torch.bfloat16),
        ({"avx512_bf16": False, "amx_bf16": True}, torch.bfloat16),
        ({"avx512_f": True, "avx512_bf16": False, "amx_bf16": False}, torch.float32),
        ({}, torch.float32),
    ],
)
def test_auto_takes_bf16_on_a_cpu_with_instructions_for_it(found, dtype, monkeypatch):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: found)
    assert option("precision", "auto").build(CPU).compute is dtype


def test_what_the_cpu_says_is_what_the_kernel_says():
    """The oracle: /proc/cpuinfo."""
    flags = Path("/proc/cpuinfo").read_text().split()
    assert module.cpu_has_bf16() is any(flag in flags for flag in ("avx512_bf16", "amx_bf16", "bf16"))


def test_a_gpu_without_bf16_is_refused_by_name_and_passed_over_by_auto(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "an old card")
    with pytest.raises(ConfigError, match="precision=bf16: an old card has no bf16 arithmetic. Use precision=fp16."):
        option("precision", "bf16").build(torch.device("cuda"))
    assert option("precision", "auto").build(torch.device("cuda")).compute is torch.float16
