"""Asking for a GPU without importing torch."""

import pytest

from trainer.device import find as device
from trainer.device.driver import Driver
from trainer.device.find import Device, check_device, no_gpu, unused_card
from trainer.errors import ConfigError


def test_no_driver_no_gpu_and_what_to_run_instead(monkeypatch):
    """C11."""
    monkeypatch.setattr(device, "find_driver", lambda: None)
    with pytest.raises(ConfigError) as refused:
        check_device(Device.cuda)
    for words in ("device=cuda", "no GPU", "device=cpu", "model.weights=random", "recipe=quickstart"):
        assert words in str(refused.value)
    assert "bitsandbytes" not in str(refused.value)


@pytest.mark.parametrize("asked", [Device.cpu, Device.auto])
def test_nobody_asks_nobody_looks(monkeypatch, asked):
    monkeypatch.setattr(device, "find_driver", None)
    check_device(asked)


def test_a_driver_is_enough_here(monkeypatch):
    monkeypatch.setattr(device, "find_driver", lambda: Driver((12, 4), None))
    check_device(Device.cuda)


def test_other_systems_are_torchs_to_judge(monkeypatch):
    monkeypatch.setattr(device.sys, "platform", "win32")
    monkeypatch.setattr(device, "find_driver", None)
    check_device(Device.cuda)


def test_a_driver_older_than_torch_is_named():
    """A CUDA 12 driver under CUDA 13 wheels is not "no GPU"."""
    said = no_gpu(Driver((12, 4), "535.161.08"), "13.0")
    for words in ("driver 535.161.08 goes up to CUDA 12.4", "built for CUDA 13.0", "update the driver", "device=cpu"):
        assert words in said
    assert "no GPU that torch can use" not in said


@pytest.mark.parametrize(("cards", "told"), [(1, True), (0, False)])
def test_auto_does_not_pass_over_a_card_in_silence(monkeypatch, cards, told):
    """But a card that CUDA_VISIBLE_DEVICES hides is one that nobody asks for."""
    monkeypatch.setattr(device, "find_driver", lambda: Driver((12, 4), None))
    monkeypatch.setattr(device, "num_cards", lambda: cards)
    said = unused_card(None)
    assert (said is not None) == told
    if told:
        assert "device=auto takes the CPU" in said and "install a torch built for CUDA 12.4" in said
