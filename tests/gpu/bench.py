"""What bench.sh runs: twins first, then speed and memory of the QLoRA step; --dry does it small, on a CPU."""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.factories import llama, random_tokens
from trainer.config.compose import compose
from trainer.data.batch import MicroBatch, collate
from trainer.model import attention, fused
from trainer.model.load import load_base, load_config, skeleton
from trainer.training.throughput import count_arithmetic, matmul_flops

GIB = 1024**3
POLICIES = ("full", "none")
LENGTHS = (2048, 8192, 32_768)
DEADLINE_SECONDS = 420
"""No measurement begins later; bench.sh ends the process at 480."""


def main() -> None:
    dry = "--dry" in sys.argv[1:]
    if not dry and not torch.cuda.is_available():
        sys.exit("no GPU that torch can use; bash tests/gpu/bench.sh --dry runs small on a CPU")
    device = torch.device("cpu" if dry else "cuda")
    started, rows = time.perf_counter(), []
    name = "cpu, dry run" if dry else torch.cuda.get_device_name(device)
    rate = matmul_flops(device, torch.bfloat16)
    for row in [
        {"device": name, "torch": torch.__version__, "matmul_tflops_bf16": rate / 1e12},
        *twins(device, dry),
    ]:
        rows.append(row)
        print(json.dumps(row), flush=True)
    for length in (256,) if dry else LENGTHS:
        for policy in POLICIES:
            if time.perf_counter() - started > DEADLINE_SECONDS:
                row = {"tokens": length, "checkpointing": policy, "left_out": "no time left"}
            else:
                row = qlora(device, policy, length, rate, dry)
            rows.append(row)
            print(json.dumps(row), flush=True)
    if "OUT" in os.environ:
        Path(os.environ["OUT"], "results.json").write_text(json.dumps(rows, indent=1), encoding="utf-8")
    failed = [row for row in rows if row.get("equal") is False]
    sys.exit(f"{len(failed)} paths differ from their twins" if failed else 0)


def twins(device: torch.device, dry: bool) -> Iterator[dict[str, Any]]:
    """Relative differences of fast paths and their slow twins in bf16, each against the twin in fp32 too."""
    lengths = [130, 70, 56] if dry else [1500, 400, 148]
    batch = collate(random_tokens(lengths), np.arange(3), packed=True).to(device)
    shape = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2}

    def gradients(name: str, use_fused: bool, loss: str, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        config = compose(
            ["data.path=x", "adapter.r=8", f"loss={loss}", "quant=nf4", f"adapter.fused={use_fused}"]
        ).config
        model = llama(name, **shape)
        model.to(torch.bfloat16).to(dtype)  # the same weights in both dtypes, so that they get the same codes
        for parameter in list(model.get_decoder().layers.named_modules()):
            path, module = parameter
            if isinstance(module, torch.nn.Linear):
                parent, _, child = path.rpartition(".")
                linear = config.quant.linear(module, dtype, device)
                linear.support_avx512bf16_for_cpu = False
                setattr(model.get_decoder().layers.get_submodule(parent), child, linear)
        model.to(device)
        torch.manual_seed(0)
        adapted = config.adapter.attach(model).train()
        for key, parameter in adapted.named_parameters():
            if "lora_B" in key:
                torch.nn.init.normal_(parameter, std=0.1)
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=dtype is torch.bfloat16):
            (config.loss.sum(model, batch) / batch.num_targets).backward()
        return {key: p.grad for key, p in adapted.named_parameters() if p.grad is not None}

    def distance(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> float:
        return max(((left[key] - g).norm() / g.norm()).item() for key, g in right.items())

    truth = gradients("sdpa", False, "full", torch.float32)
    slow = distance(gradients("sdpa", False, "full", torch.bfloat16), truth)
    paths = {
        "fused": ("sdpa", True, "full"),
        "packed attention": (attention.PACKED, False, "full"),
        "chunked loss": ("sdpa", False, "chunked"),
        "all": (attention.PACKED, True, "chunked"),
    }
    for kernel in ("liger", "cut_cross_entropy"):
        if not dry and _installed(kernel, device):
            paths[f"{kernel} loss"] = ("sdpa", False, kernel)
    for path, choice in paths.items():
        fast = distance(gradients(*choice, torch.bfloat16), truth)
        yield {"path": path, "error_bf16": fast, "twin_error_bf16": slow, "equal": fast <= 1.5 * slow}


def _installed(loss: str, device: torch.device) -> bool:
    from trainer.errors import ConfigError

    try:
        compose(["data.path=x", f"loss={loss}"]).config.loss.check(device)
    except ConfigError:
        return False
    return True


def qlora(device: torch.device, policy: str, length: int, rate: float, dry: bool) -> dict[str, Any]:
    """Llama-3-8B's shape, NF4, LoRA r=16 on all linear layers, one row of one sample, a few steps."""
    small = ["model.architecture.num_hidden_layers=2", "model.architecture.hidden_size=256",
             "model.architecture.intermediate_size=512", "model.architecture.num_attention_heads=4",
             "model.architecture.num_key_value_heads=2", "model.architecture.vocab_size=1024"]  # fmt: skip
    config = compose(["recipe=qlora_llama3_8b", "model.weights=random", f"checkpointing={policy}", "track=local",
                      *(small if dry else [])]).config  # fmt: skip
    dtypes = config.precision.build(device)
    model_config = load_config(config.model)
    chosen, why = attention.choose(model_config, device, dtypes.compute)
    row: dict[str, Any] = {"tokens": length, "checkpointing": policy, "attention": f"{chosen} ({why})"}
    try:
        base = load_base(config.model, model_config, config.quant, dtypes, device, chosen)
        adapted = config.adapter.attach(base).train()
        config.checkpointing.apply(base)
        optimizer = config.optim.build([p for p in adapted.parameters() if p.requires_grad])
        vocabulary = model_config.get_text_config().vocab_size
        host = collate(random_tokens([length], vocabulary), np.array([0]), packed=True)
        trainable = sum(p.numel() for p in adapted.parameters() if p.requires_grad)
        flops = count_arithmetic(skeleton(model_config), trainable, False).flops(host)
        seconds = timed_steps(config, base, optimizer, dtypes, host, device)
        row |= {"forward": fused.describe(adapted), "seconds": seconds, "tokens_per_second": length / seconds}
        row["mfu"] = flops / seconds / rate
        if device.type == "cuda":
            row["peak_allocated_gib"] = torch.cuda.max_memory_allocated() / GIB
            row["peak_reserved_gib"] = torch.cuda.max_memory_reserved() / GIB
    except torch.OutOfMemoryError as error:
        row["out_of_memory"] = str(error).splitlines()[0]
    base = adapted = optimizer = None
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    return row


def timed_steps(config, base, optimizer, dtypes, host: MicroBatch, device: torch.device) -> float:
    """Seconds of an optimizer step: the best of three after one that warms up."""
    seconds = []
    for _ in range(4):
        if device.type == "cuda":
            torch.cuda.synchronize()
        began = time.perf_counter()
        with dtypes.autocast():
            loss = config.loss.sum(base, host.to(device)) / host.num_targets
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    return min(seconds[1:])


if __name__ == "__main__":
    main()
