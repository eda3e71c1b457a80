"""The driver's library is a stand-in here: what it answers is what is told."""

import ctypes

import pytest

from trainer.device import driver
from trainer.device.driver import Driver, find_driver, mend, num_cards

PROC = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.161.08  Tue Mar  5 22:42:15 UTC 2024\nGCC version: 12.3.0\n"


class Library:
    """libcuda of a machine: its CUDA as CUDA numbers it, and its cards; cuInit fails without any."""

    def __init__(self, cuda: int, cards: int):
        self.cuda, self.cards = cuda, cards

    def cuDriverGetVersion(self, version):
        version._obj.value = self.cuda
        return 0

    def cuInit(self, flags):
        return 0 if self.cards else 100

    def cuDeviceGetCount(self, count):
        count._obj.value = self.cards
        return 0


@pytest.fixture
def machine(monkeypatch, tmp_path):
    def make(cuda: int | None = None, cards: int = 0, proc: str | None = None):
        def load(name):
            if cuda is None:
                raise OSError("no such file")
            return Library(cuda, cards)

        monkeypatch.setattr(ctypes, "CDLL", load)
        file = tmp_path / "version"
        if proc is not None:
            file.write_text(proc)
        monkeypatch.setattr(driver, "KERNEL_MODULE", (file,))

    return make


def test_the_driver_and_its_release(machine):
    machine(12040, cards=2, proc=PROC)
    assert find_driver() == Driver((12, 4), "535.161.08") and num_cards() == 2
    assert str(find_driver()) == "the NVIDIA driver 535.161.08 goes up to CUDA 12.4"
    assert driver.kernel_module_loaded()


def test_no_driver_no_cards(machine):
    machine(None)
    assert find_driver() is None and num_cards() == 0 and not driver.kernel_module_loaded()


def test_a_driver_whose_cards_are_hidden(machine):
    """CUDA_VISIBLE_DEVICES= : cuInit finds no device."""
    machine(13000, cards=0)
    assert str(find_driver()) == "the NVIDIA driver goes up to CUDA 13.0" and num_cards() == 0


@pytest.mark.parametrize(
    ("built_for", "said"),
    [
        (None, "install a torch built for CUDA 12.4 or earlier"),
        ("13.0", "update the driver to one for CUDA 13.0, or install a torch for 12.x"),
        ("12.8", "CUDA_VISIBLE_DEVICES"),
    ],
)
def test_what_helps(built_for, said):
    assert said in mend(Driver((12, 4), None), built_for)
