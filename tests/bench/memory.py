"""Predicted against real peak memory of training steps on a CPU, over configurations of every kind.

    python -m tests.bench.memory [--write]

The real peak is torch.profiler's allocator events on top of the bytes of all tensors that were alive when it began.
`--write` puts the table into tests/bench/RESULTS.md.
"""

from __future__ import annotations

import gc
import platform
import statistics
import sys
import time
from importlib.metadata import version
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from trainer.config.compose import compose
from trainer.config.schema import Config
from trainer.data.batch import collate
from trainer.data.tokenize import TokenSet
from trainer.memory.plan import Planner
from trainer.memory.trace import Shape
from trainer.model import attention
from trainer.model.load import load_base, load_config

RESULTS = Path(__file__).with_name("RESULTS.md")
BEGIN, END = "<!-- memory: begin -->", "<!-- memory: end -->"

BASE = [
    "model=tiny", "model.weights=random", "device=cpu", "precision=fp32", "model.architecture.vocab_size=2048",
    "model.architecture.hidden_size=128", "model.architecture.intermediate_size=384", "optim=adamw",
    "model.architecture.num_hidden_layers=6", "model.architecture.num_attention_heads=4",
    "model.architecture.num_key_value_heads=2", "train.micro_batch_tokens=512", "data.max_length=256",
    "train.accumulation_steps=2",
]  # fmt: skip
A = "model.architecture."
CONFIGURATIONS: dict[str, list[str]] = {
    "base: NF4, LoRA r=16, full checkpointing": [],
    "checkpointing none": ["checkpointing=none"],
    "depth 12": [f"{A}num_hidden_layers=12"],
    "depth 12, none": [f"{A}num_hidden_layers=12", "checkpointing=none"],
    "depth 2": [f"{A}num_hidden_layers=2"],
    "width 256": [f"{A}hidden_size=256", f"{A}intermediate_size=768", f"{A}head_dim=64"],
    "width 256, none": [f"{A}hidden_size=256", f"{A}intermediate_size=768", f"{A}head_dim=64", "checkpointing=none"],
    "8 heads, 8 KV heads": [f"{A}num_attention_heads=8", f"{A}num_key_value_heads=8", f"{A}head_dim=16"],
    "8 heads, 1 KV head, none": [
        f"{A}num_attention_heads=8", f"{A}num_key_value_heads=1", f"{A}head_dim=16", "checkpointing=none"
    ],
    "vocabulary 16,384": [f"{A}vocab_size=16384"],
    "vocabulary 16,384, full loss": [f"{A}vocab_size=16384", "loss=full"],
    "untied head": [f"{A}tie_word_embeddings=false", f"{A}vocab_size=8192"],
    "untied head, full loss, none": [f"{A}tie_word_embeddings=false", "loss=full", "checkpointing=none"],
    "1,536 tokens in samples of 512": ["train.micro_batch_tokens=1536", "data.max_length=512"],
    "64 tokens": ["train.micro_batch_tokens=64", "data.max_length=64"],
    "rank 64": ["adapter.r=64"],
    "rank 4 on q and v, none": ["adapter.r=4", "adapter.target_modules=[q_proj,v_proj]", "checkpointing=none"],
    "dropout 0.1, none": ["adapter.dropout=0.1", "checkpointing=none"],
    "no quantisation": ["quant=none"],
    "no quantisation, none": ["quant=none", "checkpointing=none"],
    "int8": ["quant=int8"],
    "int8, none": ["quant=int8", "checkpointing=none"],
    "FP4 without double quantisation": ["quant=fp4", "quant.double_quant=false"],
    "all parameters train": ["quant=none", "adapter=none"],
    "all parameters train, none, 8-bit state": ["quant=none", "adapter=none", "optim=adamw_8bit", "checkpointing=none"],
    "paged 32-bit state": ["optim=paged_adamw_32bit"],
    "8-bit state, no accumulation": ["optim=adamw_8bit", "train.accumulation_steps=1"],
    "no accumulation, all parameters": ["quant=none", "adapter=none", "train.accumulation_steps=1"],
    "padded, 4 samples of 128": ["packing=none", "train.micro_batch_size=4", "data.max_length=128"],
    "padded, none": ["packing=none", "train.micro_batch_size=4", "data.max_length=128", "checkpointing=none"],
    "every_k of 2": ["checkpointing=every_k", "checkpointing.k=2"],
    "every_k of 4 in 10 layers": ["checkpointing=every_k", "checkpointing.k=4", f"{A}num_hidden_layers=10"],
    "sqrt of 12 layers": ["checkpointing=sqrt", f"{A}num_hidden_layers=12"],
    "attention": ["checkpointing=attention"],
    "selective": ["checkpointing=selective"],
    "bf16": ["precision=bf16"],
    "bf16, none": ["precision=bf16", "checkpointing=none"],
}  # fmt: skip


