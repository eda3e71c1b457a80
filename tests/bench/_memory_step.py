"""A training step whose memory is known for sure, and the section of RESULTS.md that a benchmark writes."""

from __future__ import annotations

import gc
import platform
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from trainer.config.schema import Config
from trainer.data.batches.batch import MicroBatch, collate
from trainer.data.tokens.tokenize import TokenSet
from trainer.memory.predict.profile import Shape
from trainer.model import attention
from trainer.model.fused.tiles import tile
from trainer.model.loading.base import load_base, load_config
from trainer.model.neftune import add_noise
from trainer.model.new_tokens import grow, planned_ids
from trainer.model.roles import mark_tables
from trainer.training.losses import training_loss

RESULTS = Path(__file__).with_name("RESULTS.md")


@dataclass
class Training:
    """A model on the CPU that can take steps on one batch."""

    step: Callable[[], None]
    forward: Callable[[], torch.Tensor]
    """the loss of one micro-batch"""
    parts: list
    """what must stay alive"""


def training(config: Config, shape: Shape) -> Training:
    """Base, adapter, policy and optimizer of a configuration, and a batch of random tokens."""
    device = torch.device("cpu")
    dtypes = config.precision.build(device)
    model_config = load_config(config.model)
    chosen = "sdpa"
    if config.packing.packed:
        chosen, _ = attention.choose(model_config, device, dtypes.compute, config.model.attention)
    torch.manual_seed(0)
    base = load_base(config.model, model_config, config.quant, dtypes, device, chosen)
    new_ids = planned_ids(base, config.model.new_tokens)
    grow(base, new_ids)
    adapted = config.adapter.attach(base, new_ids)
    mark_tables(adapted)
    tile(base, config.model.mlp_tiles)
    add_noise(base, config.train.neftune_alpha)
    config.checkpointing.apply(base)
    base.train()
    parameters = [p for p in adapted.parameters() if p.requires_grad]
    optimizer = config.optim.build(parameters)
    batch = random_batch(shape, model_config.get_text_config().vocab_size)

    def forward() -> torch.Tensor:
        with dtypes.autocast():
            return training_loss(config.loss, config.train.label_smoothing).sum(base, batch) / shape.num_targets

    def step() -> None:
        for _ in range(config.train.accumulation_steps):
            forward().backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return Training(step, forward, [base, adapted, optimizer, batch])


def peak_of(step: Callable[[], None]) -> tuple[int, int]:
    """(peak, live before) in bytes: torch.profiler's allocator events on top of every living tensor's storage."""
    gc.collect()
    live = live_bytes()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        step()
    now = peak = 0
    events = [e for e in recorded.profiler.kineto_results.events() if e.name() == "[memory]"]
    for event in sorted(events, key=lambda e: e.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return live + peak, live


def real_step(config: Config, shape: Shape) -> tuple[int, int]:
    """The same of a configuration's second step, less what lived before the model was made."""
    gc.collect()
    others = live_bytes()
    made = training(config, shape)
    made.step()
    peak, live = peak_of(made.step)
    del made
    gc.collect()
    return peak - others, live - others


def live_bytes() -> int:
    """Bytes of every storage that a living tensor uses."""
    storages = {}
    for item in gc.get_objects():
        if isinstance(item, torch.Tensor) and item.device.type == "cpu" and type(item).__name__ != "FakeTensor":
            storage = item.untyped_storage()
            storages[storage._cdata] = storage.nbytes()
    return sum(storages.values())


def random_batch(shape: Shape, vocabulary: int) -> MicroBatch:
    """Random tokens of these sizes, all of them targets but each sample's first."""
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


def machine() -> str:
    """What the figures were made on."""
    libraries = ", ".join(f"{n} {version(n)}" for n in ("torch", "transformers", "peft", "bitsandbytes"))
    processor = platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            processor = line.partition(":")[2].strip()
            break
    return f"{processor}, {torch.get_num_threads()} thread(s), {libraries}"


def write_section(name: str, lines: list[str]) -> None:
    """Replaces the lines between a section's marks in RESULTS.md, or adds them at its end."""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    text = "\n".join([begin, *lines, end])
    old = RESULTS.read_text(encoding="utf-8") if RESULTS.is_file() else "# Results\n\n"
    if begin in old:
        old = old[: old.index(begin)] + text + old[old.index(end) + len(end) :]
    else:
        old += "\n" + text + "\n"
    RESULTS.write_text(old, encoding="utf-8")
