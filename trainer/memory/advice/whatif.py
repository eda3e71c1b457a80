"""What each technique would change: every row is the plan of that very configuration."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from trainer.errors import TrainerError
from trainer.memory.fit import resolved
from trainer.memory.predict.moved import moved_blocks
from trainer.memory.predict.speed import recomputed_share, work
from trainer.model.fused.tiles import AUTO
from trainer.registry import Section, changed_option, name_of
from trainer.units import GIB

if TYPE_CHECKING:
    from trainer.memory.predict.planner import Planner

Options = Mapping[str, Mapping[str, Any]]
"""Every option of every group, with the values of its YAML, by group and name."""

SMALL_MODEL = 1_000_000_000
"""Parameters up to which training all of them is worth a thought."""


@dataclass(frozen=True)
class ChangeRow:
    """One change by itself."""

    change: str
    """the words to add to the command"""
    needed: int
    """bytes of the device with it"""
    cost: str
    effort: int
    """how much it takes away, for the order of advice: 0 nothing, 9 another training"""
    host: int = 0
    """bytes of host memory with it, where that is not the device's own"""


def rows(planner: Planner, options: Options) -> list[ChangeRow]:
    """Every change that can be said at once, in groups."""
    planner = resolved(planner)
    return [
        *_policies(planner, options),
        *_sizes(planner, options),
        *_others(planner, options, "optim", 3),
        *_others(planner, options, "quant", 4),
        *_adapters(planner, options),
        *_others(planner, options, "loss", 0),
        *_offloads(planner, options),
        *_tiles(planner),
    ]


def _planned(planner: Planner, **sections: Any) -> Planner | None:
    """The plan of another configuration; None where it would be refused, or cannot be made here."""
    other = planner.changed(**sections)
    held = (getattr(other.config, name) for name in vars(other.config))
    if any(section.problems(other.config) for section in held if isinstance(section, Section)):
        return None
    try:
        if "loss" in sections:
            other.config.loss.check(torch.device(planner.device_type))
        other.predict()
    except (TrainerError, ImportError):
        return None
    return other


def _row(words: str, other: Planner, cost: str, effort: int) -> ChangeRow:
    prediction = other.predict()
    return ChangeRow(words, other.needed(prediction), cost, effort, prediction.host)


def _alternatives(planner: Planner, options: Options, group: str) -> Iterator[tuple[str, Any]]:
    """The other options of a group, with the settings of this configuration that they share."""
    current = getattr(planner.config, group)
    for name, other in options[group].items():
        if type(other) is not type(current):
            yield name, changed_option(current, options[group].get(name_of(group, current)), other)


def _others(planner: Planner, options: Options, group: str, effort: int) -> Iterator[ChangeRow]:
    """Each other option by itself."""
    if group == "loss" and planner.profile_of_policy.whole:
        return  # the loss is not apart from the model in its trace
    for name, option in _alternatives(planner, options, group):
        other = _planned(planner, **{group: option})
        if other is not None:
            yield _row(f"{group}={name}", other, option.costs, effort)


def _policies(planner: Planner, options: Options) -> Iterator[ChangeRow]:
    if planner.profile_of_policy.whole:
        return  # no checkpointing but none works there
    now = work(planner, planner.policy)
    for name, policy in _alternatives(planner, options, "checkpointing"):
        if policy.ladder() is not None:
            continue  # a choice among the others
        other = _planned(planner, checkpointing=policy)
        if other is None:
            continue
        more = work(other, other.policy) / now - 1
        cost = f"recomputes {recomputed_share(other, other.policy):.0%} of the blocks, {more:+.0%} work"
        if policy.segment(planner.depth) is not None:
            cost += "; a whole segment is alive in backward"
        yield _row(f"checkpointing={name}", other, cost, 2)


