"""A base streamed from files against the same base in memory: what the process holds, the numbers, the time.

    python -m tests.bench offload [--write]

Each run is a process of its own on the CPU: random weights, LoRA, dropout 0.1, full checkpointing, two steps of two
micro-batches. Held is the highest anonymous resident memory (RssAnon) above that before the base was made. The files
are dropped from the page cache before each step, so that they are read from the disk. `--write` puts the table into
tests/bench/RESULTS.md.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import time

import torch

from tests.bench._memory_rss import ENVIRONMENT, Resident, anonymous
from tests.bench._memory_step import machine, random_batch, worst_shape, write_section
from trainer.config.compose import compose
from trainer.model import attention
from trainer.model.loading.base import load_base, load_config
from trainer.model.offload.block_sources import FileSource
from trainer.model.offload.streamed_base import streamed_base
from trainer.units import GIB

A = "model.architecture."
COMMON = [
    "model=tiny", "model.weights=random", "device=cpu", "precision=fp32", "optim=adamw", "adapter.dropout=0.1",
    "train.accumulation_steps=2", f"{A}vocab_size=4096", f"{A}num_attention_heads=16", f"{A}num_key_value_heads=4",
    f"{A}head_dim=64", f"{A}hidden_size=1024", f"{A}intermediate_size=2816", f"{A}num_hidden_layers=16",
]  # fmt: skip
CASES = {
    "fp32 blocks, 256 tokens": ["quant=none", "train.micro_batch_tokens=256", "data.max_length=256"],
    "NF4 blocks, 256 tokens": ["quant=nf4", "train.micro_batch_tokens=256", "data.max_length=256"],
    "fp32 blocks, 32 tokens": ["quant=none", "train.micro_batch_tokens=32", "data.max_length=32"],
}
STEPS = 2


def child(words: list[str], offload: str) -> dict[str, float | str | list[float]]:
    """One run in this process."""
    config = compose([*COMMON, *words, f"offload={offload}"]).config
    device = torch.device("cpu")
    dtypes, model_config = config.precision.build(device), load_config(config.model)
    shape = worst_shape(config)
    batch = random_batch(shape, model_config.vocab_size)
    before, resident = anonymous(), Resident()
    torch.manual_seed(0)
    what = (config.model, model_config, config.quant, dtypes, device, attention.PACKED)
    source, stream = config.offload.source(device, 0), None
    if source is None:
        base = load_base(*what)
    else:
        base, stream = streamed_base(*what, source)
    torch.manual_seed(0)
    adapted = config.adapter.attach(base).train()
    config.checkpointing.apply(base)
    parameters = [p for p in adapted.parameters() if p.requires_grad]
    optimizer = config.optim.build(parameters)
    losses, digest, seconds = [], hashlib.sha256(), 0.0
    for _ in range(STEPS):
        if isinstance(source, FileSource):
            source.drop_from_page_cache()
        began = time.perf_counter()
        for _ in range(config.train.accumulation_steps):
            loss = config.loss.sum(base, batch) / shape.num_targets
            loss.backward()
            losses.append(loss.item())
        seconds += time.perf_counter() - began
        for parameter in parameters:
            digest.update(parameter.grad.numpy().tobytes())
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    found = {"held": resident.stop() - before, "seconds": seconds, "losses": losses, "gradients": digest.hexdigest()}
    if stream is not None:
        copies = stream.copies
        found |= {
            "blocks": sum(block.size for block in stream.blocks),
            "slots": 2 * stream.slot_bytes,
            "moved": stream.moved.num_bytes,
            "hidden": copies.hidden_share(),
            "waited": copies.waited_seconds,
            "rate": stream.moved.num_bytes / copies.copy_seconds,
        }
        stream.close()
    return found


def in_a_process(words: list[str], offload: str) -> dict:
    """The child's findings."""
    code = f"import json; from tests.bench.offload import child; print(json.dumps(child({words!r}, {offload!r})))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, **ENVIRONMENT}, timeout=1200
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    rows = []
    for name, words in CASES.items():
        kept, streamed = in_a_process(words, "none"), in_a_process(words, "base_disk")
        same = (kept["losses"], kept["gradients"]) == (streamed["losses"], streamed["gradients"])
        rows.append(
            f"| {name} | {streamed['blocks'] / GIB:.3f} | {streamed['slots'] / GIB:.3f} | {kept['held'] / GIB:.3f} | "
            f"{streamed['held'] / GIB:.3f} | {'equal' if same else 'DIFFERENT'} | {kept['seconds']:.1f} | "
            f"{streamed['seconds']:.1f} | {streamed['moved'] / GIB:.2f} | {streamed['rate'] / GIB:.2f} | "
            f"{streamed['hidden']:.1%} |"
        )
        print(rows[-1], flush=True)
    if "--write" in sys.argv:
        write_section("offload", [*HEAD, *rows])


HEAD = [
    "## Offload: a base streamed from files against one in memory",
    "",
    f"`python -m tests.bench offload --write`, {machine()}, Python {sys.version.split()[0]}, a local virtual disk,",
    "shared with other work. Random weights, 16 blocks of width 1,024, LoRA r=16 with dropout 0.1, full checkpointing,",
    f"{STEPS} steps of two micro-batches. Held: RssAnon at its highest, above what was there before the base was made.",
    "Hidden: share of the reading time that the computation did not wait for. GiB but for the seconds.",
    "",
    "| case | blocks | two slots | held, in memory | held, streamed | losses and gradients, bit for bit | s, in memory "
    "| s, streamed | moved | read a second | hidden |",
    "|---|---|---|---|---|---|---|---|---|---|---|",
]


if __name__ == "__main__":
    main()
