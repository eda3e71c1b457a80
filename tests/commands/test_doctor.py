"""doctor: every part has its row, a broken part is a problem with a fix and never a failure, no secret is shown."""

from __future__ import annotations

import importlib.metadata
import shutil
import sys
import types
from collections import namedtuple

import pytest
import torch

from trainer import __main__ as program
from trainer.commands import checkup as doctor
from trainer.commands.checkup import CHECKS, OK, PROBLEM, WARN, examine
from trainer.commands.doctor import run
from trainer.device.driver import Driver
from trainer.errors import ConfigError
from trainer.model import precision

SECRET = "abcdefghijklmnopqrstuvwxyz0123456789abcd"
PARTS = (
    "Python,libraries,torch,GPU,bitsandbytes,varlen attention,linear_cross_entropy,flash-attn,liger,cut cross entropy,"
    "torch.compile,CPU,CPU bf16,disk at outputs/,disk at the hub's cache,hub,W&B,Hydra launchers,Hydra sweepers"
).split(",")


def only(part: str) -> doctor.Row:
    (row,) = examine(part, CHECKS[part])
    return row


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.parametrize("compiler", ["/usr/bin/g++", None])
def test_what_compiled_blocks_need_is_told(no_gpu, monkeypatch, compiler):
    from trainer.model import kernels

    monkeypatch.setattr(kernels, "cpp_compiler", lambda: compiler)
    row = only("torch.compile")
    assert (compiler or "no C++ compiler") in row.found and row.state == OK


