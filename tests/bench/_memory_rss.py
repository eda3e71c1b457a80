"""The real peak itself, cross-checked: allocator events against the process's anonymous resident memory."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import torch

from tests.bench._memory_step import live_bytes, machine, peak_of, training, worst_shape, write_section
from trainer.config.compose import compose
from trainer.memory.predict.planner import Planner

MIB = 2**20
A = "model.architecture."
LARGE = [
    "model=tiny", "model.weights=random", "device=cpu", "precision=fp32", "data.max_length=512", "optim=adamw",
    f"{A}vocab_size=16384", f"{A}hidden_size=1024", f"{A}intermediate_size=2816", f"{A}num_hidden_layers=8",
    f"{A}num_attention_heads=16", f"{A}num_key_value_heads=4", f"{A}head_dim=64", "train.micro_batch_tokens=512",
    "train.accumulation_steps=1",
]  # fmt: skip
CASES = {
    "no quantisation, LoRA r=16, checkpointing none": ["quant=none", "checkpointing=none"],
    "all parameters train, checkpointing full": ["quant=none", "adapter=none"],
    "NF4, LoRA r=16, checkpointing none, 1,024 tokens": ["checkpointing=none", "train.micro_batch_tokens=1024"],
}
ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"}
"""glibc then hands every tensor of 64 KiB or more back at once, so that resident memory follows the tensors."""


class Resident:
    """Highest anonymous resident bytes of this process, looked at every 2 ms."""

    def __init__(self) -> None:
        self.peak = anonymous()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._stop.wait(0.002):
            self.peak = max(self.peak, anonymous())

    def stop(self) -> int:
        self._stop.set()
        self._thread.join()
        return self.peak


def anonymous() -> int:
    """RssAnon of /proc/self/status, bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("this kernel does not tell RssAnon")


def child(name: str) -> None:
    """One case in this process; prints a JSON line. Peaks are above what was there before the model."""
    small = compose([*LARGE, *CASES[name], f"{A}num_hidden_layers=1", "train.micro_batch_tokens=512"]).config
    warm = training(small, worst_shape(small))  # threads, kernels and code tables come to life here
    warm.step()
    peak_of(warm.step)
    del warm
    gc.collect()
    config = compose([*LARGE, *CASES[name]]).config
    shape = worst_shape(config)
    predicted = Planner(config, shape=shape).predict().peak
    gc.collect()
    ground, before = live_bytes(), anonymous()
    made = training(config, shape)
    made.step()
    gc.collect()
    watch = Resident()
    made.step()
    resident = watch.stop() - before
    events, _ = peak_of(made.step)
    print(json.dumps({"predicted": predicted, "events": events - ground, "resident": resident}))


def main(words: list[str]) -> None:
    if words[:1] == ["--child"]:
        return child(words[1])
    rows = []
    for name in CASES:
        began = time.perf_counter()
        done = subprocess.run(
            [sys.executable, "-m", "tests.bench", "memory", "rss", "--child", name],
            env={**os.environ, **ENVIRONMENT}, capture_output=True, text=True, check=True,
        )  # fmt: skip
        seen = json.loads(done.stdout.splitlines()[-1])
        events, resident = seen["events"], seen["resident"]
        rows.append(
            f"| {name} | {seen['predicted'] / MIB:.0f} | {events / MIB:.0f} | {resident / MIB:.0f} | "
            f"{events / resident - 1:+.1%} | {seen['predicted'] / resident - 1:+.1%} |"
        )
        print(rows[-1], f"{time.perf_counter() - began:.0f} s", flush=True)
    if "--write" in words:
        torch.set_num_threads(1)
        lines = [
            "## Memory: the real peak against resident memory",
            "",
            f"`python -m tests.bench memory rss --write`. {machine()}. A random model of 8 layers of 1,024, each case "
            "in its own process. Resident: highest RssAnon in a step, read every 2 ms, less what was there before the "
            "model; glibc set to return blocks of 64 KiB at once. MiB.",
            "",
            "| case | predicted | allocator events | resident | events to resident | predicted to resident |",
            "|---|---|---|---|---|---|",
            *rows,
        ]
        write_section("memory rss", lines)
    return None
