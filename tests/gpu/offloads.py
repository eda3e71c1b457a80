"""Offloading: gradients against resident twins, overlap over a 70B's blocks, the longest row of an 8B."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.checkpoint import checkpoint

from tests.factories import gradients, random_tokens
from tests.gpu.prove import Setting, attempt
from tests.gpu.twins import distance
from trainer.config.compose import compose
from trainer.config.schema import Config
from trainer.data.batches.batch import collate
from trainer.memory.predict.planner import Planner
from trainer.memory.predict.speed import EFFICIENCY, work
from trainer.model import attention
from trainer.model.checkpointing import NoCheckpointing, blocks_of
from trainer.model.fused.tiles import tile
from trainer.model.loading.base import load_base, load_config
from trainer.model.offload.streamed_base import streamed_base
from trainer.training.throughput import matmul_flops
from trainer.units import GIB

A = "model.architecture."
SMALL = [f"{A}hidden_size=256", f"{A}intermediate_size=512", f"{A}num_attention_heads=4", f"{A}num_key_value_heads=2",
         f"{A}vocab_size=1024"]  # fmt: skip
MEDIUM = [f"{A}hidden_size=2048", f"{A}intermediate_size=5632", f"{A}num_attention_heads=16",
          f"{A}num_key_value_heads=4", f"{A}vocab_size=4096"]  # fmt: skip


def results(setting: Setting) -> Iterator[dict[str, Any]]:
    device, dry = setting.device, setting.dry
    yield from twins(device, dry)
    for tokens in (64,) if dry else (512, 4096):
        for offload in ("none", "base_cpu", "base_disk"):
            if setting.seconds_left < 20:
                yield {"70b": "8 blocks", "offload": offload, "tokens": tokens, "left_out": "no time left"}
                continue
            what = {"70b": "8 blocks", "offload": offload, "tokens": tokens}
            yield attempt(what, lambda tokens=tokens, offload=offload: of_70b(device, tokens, offload, dry))
    rate = matmul_flops(device, torch.bfloat16)
    yield attempt({"what": "longest row"}, lambda: longest_row(device, rate, setting))


class Run:
    """A model of a configuration on the device, and its step."""

    def __init__(self, config: Config, device: torch.device, policy: Callable[[torch.nn.Module], None] | None = None):
        self.config, self.device, self.stream = config, device, None
        dtypes, model_config = config.precision.build(device), load_config(config.model)
        chosen, _ = attention.choose(model_config, device, dtypes.compute)
        torch.manual_seed(0)
        what = (config.model, model_config, config.quant, dtypes, device, chosen)
        source = config.offload.source(device, 0)
        if source is None:
            self.base = load_base(*what)
        else:
            self.base, self.stream = streamed_base(*what, source)
        torch.manual_seed(0)
        self.adapted = config.adapter.attach(self.base).train()
        tile(self.base, config.model.mlp_tiles)
        (policy or config.offload.policy(config.checkpointing).apply)(self.base)
        self.vocabulary, self.dtypes = model_config.vocab_size, dtypes

    def step(self, tokens: int) -> float:
        """Seconds of forward and backward of one sample of this length."""
        host = collate(random_tokens([tokens], self.vocabulary), np.array([0]), packed=True)
        self._finish()
        began = time.perf_counter()
        with self.dtypes.autocast():
            loss = self.config.loss.sum(self.base, host.to(self.device)) / host.num_targets
        loss.backward()
        self._finish()
        return time.perf_counter() - began

    def gradients(self, tokens: int) -> dict[str, torch.Tensor]:
        torch.manual_seed(1)
        self.step(tokens)
        return gradients(self.adapted)

    def _finish(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def close(self) -> None:
        if self.stream is not None:
            self.stream.close()
        self.base = self.adapted = self.stream = None
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()


def twins(device: torch.device, dry: bool) -> Iterator[dict[str, Any]]:
    """Gradients of every offloading against the resident model's, twice, so that buffers are used again."""
    tokens = 96 if dry else 2048
    words = ["recipe=qlora_llama3_8b", "track=local", "model.weights=random", "adapter.dropout=0.1",
             f"{A}num_hidden_layers=8", *(SMALL if dry else MEDIUM)]  # fmt: skip

    def found(more: list[str], policy=None) -> tuple[list[dict[str, torch.Tensor]], float]:
        run = Run(compose([*words, *more]).config, device, policy)
        both = [run.gradients(tokens), run.gradients(tokens)]
        seconds = min(run.step(tokens) for _ in range(3))
        run.close()
        return both, seconds

    def apart(left, right) -> float:
        return max(distance(a, b) for a, b in zip(left, right, strict=True))

    expected, kept = found([])
    again, _ = found([])
    allowed = 2 * apart(expected, again)  # two resident models: on a card flash's backward adds with atomics

    def trial(more: list[str], policy=None) -> dict[str, Any]:
        actual, seconds = found(more, policy)
        difference = apart(actual, expected)
        row = {"difference": difference, "allowed": allowed, "equal": difference <= allowed}
        return {**row, "seconds": seconds, "seconds_resident": kept}

    for name in ("activations", "base_cpu", "base_disk"):
        yield attempt({"twin of a resident model": name}, lambda name=name: trial([f"offload={name}"]))
    if not dry:  # it pins memory, which needs a GPU
        yield attempt({"twin of a resident model": "torch's synchronous save_on_cpu"}, lambda: trial([], _saved_on_cpu))


