"""The dtypes of a run: what each option gives, and that auto follows the measured speed."""

from __future__ import annotations

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


@pytest.mark.parametrize(("speedup", "dtype"), [(1.4, torch.float32), (1.5, torch.bfloat16), (8.0, torch.bfloat16)])
def test_auto_takes_bf16_on_a_cpu_only_where_it_is_faster(speedup, dtype, monkeypatch):
    seconds = {torch.float32: speedup, torch.bfloat16: 1.0}
    monkeypatch.setattr(module, "_matmul_seconds", seconds.__getitem__)
    assert option("precision", "auto", min_speedup=1.5).build(CPU).compute is dtype


def test_a_gpu_without_bf16_is_refused_by_name_and_passed_over_by_auto(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "an old card")
    with pytest.raises(ConfigError, match="precision=bf16: an old card has no bf16 arithmetic. Use precision=fp32."):
        option("precision", "bf16").build(torch.device("cuda"))
    assert option("precision", "auto").build(torch.device("cuda")).compute is torch.float32
