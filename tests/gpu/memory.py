"""What memory.sh runs: Llama-3-8B's shape with random weights, QLoRA steps; --dry does it small, on a CPU."""

from __future__ import annotations

import gc
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.factories import random_tokens
from trainer.config.compose import compose
from trainer.config.schema import Config
from trainer.data.batches.batch import MicroBatch, collate
from trainer.device.measure import Memory
from trainer.device.stages import fragmentation
from trainer.memory.predict.planner import CUDA_CONTEXT, SLACK, Planner
from trainer.memory.predict.profile import Shape
from trainer.memory.snapshot import Snapshot
from trainer.model import attention
from trainer.model.loading.base import load_base, load_config
from trainer.units import GIB

DEADLINE_SECONDS = 200
"""No measurement begins later; memory.sh ends the process at 240."""
POLICIES = ("full", "none", "selective", "attention", "sqrt", "every_k")
REDUCED = 8
"""Layers at which every policy is measured; the first two again at full depth."""


def main() -> None:
    dry = "--dry" in sys.argv[1:]
    if not dry and not torch.cuda.is_available():
        sys.exit("no GPU that torch can use; bash tests/gpu/memory.sh --dry runs small on a CPU")
    device = torch.device("cpu") if dry else torch.device("cuda", torch.cuda.current_device())
    started, rows = time.perf_counter(), []
    for row in measurements(device, dry, started):
        rows.append(row)
        print(json.dumps(row), flush=True)
    if "OUT" in os.environ:
        Path(os.environ["OUT"], "memory.json").write_text(json.dumps(rows, indent=1), encoding="utf-8")
    errors = [abs(row["error"]) for row in rows if row.get("error") is not None]
    wrong = [row for row in rows if row.get("files") == []]
    bad = not dry and bool(errors) and max(errors) > 0.05  # malloc's count on a CPU has more in it than tensors
    sys.exit(f"largest error {max(errors):.1%}, {len(wrong)} snapshots without files" if bad or wrong else 0)


def measurements(device: torch.device, dry: bool, started: float) -> Iterator[dict[str, Any]]:
    """The machine, every policy at reduced depth, `full` and `none` at full depth where they fit, a snapshot."""
    tokens = 256 if dry else 4096
    name = "cpu, dry run" if dry else torch.cuda.get_device_name(device)
    yield {"device": name, "torch": torch.__version__, **context(device)}
    cases = [(policy, 4 if dry else REDUCED) for policy in POLICIES]
    cases += [] if dry else [("full", 32), ("none", 32)]
    for policy, depth in cases:
        if time.perf_counter() - started > DEADLINE_SECONDS:
            yield {"checkpointing": policy, "layers": depth, "left_out": "no time left"}
            continue
        yield step(device, configuration(policy, depth, tokens, dry))
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()


def context(device: torch.device) -> dict[str, float]:
    """What CUDA takes outside the allocator, where the plan assumes CUDA_CONTEXT."""
    if device.type != "cuda":
        return {}
    torch.ones(1, device=device)
    free, total = torch.cuda.mem_get_info(device)
    used = total - free - torch.cuda.memory_reserved(device)
    return {"outside_allocator_gib": used / GIB, "assumed_gib": CUDA_CONTEXT / GIB}


def configuration(policy: str, depth: int, tokens: int, dry: bool) -> Config:
    """The recipe of the 8B, its architecture as deep as is asked for."""
    small = ["hidden_size=256", "intermediate_size=512", "num_attention_heads=4", "num_key_value_heads=2",
             "vocab_size=1024"]  # fmt: skip
    words = [f"num_hidden_layers={depth}", *(small if dry else [])]
    config = compose(
        ["recipe=qlora_llama3_8b", "model.weights=random", f"checkpointing={policy}", "track=local",
         f"data.max_length={tokens}", f"train.micro_batch_tokens={tokens}", "train.accumulation_steps=2",
         *[f"model.architecture.{word}" for word in words], *(["device=cpu"] if dry else [])]
    ).config  # fmt: skip
    return replace(config, memory=replace(config.memory, snapshot=2))


def step(device: torch.device, config: Config) -> dict[str, Any]:
    """Two recorded steps after the first: peak, stages, gap, and what the snapshot wrote."""
    depth = config.model.architecture["num_hidden_layers"]
    tokens = config.train.micro_batch_tokens
    name = type(config.checkpointing).__name__
    row: dict[str, Any] = {"checkpointing": name, "layers": depth, "tokens": tokens}
    planner = Planner(config, shape=Shape((tokens,), tokens - 1, packed=True))
    predicted = planner.predict().peak
    row["predicted_gib"] = predicted / GIB
    try:
        with Memory(device) as memory, tempfile.TemporaryDirectory() as folder:
            row |= run(device, config, memory, Path(folder))
            row["error"] = predicted / GIB / row["real_gib"] - 1
    except torch.OutOfMemoryError as error:
        row["out_of_memory"] = str(error).splitlines()[0]
    return row


def run(device: torch.device, config: Config, memory: Memory, folder: Path) -> dict[str, Any]:
    """The steps of the training loop, written out."""
    dtypes = config.precision.build(device)
    model_config = load_config(config.model)
    chosen, _ = attention.choose(model_config, device, dtypes.compute)
    base = load_base(config.model, model_config, config.quant, dtypes, device, chosen)
    memory.at("weights loaded")
    adapted = config.adapter.attach(base).train()
    config.checkpointing.apply(base)
    parameters = [p for p in adapted.parameters() if p.requires_grad]
    optimizer = config.optim.build(parameters)
    memory.at("adapter attached")
    tokens = config.train.micro_batch_tokens
    everything = random_tokens([tokens], model_config.vocab_size, targets=1.0)
    batch: MicroBatch = collate(everything, np.array([0]), packed=True)
    snapshot = Snapshot(device, config.memory.snapshot, folder)
    peaks = []
    for number in range(1 + config.memory.snapshot):
        if number == 1:
            snapshot.start()
            memory.recording = snapshot.mark
        memory.read()
        for _ in range(config.train.accumulation_steps):
            with dtypes.autocast():
                loss = config.loss.sum(base, batch.to(device)) / batch.num_targets
            memory.at("first forward")
            loss.backward()
            memory.at("first backward")
            del loss
        optimizer.step()
        memory.at("first step")
        optimizer.zero_grad(set_to_none=True)
        peaks.append(memory.read().peak)
        if number > 0:
            snapshot.after_step()
    memory.recording = None
    reserved = max(stage.reserved for stage in memory.stages.values())
    return {
        "real_gib": max(peaks) / GIB,
        "stages_gib": {name: stage.as_gib() for name, stage in memory.stages.items()},
        "fragmentation": fragmentation(memory.stages, device.type),
        "reserved_over_peak": reserved / max(peaks) - 1,
        "assumed_slack": SLACK,
        "shape": snapshot.shape(),
        "files": sorted(file.name for file in folder.iterdir()),
    }


if __name__ == "__main__":
    main()
