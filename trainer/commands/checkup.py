"""What this machine can do, one row a part, and one fix a problem. Asks nothing of the network."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import inspect
import logging
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from trainer.device.driver import find_driver, mend
from trainer.redact import address, redacted
from trainer.units import GIB

OK, WARN, PROBLEM = "ok", "warn", "problem"
FLOOR_GIB, ROOMY_GIB = 1, 20
"""Free disk below which a run would fail, and below which an 8B model (15 GiB of weights) does not fit."""
NF4_ERROR = (0.05, 0.09)
"""Mean absolute error of NF4 on normally distributed weights of deviation 1, blocks of 64: 0.073."""
LIBRARIES = "transformers peft accelerate datasets tokenizers safetensors huggingface_hub hydra-core".split()


class Finding(NamedTuple):
    part: str
    state: str
    found: str
    fix: str = ""
    """the one line that helps; empty where all is well"""


def examine(part: str, check: Callable[[], Iterator[Finding]]) -> list[Finding]:
    """The rows of one check; a check that fails is a row too, and the others still run."""
    rows: list[Finding] = []
    try:
        rows.extend(check())
    except Exception as error:
        first = (str(error).strip() or "no message").split("\n")[0]
        rows.append(
            Finding(
                part, PROBLEM, f"{type(error).__name__}: {redacted(first)}", f"reinstall what {part} needs: ./launch.sh"
            )
        )
    return rows


def python() -> Iterator[Finding]:
    version = ".".join(str(n) for n in sys.version_info[:3])
    yield Finding("Python", OK, version)


def libraries() -> Iterator[Finding]:
    missing = [name for name in LIBRARIES if _version(name) is None]
    found = ", ".join(f"{name} {_version(name)}" for name in LIBRARIES if name not in missing)
    if missing:
        yield Finding(
            "libraries", PROBLEM, f"missing: {', '.join(missing)}; {found}", f"pip install {' '.join(missing)}"
        )
    else:
        yield Finding("libraries", OK, found)


def torch_and_driver() -> Iterator[Finding]:
    import torch

    cuda, driver = torch.version.cuda, find_driver()
    found = f"torch {torch.__version__}, built for {'CUDA ' + cuda if cuda else torch.version.hip or 'the CPU'}"
    found += f"; {driver or 'no NVIDIA driver'}"
    if torch.cuda.is_available() or driver is None:
        yield Finding("torch", OK, found)
    else:
        yield Finding("torch", PROBLEM, f"{found}; torch sees no GPU", mend(driver, cuda))


def gpus() -> Iterator[Finding]:
    import torch

    if not torch.cuda.is_available():
        fix = "for small runs use device=cpu or recipe=quickstart; GPU recipes need a GPU (trainer plan works without)"
        yield Finding("GPU", WARN, "none that torch can use", fix)
        return
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        capability = torch.cuda.get_device_capability(index)
        found = f"{torch.cuda.get_device_name(index)}, compute capability {capability[0]}.{capability[1]}, "
        found += f"{free / GIB:.1f} of {total / GIB:.1f} GiB free"
        if free < total / 2:
            yield Finding(f"GPU {index}", WARN, found, "another process holds its memory: nvidia-smi names it")
        else:
            yield Finding(f"GPU {index}", OK, found)
        with torch.cuda.device(index):
            bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
        if bf16:
            yield Finding(f"GPU {index} bf16", OK, "yes: precision=auto picks bf16")
        else:
            yield Finding(f"GPU {index} bf16", WARN, "no", "precision=auto picks fp16, with a loss scale that adapts")


def quantisation() -> Iterator[Finding]:
    """A round trip through NF4, really run on the device that a run would use."""
    logging.getLogger("bitsandbytes").setLevel(logging.CRITICAL)
    try:
        import bitsandbytes
        import torch
    except ImportError as error:
        fix = "pip install bitsandbytes; without it use quant=none and optim=adamw"
        yield Finding("bitsandbytes", PROBLEM, f"cannot be imported: {str(error).splitlines()[0]}", fix)
        return
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    weights = torch.randn(256, 64, generator=torch.Generator().manual_seed(0)).to(device)
    name = f"bitsandbytes {_version('bitsandbytes') or bitsandbytes.__version__}"
    try:
        stored, state = bitsandbytes.functional.quantize_4bit(weights, quant_type="nf4", compress_statistics=True)
        error = (bitsandbytes.functional.dequantize_4bit(stored, state) - weights).abs().mean().item()
    except Exception as failure:
        fix = "install a bitsandbytes built for this torch and CUDA; `python -m bitsandbytes` says more"
        said = (str(failure).strip() or type(failure).__name__).splitlines()[0]
        yield Finding("bitsandbytes", PROBLEM, f"{name} fails on {device.type}: {said}", fix)
        return
    found = f"{name}: NF4 on {device.type} and back, mean error {error:.3f} of a deviation"
    if NF4_ERROR[0] < error < NF4_ERROR[1]:
        yield Finding("bitsandbytes", OK, found)
    else:
        yield Finding("bitsandbytes", PROBLEM, f"{found} (0.073 is right)", "install another release of bitsandbytes")


def kernels() -> Iterator[Finding]:
    import torch

    gpu = torch.cuda.is_available()
    missing = _missing_of_varlen()
    if missing is not None:
        yield Finding("varlen attention", PROBLEM, missing, "install torch 2.11 or later")
    elif gpu and torch.cuda.get_device_capability() >= (8, 0):
        yield Finding("varlen attention", OK, "in torch: one flash kernel for a packed row")
    elif gpu:
        fix = "packed rows use a block mask on this GPU: keep train.micro_batch_tokens small, or packing=none"
        yield Finding("varlen attention", WARN, "in torch, but it needs compute capability 8.0", fix)
    else:
        yield Finding("varlen attention", OK, "in torch, for GPUs; on this CPU one kernel call per sample")
    chunked = hasattr(torch.nn.functional, "linear_cross_entropy")
    found = "in torch: loss=chunked uses it" if chunked else "not in this torch: loss=chunked computes chunks itself"
    yield Finding("linear_cross_entropy", OK, found)
    for part, module, package, use in (
        ("flash-attn", "flash_attn", "flash-attn", "the trainer's flash kernel is torch's"),
        ("liger", "liger_kernel", "liger-kernel", "loss=liger, kernels=liger"),
        ("cut cross entropy", "cut_cross_entropy", "cut-cross-entropy", "loss=cut_cross_entropy"),
    ):
        if importlib.util.find_spec(module) is None:
            yield Finding(part, OK, f"not installed; optional ({use})")
        elif gpu or part == "flash-attn":
            yield Finding(part, OK, f"{_version(package) or 'installed'} ({use})")
        else:
            yield Finding(part, OK, f"{_version(package) or 'installed'}, for GPUs only ({use})")
    for library, extra, use in (
        ("pytorch-optimizer", "optimizers", "optim=galore_adamw, optim=adamw_schedule_free"),
        ("gguf", "gguf", "merge.format=gguf"),
        ("lm-eval", "tasks", "evaluate tasks="),
    ):
        found = _version(library) or f"not installed; optional: pip install 'trainer[{extra}]'"
        yield Finding(library, OK, f"{found} ({use})")


def _missing_of_varlen() -> str | None:
    """What torch's varlen kernel lacks of what the packed attention gives it; None where all is there."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return "not in this torch"
    wanted = ("cu_seq_q", "cu_seq_k", "max_q", "max_k", "scale", "window_size")
    missing = [name for name in wanted if name not in inspect.signature(varlen_attn).parameters]
    return f"in torch, but without {', '.join(missing)}" if missing else None