def real_step(config: Config, shape: Shape) -> tuple[int, int]:
    """(peak, live before) in bytes of a training step after the first, on the CPU."""
    device = torch.device("cpu")
    dtypes = config.precision.build(device)
    model_config = load_config(config.model)
    chosen = attention.PACKED if config.packing.packed else "sdpa"
    torch.manual_seed(0)
    base = load_base(config.model, model_config, config.quant, dtypes, device, chosen)
    adapted = config.adapter.attach(base)
    config.checkpointing.apply(base)
    base.train()
    parameters = [p for p in adapted.parameters() if p.requires_grad]
    optimizer = config.optim.build(parameters)
    batch = _batch(shape, model_config.get_text_config().vocab_size)

    def step() -> None:
        for _ in range(config.train.accumulation_steps):
            with dtypes.autocast():
                loss = config.loss.sum(base, batch)
            (loss / shape.num_targets).backward()
            del loss
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    step()
    gc.collect()
    live = _live_bytes()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        step()
    now = peak = 0
    events = [e for e in recorded.profiler.kineto_results.events() if e.name() == "[memory]"]
    for event in sorted(events, key=lambda e: e.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    del optimizer, parameters, adapted, base
    gc.collect()
    return live + peak, live


def _live_bytes() -> int:
    """Bytes of every storage that a living tensor uses."""
    storages = {}
    for item in gc.get_objects():
        if isinstance(item, torch.Tensor) and item.device.type == "cpu" and type(item).__name__ != "FakeTensor":
            storage = item.untyped_storage()
            storages[storage._cdata] = storage.nbytes()
    return sum(storages.values())


def _batch(shape: Shape, vocabulary: int):
    generator = torch.Generator().manual_seed(0)
    total = sum(shape.lengths)
    ids = torch.randint(0, vocabulary, (total,), generator=generator).numpy().astype("int32")
    borders = torch.tensor([0, *shape.lengths]).cumsum(0).numpy()
    tokens = TokenSet(ids, torch.ones(total, dtype=torch.bool).numpy(), borders, sources=[])
    return collate(tokens, torch.arange(len(shape.lengths)).numpy(), packed=shape.packed)


def worst_shape(config: Config) -> Shape:
    """Full rows, every token but each sample's last a target: what the bench trains on."""
    longest = config.data.max_length
    count = config.train.micro_batch_tokens // longest if config.packing.packed else config.train.micro_batch_size
    lengths = (longest,) * count
    if not config.packing.packed:
        lengths = (*lengths[:-1], longest - 1)  # without any padding transformers drops the mask
    return Shape(lengths, sum(lengths) - count, config.packing.packed)


def compare(words: list[str]) -> tuple[float, float]:
    """(predicted, real) peak of a configuration, MiB."""
    config = compose([*BASE, *words]).config
    shape = worst_shape(config)
    predicted = Planner(config, shape=shape).predict().peak
    real, _ = real_step(config, shape)
    return predicted / 2**20, real / 2**20


def main() -> None:
    rows, errors, started = [], [], time.perf_counter()
    wanted = [word for word in sys.argv[1:] if not word.startswith("--")]
    for name, words in CONFIGURATIONS.items():
        if wanted and not any(word in name for word in wanted):
            continue
        predicted, real = compare(words)
        errors.append(abs(predicted / real - 1))
        rows.append(f"| {name} | {predicted:.2f} | {real:.2f} | {predicted / real - 1:+.1%} |")
        print(rows[-1], flush=True)
    summary = (
        f"{len(errors)} configurations: error mean {statistics.mean(errors):.2%}, max {max(errors):.2%}; "
        f"{time.perf_counter() - started:.0f} s."
    )
    print(summary)
    if "--write" in sys.argv:
        write(rows, summary)


def write(rows: list[str], summary: str) -> None:
    """Replaces the section of RESULTS.md."""
    libraries = ", ".join(f"{n} {version(n)}" for n in ("torch", "transformers", "peft", "bitsandbytes"))
    text = "\n".join(
        [
            BEGIN,
            "## Memory: predicted against real peak",
            "",
            f"`python -m tests.bench.memory --write`. {platform.machine()}, {torch.get_num_threads()} thread(s), "
            f"{libraries}. Real: torch.profiler's allocator events on top of what was alive. MiB.",
            "",
            summary,
            "",
            "| configuration | predicted | real | error |",
            "|---|---|---|---|",
            *rows,
            END,
        ]
    )
    old = RESULTS.read_text(encoding="utf-8") if RESULTS.is_file() else "# Results\n\n"
    if BEGIN in old:
        old = old[: old.index(BEGIN)] + text + old[old.index(END) + len(END) :]
    else:
        old += text + "\n"
    RESULTS.write_text(old, encoding="utf-8")


if __name__ == "__main__":
    main()
