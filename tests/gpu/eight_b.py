"""QLoRA steps of Llama-3-8B's shape, random weights: predicted and measured peak, tokens a second, syncs."""

from __future__ import annotations

import gc
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.factories import random_tokens
from tests.gpu import peers
from tests.gpu.prove import Setting, attempt
from trainer.config.compose import compose
from trainer.data.batches.batch import MicroBatch, collate
from trainer.memory.predict.planner import Planner
from trainer.memory.predict.speed import recomputed_share
from trainer.memory.predict.trace import Shape
from trainer.model import attention
from trainer.model.checkpointing import NoCheckpointing, blocks_of
from trainer.model.fused import modules as fused
from trainer.model.loading.base import load_base, load_config
from trainer.model.recompute import attention_of
from trainer.training.throughput import count_arithmetic, matmul_flops
from trainer.units import GIB

POLICIES = ("full", "selective", "none")
LENGTHS = (2048, 8192, 32_768)
OTHER_POLICIES = ("attention", "sqrt", "every_k")
"""For the shortest row only, when all else is measured: their plans against the card."""


def results(setting: Setting) -> Iterator[dict[str, Any]]:
    """From the shortest rows on; what does not fit in the time is named."""
    device, dry = setting.device, setting.dry
    rate = matmul_flops(device, torch.bfloat16)
    model = Model(device, dry)
    if any(peers.installed(kind) for kind in peers.PEERS):
        model.save(setting.scratch / "model")
    model.attach()
    lengths = (128, 256) if dry else LENGTHS
    cases = [(length, policy) for length in lengths for policy in POLICIES]
    cost = {}  # wall seconds of the measurement before, by policy: rows four times as long take five times as long
    for length, policy in [*cases, *((lengths[0], policy) for policy in OTHER_POLICIES)]:
        row = {"tokens": length, "checkpointing": policy, **model.about}
        if setting.seconds_left < 5 * cost.get(policy, 0.0):
            yield {**row, "left_out": "no time left"}
            continue
        began = time.perf_counter()
        yield attempt(row, lambda length=length, policy=policy: model.measure(policy, length, rate))
        cost[policy] = time.perf_counter() - began


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
        row: dict[str, Any] = {}
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
