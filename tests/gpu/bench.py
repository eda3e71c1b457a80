"""What bench.sh runs: twins first, then speed and memory of the QLoRA step; --dry does it small, on a CPU."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.factories import llama, random_tokens
from trainer.config.compose import compose
from trainer.data.batches.batch import MicroBatch, collate
from trainer.memory.predict.planner import Planner
from trainer.memory.predict.speed import recomputed_share
from trainer.memory.predict.trace import Shape
from trainer.model import attention
from trainer.model.checkpointing import NoCheckpointing, attention_of, blocks_of
from trainer.model.fused import modules as fused
from trainer.model.loading.base import load_base, load_config
from trainer.training.throughput import count_arithmetic, matmul_flops

GIB = 1024**3
POLICIES = ("full", "selective", "none")
LENGTHS = (2048, 8192, 32_768)
PEERS = ("trl", "unsloth")
DEADLINE_SECONDS = 440
"""No measurement begins later or is expected to end later; bench.sh ends the process at 480."""


def main() -> None:
    dry = "--dry" in sys.argv[1:]
    if not dry and not torch.cuda.is_available():
        sys.exit("no GPU that torch can use; bash tests/gpu/bench.sh --dry runs small on a CPU")
    device = torch.device("cpu" if dry else "cuda")
    rows = []
    for row in measurements(device, dry):
        rows.append(row)
        print(json.dumps(row), flush=True)
    if "OUT" in os.environ:
        Path(os.environ["OUT"], "results.json").write_text(json.dumps(rows, indent=1), encoding="utf-8")
    failed = [row for row in rows if row.get("equal") is False]
    sys.exit(f"{len(failed)} paths differ from their twins" if failed else 0)


def measurements(device: torch.device, dry: bool) -> Iterator[dict[str, Any]]:
    """Twins, then our steps from the shortest rows on, then the peers; what does not fit in the time is named."""
    end = time.perf_counter() + DEADLINE_SECONDS
    name = "cpu, dry run" if dry else torch.cuda.get_device_name(device)
    rate = matmul_flops(device, torch.bfloat16)
    yield {"device": name, "torch": torch.__version__, "matmul_tflops_bf16": rate / 1e12}
    yield from twins(device, dry)
    with tempfile.TemporaryDirectory() as folder:
        model = Model(device, dry)
        model.save(Path(folder))
        model.attach()
        lengths = (128, 256) if dry else LENGTHS
        cost = {}  # wall seconds of the measurement before, by policy: rows four times as long take five times as long
        for length in lengths:
            for policy in POLICIES:
                began = time.perf_counter()
                if began + 5 * cost.get(policy, 0.0) > end:
                    yield {"tokens": length, "checkpointing": policy, "left_out": "no time left"}
                    continue
                yield model.measure(policy, length, rate)
                cost[policy] = time.perf_counter() - began
        del model
        release(device)
        for length in lengths[:2]:
            for kind in PEERS:
                left = end - time.perf_counter()
                if left <= 0:
                    yield {"peer": kind, "tokens": length, "checkpointing": "full", "left_out": "no time left"}
                else:
                    yield peer(kind, Path(folder), length, "full", left)


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


class Model:
    """Llama-3-8B's shape, random weights, NF4, LoRA r=16 on all linear layers: made once for all measurements."""

    def __init__(self, device: torch.device, dry: bool):
        small = ["model.architecture.num_hidden_layers=2", "model.architecture.hidden_size=256",
                 "model.architecture.intermediate_size=512", "model.architecture.num_attention_heads=4",
                 "model.architecture.num_key_value_heads=2", "model.architecture.vocab_size=1024"]  # fmt: skip
        self.words = ["recipe=qlora_llama3_8b", "model.weights=random", "track=local", "train.accumulation_steps=1",
                      "optim=adamw", f"device={device.type}", *(small if dry else [])]  # fmt: skip
        self.device = device
        config = compose(self.words).config
        self.dtypes = config.precision.build(device)
        self.config = load_config(config.model)
        self.attention, why = attention.choose(self.config, device, self.dtypes.compute)
        self.base = load_base(config.model, self.config, config.quant, self.dtypes, device, self.attention)
        self.vocabulary = self.config.get_text_config().vocab_size
        self.about = {"attention": f"{self.attention} ({why})"}

    def save(self, folder: Path) -> None:
        """For the peers, who load the very same quantised weights from a folder."""
        from transformers import AutoTokenizer

        from trainer.resources import resolve

        quantization = compose(self.words).config.quant.config(self.dtypes.compute)
        self.base.config.quantization_config = quantization
        self.base.save_pretrained(folder)
        del self.base.config.quantization_config
        AutoTokenizer.from_pretrained(resolve("embedded:tiny")).save_pretrained(folder)

    def attach(self) -> None:
        """The adapter; what was saved before has none."""
        self.adapted = compose(self.words).config.adapter.attach(self.base).train()
        self.about["forward"] = fused.describe(self.adapted)
        self.trainable = [p for p in self.adapted.parameters() if p.requires_grad]

    def measure(self, policy: str, length: int, rate: float) -> dict[str, Any]:
        """Steps on one row of one sample."""
        row: dict[str, Any] = {"tokens": length, "checkpointing": policy, **self.about}
        config = compose([*self.words, f"checkpointing={policy}", f"data.max_length={length}",
                          f"train.micro_batch_tokens={length}"]).config  # fmt: skip
        shape = Shape((length,), length - 1, packed=True)
        planner = Planner(config, load_config(config.model), shape, self.dtypes)
        row["predicted_peak_gib"] = planner.predict().peak / GIB
        optimizer = config.optim.build(self.trainable)
        host = collate(random_tokens([length], self.vocabulary, targets=2.0), np.array([0]), packed=True)
        count = count_arithmetic(planner.skeleton, sum(p.numel() for p in self.trainable), False)
        try:
            reset(self.base)
            config.checkpointing.apply(self.base)
            release(self.device)
            seconds, syncs = self.steps(config, optimizer, host)
        except torch.OutOfMemoryError as error:
            row["out_of_memory"] = str(error).splitlines()[0]
        else:
            recomputed = recomputed_share(planner, config.checkpointing)
            row |= {"seconds": seconds, "tokens_per_second": length / seconds, **syncs}
            row["mfu"] = count.flops(host) / seconds / rate
            row["roof_share"] = count.step_flops(host, recomputed) / seconds / rate
            if self.device.type == "cuda":
                row["peak_allocated_gib"] = torch.cuda.max_memory_allocated() / GIB
                row["peak_reserved_gib"] = torch.cuda.max_memory_reserved() / GIB
                row["prediction_error"] = row["predicted_peak_gib"] / row["peak_allocated_gib"] - 1
        for parameter in self.trainable:
            parameter.grad = None
        return row

    def steps(self, config, optimizer, host: MicroBatch) -> tuple[float, dict[str, int]]:
        """Seconds of an optimizer step: the best of three after one that warms up; and the last one's syncs."""
        seconds: list[float] = []
        syncs: dict[str, int] = {}
        for number in range(4):
            wait(self.device)
            began = time.perf_counter()
            with counting_syncs(self.device, syncs if number == 3 else {}, "syncs_micro_batch"):
                with self.dtypes.autocast():
                    loss = config.loss.sum(self.base, host.to(self.device)) / host.num_targets
                loss.backward()
            with counting_syncs(self.device, syncs if number == 3 else {}, "syncs_optimizer"):
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            del loss
            wait(self.device)
            seconds.append(time.perf_counter() - began)
        return min(seconds[1:]), syncs