def compilers() -> Iterator[Finding]:
    """What kernels=compiled needs: Triton on a GPU, a C++ compiler on a CPU."""
    import torch

    from trainer.model.kernels import cpp_compiler

    part, without = "torch.compile", "; kernels=compiled is not possible, everything else is"
    if torch.cuda.is_available():
        found = importlib.util.find_spec("triton") is not None
        yield Finding(part, OK, "Triton is there (kernels=compiled)" if found else f"no Triton{without}")
        return
    compiler = cpp_compiler()
    yield Finding(part, OK, f"{compiler} (kernels=compiled)" if compiler else f"no C++ compiler{without}")


def cpu() -> Iterator[Finding]:
    import psutil
    import torch

    from trainer.model.precision import cpu_has_bf16

    memory = psutil.virtual_memory()
    found = f"{os.cpu_count()} cores, {torch.get_num_threads()} threads used; "
    found += f"{memory.available / GIB:.1f} of {memory.total / GIB:.1f} GiB of memory free"
    yield Finding("CPU", OK, found)
    found = "instructions for it: precision=auto picks bf16" if cpu_has_bf16() else "no: precision=auto picks fp32"
    yield Finding("CPU bf16", OK, found)


def disk() -> Iterator[Finding]:
    from huggingface_hub import constants

    yield _disk("disk at outputs/", Path("outputs"), ROOMY_GIB / 4, "output_dir=")
    yield _disk("disk at the hub's cache", Path(constants.HF_HUB_CACHE), ROOMY_GIB, "HF_HOME=")