def _saved_on_cpu(base: torch.nn.Module) -> None:
    """What transformers does where it can offload (5.24; 5.17 cannot): block inputs copied, and waited for."""

    def run(function, *args):
        with torch.autograd.graph.save_on_cpu(pin_memory=True):
            return checkpoint(function, *args, use_reentrant=False)

    for block in blocks_of(base, NoCheckpointing()):
        block.gradient_checkpointing, block._gradient_checkpointing_func = True, run


def of_70b(device: torch.device, tokens: int, offload: str, dry: bool) -> dict[str, Any]:
    """Eight of the 80 blocks: eight slots' worth of traffic a pass, as much hidden a block as with all of them."""
    config = compose(
        ["recipe=qlora_llama3_70b_24gb", "track=local", "model.weights=random", f"offload={offload}",
         f"{A}num_hidden_layers=8", *(SMALL if dry else [])]
    ).config  # fmt: skip
    run = Run(config, device)
    run.step(tokens)
    copies = run.stream.copies if run.stream is not None else None
    before = (copies.hidden_share(), copies.copy_seconds, copies.waited_seconds) if copies is not None else None
    moved = run.stream.moved.num_bytes if run.stream is not None else 0
    seconds = [run.step(tokens) for _ in range(3)]
    row: dict[str, Any] = {"seconds": min(seconds)}
    if copies is not None:
        copies.settle()
        copied, waited = copies.copy_seconds - before[1], copies.waited_seconds - before[2]
        row |= {"moved_gib": (run.stream.moved.num_bytes - moved) / GIB, "copy_seconds": copied}
        row |= {"waited_seconds": waited, "hidden_share": 1 - waited / copied, "total_seconds": sum(seconds)}
    if device.type == "cuda":
        row["peak_allocated_gib"] = torch.cuda.max_memory_allocated() / GIB
    run.close()
    return row


def longest_row(device: torch.device, rate: float, setting: Setting) -> dict[str, Any]:
    """One step of the 8B at full depth, as long as the recipe's row where the time left allows it."""
    words = ["recipe=qlora_llama3_8b_long", "track=local", "model.weights=random"]
    if setting.dry:
        words += [*SMALL, f"{A}num_hidden_layers=4", "data.max_length=512", "train.micro_batch_tokens=512"]
    config = compose(words).config
    planner = Planner(config)
    tokens, left = config.train.micro_batch_tokens, setting.seconds_left
    while not setting.dry and tokens * work(planner, planner.policy) / (EFFICIENCY * rate) > 0.6 * left:
        tokens //= 2
    row: dict[str, Any] = {"longest_row": tokens}
    run = Run(config, device)
    try:
        row["seconds"] = run.step(tokens)
        row["tokens_per_second"] = tokens / row["seconds"]
    except torch.OutOfMemoryError as error:
        row["out_of_memory"] = str(error).splitlines()[0]
    if device.type == "cuda":
        row["peak_allocated_gib"] = torch.cuda.max_memory_allocated() / GIB
        row["peak_reserved_gib"] = torch.cuda.max_memory_reserved() / GIB
    run.close()
    if setting.seconds_left > 40:  # a plan traces rows of this length on the host
        row["planned_gib"] = planner.predict(tokens=tokens).peak / GIB
    return row
