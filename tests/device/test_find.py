"""Asking for a GPU without importing torch."""

import ctypes

import pytest

from trainer.device import find as device
from trainer.device.find import Device, check_device
from trainer.errors import ConfigError


def library(found: bool):
    def load(name):
        assert name == "libcuda.so.1"
        if not found:
            raise OSError("no such file")

    return load


def test_no_driver_no_gpu_and_what_to_run_instead(monkeypatch):
    """C11."""
    monkeypatch.setattr(ctypes, "CDLL", library(False))
    with pytest.raises(ConfigError) as refused:
        check_device(Device.cuda)
    for words in ("device=cuda", "no GPU", "device=cpu", "model.weights=random", "recipe=quickstart"):
        assert words in str(refused.value)
    assert "bitsandbytes" not in str(refused.value)


@pytest.mark.parametrize("asked", [Device.cpu, Device.auto])
def test_nobody_asks_nobody_looks(monkeypatch, asked):
    monkeypatch.setattr(ctypes, "CDLL", None)
    check_device(asked)


def test_a_driver_is_enough_here(monkeypatch):
    monkeypatch.setattr(ctypes, "CDLL", library(True))
    check_device(Device.cuda)


def test_other_systems_are_torchs_to_judge(monkeypatch):
    monkeypatch.setattr(device.sys, "platform", "win32")
    monkeypatch.setattr(ctypes, "CDLL", None)
    check_device(Device.cuda)
