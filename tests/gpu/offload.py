"""What offload.sh runs: twins, then the 70B's blocks, then the longest row; --dry does it small, on a CPU."""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.factories import gradients, random_tokens
from trainer.config.compose import compose
from trainer.config.schema import Config
from trainer.data.batches.batch import collate
from trainer.memory.predict.planner import Planner
from trainer.memory.predict.speed import EFFICIENCY, work
from trainer.model import attention
from trainer.model.fused.tiles import tile
from trainer.model.loading.base import load_base, load_config
from trainer.model.offload.streamed_base import streamed_base
from trainer.training.throughput import matmul_flops
from trainer.units import GIB

DEADLINE_SECONDS = 260
"""The last measurement is made as long as what is left of this; offload.sh ends the process at 300."""
A = "model.architecture."
SMALL = [f"{A}hidden_size=256", f"{A}intermediate_size=512", f"{A}num_attention_heads=4", f"{A}num_key_value_heads=2",
         f"{A}vocab_size=1024"]  # fmt: skip
MEDIUM = [f"{A}hidden_size=2048", f"{A}intermediate_size=5632", f"{A}num_attention_heads=16",
          f"{A}num_key_value_heads=4", f"{A}vocab_size=4096"]  # fmt: skip


def main() -> None:
    dry = "--dry" in sys.argv[1:]
    if not dry and not torch.cuda.is_available():
        sys.exit("no GPU that torch can use; bash tests/gpu/offload.sh --dry runs small on a CPU")
    device = torch.device("cpu" if dry else "cuda")
    started, rows = time.perf_counter(), []
    rate = matmul_flops(device, torch.bfloat16)
    name = "cpu, dry run" if dry else torch.cuda.get_device_name(device)

    def note(row: dict[str, Any]) -> None:
        rows.append(row)
        print(json.dumps(row), flush=True)

    note({"device": name, "torch": torch.__version__, "matmul_tflops_bf16": rate / 1e12})
    for row in twins(device, dry):
        note(row)
    for tokens in (64,) if dry else (512, 4096):
        for offload in ("none", "base_cpu", "base_disk"):
            note(of_70b(device, tokens, offload, dry))
    note(longest_row(device, rate, started + DEADLINE_SECONDS, dry))
    if "OUT" in os.environ:
        Path(os.environ["OUT"], "offload.json").write_text(json.dumps(rows, indent=1), encoding="utf-8")
    failed = [row for row in rows if row.get("equal") is False]
    sys.exit(f"{len(failed)} paths differ from their twins" if failed else 0)


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

    def theirs(base: torch.nn.Module) -> None:
        base.activation_checkpointing_enable({"use_reentrant": False}, offload=True)

    def found(more: list[str], policy=None) -> tuple[list[dict[str, torch.Tensor]], float]:
        run = Run(compose([*words, *more]).config, device, policy)
        both = [run.gradients(tokens), run.gradients(tokens)]
        seconds = min(run.step(tokens) for _ in range(3))
        run.close()
        return both, seconds

    expected, kept = found([])
    trials = {name: [f"offload={name}"] for name in ("activations", "base_cpu", "base_disk")}
    for name, more in trials.items():
        actual, seconds = found(more)
        equal = all(torch.equal(g, a[key]) for e, a in zip(expected, actual, strict=True) for key, g in e.items())
        yield {"path": name, "equal": equal, "seconds": seconds, "seconds_resident": kept}
    if not dry:  # it pins memory, which needs a GPU
        _, seconds = found([], theirs)
        yield {"path": "transformers' synchronous offload", "seconds": seconds, "seconds_resident": kept}


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
    row: dict[str, Any] = {"70b": "8 blocks", "offload": offload, "tokens": tokens, "seconds": min(seconds)}
    if copies is not None:
        copies.settle()
        copied, waited = copies.copy_seconds - before[1], copies.waited_seconds - before[2]
        row |= {"moved_gib": (run.stream.moved.num_bytes - moved) / GIB, "copy_seconds": copied}
        row |= {"waited_seconds": waited, "hidden_share": 1 - waited / copied, "total_seconds": sum(seconds)}
    if device.type == "cuda":
        row["peak_allocated_gib"] = torch.cuda.max_memory_allocated() / GIB
    run.close()
    return row


def longest_row(device: torch.device, rate: float, deadline: float, dry: bool) -> dict[str, Any]:
    """One step of the 8B at full depth, as long as the recipe's row where the time left allows it."""
    words = ["recipe=qlora_llama3_8b_long", "track=local", "model.weights=random"]
    if dry:
        words += [*SMALL, f"{A}num_hidden_layers=4", "data.max_length=512", "train.micro_batch_tokens=512"]
    config = compose(words).config
    planner = Planner(config)
    tokens, left = config.train.micro_batch_tokens, deadline - time.perf_counter()
    while not dry and tokens * work(planner, planner.policy) / (EFFICIENCY * rate) > 0.6 * left:
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
    if deadline - time.perf_counter() > 40:  # a plan traces rows of this length on the host
        row["planned_gib"] = planner.predict(tokens=tokens).peak / GIB
    return row


if __name__ == "__main__":
    main()