def _sizes(planner: Planner, options: Options) -> Iterator[ChangeRow]:
    data, train = planner.config.data, planner.config.train
    if not planner.shape.packed:
        packing = options["packing"]["best_fit"]
        longer = replace(train, micro_batch_tokens=max(train.micro_batch_tokens, data.max_length))
        other = _planned(planner, packing=packing, train=longer)
        if other is not None:
            words = f"packing=best_fit train.micro_batch_tokens={longer.micro_batch_tokens}"
            yield _row(words, other, "rows of whole samples, no padding is computed", 1)
        if train.micro_batch_size > 1:
            size, steps = train.micro_batch_size // 2, 2 * train.accumulation_steps
            other = planner.changed(train=replace(train, micro_batch_size=size, accumulation_steps=steps))
            words = f"train.micro_batch_size={size} train.accumulation_steps={steps}"
            yield _row(words, other, "the same batch in smaller pieces", 1)
        return
    size, steps = train.micro_batch_tokens // 2, 2 * train.accumulation_steps
    if size >= 2:
        half = replace(train, micro_batch_tokens=size, accumulation_steps=steps)
        words = f"train.micro_batch_tokens={size} train.accumulation_steps={steps}"
        if size >= data.max_length:
            cost = "the same batch in shorter rows: dequantisation weighs more"
            yield _row(words, planner.changed(train=half), cost, 1)
        else:
            other = planner.changed(train=half, data=replace(data, max_length=size))
            yield _row(f"{words} data.max_length={size}", other, f"samples over {size} tokens are dropped or cut", 5)
    size = 2 * train.micro_batch_tokens
    other = planner.changed(train=replace(train, micro_batch_tokens=size))
    yield _row(f"train.micro_batch_tokens={size}", other, "longer rows, fewer dequantisations", 1)
    other = _planned(planner, packing=options["packing"]["none"])
    if other is not None:
        cost = f"{train.micro_batch_size} padded samples; padding is computed too"
        yield _row("packing=none", other, cost, 6)


def _adapters(planner: Planner, options: Options) -> Iterator[ChangeRow]:
    for words, adapter, cost in planner.config.adapter.variants():
        other = _planned(planner, adapter=adapter)
        if other is not None:
            yield _row(words, other, cost, 3)
    if planner.static.base_parameters > SMALL_MODEL or planner.config.adapter.trains_base:
        return
    for name, adapter in _alternatives(planner, options, "adapter"):
        if not adapter.trains_base:
            continue  # another small set of parameters: no other memory to speak of
        for more in ({}, {"quant": options["quant"]["none"]}):
            other = _planned(planner, adapter=adapter, **more)
            if other is not None:
                words = " ".join([f"adapter={name}", *(f"{group}=none" for group in more)])
                yield _row(words, other, adapter.costs, 9)
                break


def _offloads(planner: Planner, options: Options) -> Iterator[ChangeRow]:
    """What leaves the device, where nothing has left it yet."""
    if planner.elsewhere(planner.policy):
        return
    for name, offload in _alternatives(planner, options, "offload"):
        if offload.uses_host and planner.device_type == "cpu":
            continue
        for more in ({}, {"checkpointing": options["checkpointing"]["full"]}):
            other = _planned(planner, offload=offload, **more)
            if other is None or other.elsewhere(other.policy) == 0:
                continue
            words = " ".join([f"offload={name}", *(f"{group}=full" for group in more)])
            yield _row(words, other, _moving(other), offload.effort)
            break


def _moving(planner: Planner) -> str:
    """How much lies elsewhere, and how often it is moved."""
    size = planner.elsewhere(planner.policy) / GIB
    if not planner.static.streamed:
        return f"{size:.2f} GiB of host memory, moved there and back each micro-batch"
    place = "on disk" if planner.config.offload.from_disk else "of host memory"
    times = moved_blocks(planner.policy, planner.depth) / planner.depth
    return f"{size:.2f} GiB {place}, moved {times:.1f} times a micro-batch"


def _tiles(planner: Planner) -> Iterator[ChangeRow]:
    """The MLP in pieces, for rows longer than a piece."""
    model, width = planner.config.model, planner.model_config.get_text_config().hidden_size
    if model.mlp_tiles != 1 or planner.shape.row_tokens <= width or not planner.model.layers():
        return
    other = _planned(planner, model=replace(model, mlp_tiles=AUTO))
    if other is not None:
        whole = recomputed_share(planner, planner.policy) == 1
        yield _row("model.mlp_tiles=auto", other, "the same arithmetic" if whole else "each MLP runs forward twice", 0)


def ranked(changes: list[ChangeRow], budget: int) -> list[ChangeRow]:
    """Single changes that make a budget hold, the smallest first."""
    return sorted((row for row in changes if row.needed <= budget), key=lambda row: (row.effort, -row.needed))