def test_every_part_has_a_row_with_its_state_and_the_code_is_0(no_gpu, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert program.dispatch(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for part in PARTS:
        (line,) = [line for line in lines if line.strip().startswith(f"{part}  ")]
        assert line.split(part, 1)[1].split()[0] in (OK, WARN, PROBLEM), line
    assert all(f"torch {torch.__version__}" in line for line in lines if line.startswith(" torch "))
    assert list(tmp_path.iterdir()) == []


def test_what_is_not_ok_says_how_to_help_and_what_is_ok_does_not():
    rows = [row for part, check in CHECKS.items() for row in examine(part, check)]
    assert all((row.fix == "") == (row.state == OK) and "\n" not in row.fix for row in rows)


def test_tokens_and_keys_are_never_shown(monkeypatch, capsys):
    monkeypatch.setenv("HF_TOKEN", f"hf_{SECRET}")
    monkeypatch.setenv("WANDB_API_KEY", SECRET)
    monkeypatch.delenv("WANDB_MODE")
    monkeypatch.setenv("WANDB_BASE_URL", f"https://user:{SECRET}@wandb.example")
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", f"https://user:{SECRET}@hub.example")

    def fails():
        raise ValueError(f"no entry for hf_{SECRET} {SECRET}")
        yield

    monkeypatch.setitem(CHECKS, "broken", fails)
    assert run([]) == 0
    captured = capsys.readouterr()
    assert SECRET not in captured.out + captured.err and "user:" not in captured.out
    assert "https://hub.example; a token is there" in captured.out
    assert "https://wandb.example; a key is there; track.mode=auto is online" in captured.out
    assert "ValueError: no entry for ***" in captured.out and "1 problem" in captured.out


def test_without_token_and_key_it_says_so(monkeypatch):
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    monkeypatch.setattr("trainer.tracking.wandb_host.has_key", lambda: False)
    monkeypatch.delenv("WANDB_MODE")
    assert "no token" in only("hub").found
    row = only("W&B")
    assert row.state == WARN and "no key; track.mode=auto is offline" in row.found and "wandb login" in row.fix


@pytest.mark.parametrize(("offline", "state", "said"), [(True, WARN, "offline"), (False, OK, "online")])
def test_the_hubs_offline_flag_is_told(offline, state, said, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.is_offline_mode", lambda: offline)
    row = only("hub")
    assert row.state == state and f"; {said}" in row.found


def test_a_missing_bitsandbytes_is_a_problem_with_its_fix(monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    row = only("bitsandbytes")
    assert row.state == PROBLEM and "cannot be imported" in row.found and "pip install bitsandbytes" in row.fix


def test_the_round_trip_is_really_run(monkeypatch, no_gpu):
    import bitsandbytes

    row = only("bitsandbytes")
    assert row.state == OK and "NF4 on cpu and back, mean error 0.07" in row.found
    back = bitsandbytes.functional.dequantize_4bit
    monkeypatch.setattr(bitsandbytes.functional, "dequantize_4bit", lambda *a: -back(*a))
    assert only("bitsandbytes").state == PROBLEM

    def fails(*_, **__):
        raise RuntimeError("no kernel image is available\nmore")

    monkeypatch.setattr(bitsandbytes.functional, "quantize_4bit", fails)
    row = only("bitsandbytes")
    assert row.state == PROBLEM and row.found.endswith("fails on cpu: no kernel image is available")


def test_a_missing_library_is_a_problem_with_its_fix(monkeypatch):
    known = importlib.metadata.version

    def version(name):
        if name == "peft":
            raise importlib.metadata.PackageNotFoundError(name)
        return known(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    row = only("libraries")
    assert row.state == PROBLEM and row.found.startswith("missing: peft;") and row.fix == "pip install peft"


@pytest.mark.parametrize(
    ("cuda", "driver", "state", "said"),
    [
        (None, None, OK, "no NVIDIA driver"),
        (None, (12, 4), PROBLEM, "install a torch built for CUDA 12.4"),
        ("13.0", (12, 4), PROBLEM, "update the driver to one for CUDA 13.0"),
        ("12.6", (12, 4), PROBLEM, "CUDA_VISIBLE_DEVICES"),
    ],
)
def test_torchs_cuda_is_held_against_the_driver(cuda, driver, state, said, monkeypatch, no_gpu):
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(doctor, "find_driver", lambda: driver and Driver(driver, "535.161.08"))
    row = only("torch")
    assert row.state == state and said in row.found + row.fix
    assert ("driver 535.161.08 goes up to CUDA 12.4" in row.found) == (driver is not None)


def varlen_2_10(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, is_causal=False, scale=None):
    """As it was before it had a window."""


@pytest.mark.parametrize("kernel", [varlen_2_10, None])
def test_a_varlen_kernel_of_another_signature_is_a_problem(kernel, monkeypatch, no_gpu):
    stub = types.ModuleType("torch.nn.attention.varlen")
    if kernel is not None:
        stub.varlen_attn = kernel
    monkeypatch.setitem(sys.modules, "torch.nn.attention.varlen", stub)
    (row,) = [row for row in examine("kernels", CHECKS["kernels"]) if row.part == "varlen attention"]
    assert row.state == PROBLEM and "torch 2.11" in row.fix
    assert row.found == ("not in this torch" if kernel is None else "in torch, but without window_size")


@pytest.mark.parametrize(("bf16", "free", "states"), [(True, 70, [OK, OK]), (False, 8, [WARN, WARN])])
def test_a_gpu_tells_its_memory_and_bf16(bf16, free, states, monkeypatch):
    from contextlib import nullcontext

    for name, value in {
        "is_available": True,
        "device_count": 1,
        "mem_get_info": (free << 30, 80 << 30),
        "get_device_capability": (8, 0),
        "get_device_name": "Card",
        "is_bf16_supported": bf16,
        "device": nullcontext(),
    }.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value, **__: value)
    rows = examine("GPU", CHECKS["GPU"])
    assert [row.state for row in rows] == states
    assert rows[0].found == f"Card, compute capability 8.0, {free}.0 of 80.0 GiB free"


@pytest.mark.parametrize(("free_gib", "state"), [(0.5, PROBLEM), (10, WARN), (100, OK)])
def test_the_disk_of_the_hubs_cache_is_looked_at_before_it_exists(free_gib, state, monkeypatch, tmp_path):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "not" / "yet"))
    usage = namedtuple("usage", "total used free")
    asked = []
    monkeypatch.setattr(shutil, "disk_usage", lambda path: asked.append(path) or usage(0, 0, int(free_gib * 2**30)))
    row = examine("disk", CHECKS["disk"])[1]
    assert row.state == state and asked[1] == tmp_path
    assert (f"{free_gib:.1f} GiB free" in row.found) and (("HF_HOME" in row.fix) == (state != OK))


def test_the_cpus_instructions_are_what_precision_auto_follows(monkeypatch):
    for there, name in ((False, "fp32"), (True, "bf16")):
        monkeypatch.setattr(precision, "cpu_has_bf16", lambda there=there: there)
        assert examine("CPU", CHECKS["CPU"])[1].found.endswith(f"picks {name}")


def test_arguments_are_refused():
    with pytest.raises(ConfigError, match="doctor takes no arguments, not x=1"):
        run(["x=1"])