def hub() -> Iterator[Finding]:
    from huggingface_hub import constants, get_token

    endpoint = address(constants.ENDPOINT)
    found = f"{endpoint}; {'a token is there' if get_token() is not None else 'no token (gated models need one)'}"
    if constants.is_offline_mode():
        fix = "unset HF_HUB_OFFLINE to download; what is in the cache is used without"
        yield Finding("hub", WARN, f"{found}; offline (HF_HUB_OFFLINE)", fix)
    else:
        yield Finding("hub", OK, f"{found}; online")


def wandb() -> Iterator[Finding]:
    if _version("wandb") is None:
        yield Finding("W&B", PROBLEM, "not installed", "pip install wandb, or use track=local")
        return
    from trainer.tracking.wandb import Mode, resolve_mode
    from trainer.tracking.wandb_host import has_key, host

    key, mode = has_key(), resolve_mode(Mode.auto).value
    found = f"{address(host())}; {'a key is there' if key else 'no key'}; track.mode=auto is {mode}"
    if key:
        yield Finding("W&B", OK, found)
    else:
        yield Finding("W&B", WARN, found, "to see runs online: wandb login; offline runs are sent later by wandb sync")


def hydra() -> Iterator[Finding]:
    from hydra.core.config_store import ConfigStore
    from hydra.core.plugins import Plugins

    Plugins.instance()  # registers what is installed
    for part in ("launcher", "sweeper"):
        names = [name.removesuffix(".yaml") for name in ConfigStore.instance().list(f"hydra/{part}")]
        yield Finding(f"Hydra {part}s", OK, ", ".join(sorted(names)))


CHECKS: dict[str, Callable[[], Iterator[Finding]]] = {
    "Python": python,
    "libraries": libraries,
    "torch": torch_and_driver,
    "GPU": gpus,
    "bitsandbytes": quantisation,
    "kernels": kernels,
    "torch.compile": compilers,
    "CPU": cpu,
    "disk": disk,
    "hub": hub,
    "W&B": wandb,
    "Hydra": hydra,
}


def _disk(part: str, folder: Path, roomy_gib: float, setting: str) -> Finding:
    folder = Path(os.path.abspath(folder))
    there = next(place for place in (folder, *folder.parents) if place.exists())
    free = shutil.disk_usage(there).free / GIB
    found = f"{free:.1f} GiB free ({folder})"
    elsewhere = f"make room, or set {setting} to a folder on another disk"
    if not os.access(there, os.W_OK):
        return Finding(part, PROBLEM, f"{folder} cannot be written", f"set {setting} to a folder that you may write")
    if free < FLOOR_GIB:
        return Finding(part, PROBLEM, found, elsewhere)
    if free < roomy_gib:
        return Finding(part, WARN, found, elsewhere)
    return Finding(part, OK, found)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