@contextmanager
def counting_syncs(device: torch.device, counts: dict[str, int], name: str) -> Iterator[None]:
    """Times that the host waited for the device: torch's own sync-detecting mode on CUDA, reads of a value on a CPU."""
    if device.type == "cuda":
        torch.cuda.set_sync_debug_mode("warn")
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                yield
        finally:
            torch.cuda.set_sync_debug_mode("default")
        counts[name] = sum("synchronizing" in str(w.message) for w in caught)
        return
    with CountReads() as reads:
        yield
    counts[name] = reads.count


class CountReads(TorchDispatchMode):
    """Counts `.item()` and its like."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function is torch.ops.aten._local_scalar_dense.default
        return function(*args, **(kwargs or {}))


def reset(base: torch.nn.Module) -> None:
    """Takes back what an earlier policy set."""
    NoCheckpointing().apply(base)
    for block in blocks_of(base, NoCheckpointing()):
        chosen = attention_of(block)
        if chosen is not None:
            chosen.__dict__.pop("forward", None)


def release(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def peer(kind: str, folder: Path, length: int, policy: str, seconds_left: float) -> dict[str, Any]:
    """A peer's row, or why there is none."""
    row = {"peer": kind, "tokens": length, "checkpointing": policy}
    interpreter = os.environ.get("TRAINER_PEERS", sys.executable)
    probe = f"import importlib.util as u, sys; sys.exit(u.find_spec('{kind}') is None)"
    if subprocess.run([interpreter, "-c", probe]).returncode != 0:
        return {**row, "left_out": "not installed"}
    command = [interpreter, "-m", "tests.gpu.peers", kind, str(folder), str(length), policy]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=seconds_left)
    except subprocess.TimeoutExpired:
        return {**row, "left_out": "no time left"}
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"peer"')]
    if done.returncode != 0 or not lines:
        said = done.stderr.strip().splitlines() or ["nothing"]
        return {**row, "failed": said[-1]}
    return json.loads(lines[-1])


if __name__ == "__main__":
    main()
