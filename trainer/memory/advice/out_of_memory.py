"""Out of memory: what was asked for, what was there, and ranked ways out with what each frees."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from trainer.device.measure import is_out_of_memory
from trainer.errors import OutOfMemoryError
from trainer.memory.advice import whatif
from trainer.units import GIB

if TYPE_CHECKING:
    from trainer.memory.run_plan import RunMemory

WAYS = 5


@dataclass(frozen=True)
class Situation:
    """What is known when memory runs out."""

    device: torch.device
    where: str
    plan: RunMemory
    longest_sample: int
    last_checkpoint: str | None
    peak: int
    """highest allocated bytes read so far"""
    options: whatif.Options
    """what else could be picked"""


@contextmanager
def advising(situation: Callable[[], Situation]) -> Iterator[None]:
    """Turns an allocator's failure into an OutOfMemoryError; `situation` is asked then."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise OutOfMemoryError(message(situation(), error)) from error


def message(situation: Situation, error: BaseException) -> str:
    """The whole block."""
    first = (str(error).strip() or type(error).__name__).splitlines()[0]
    lines = [f"at {situation.where}: {first}", f"  {_held(situation)}"]
    lines.append(f"  longest sample: {situation.longest_sample} tokens")
    kept = f"checkpoint kept: {situation.last_checkpoint}" if situation.last_checkpoint else "no checkpoint yet"
    lines.append(f"  {kept}")
    return "\n".join([*lines, *_ways(situation.plan, situation.options)])


def _held(situation: Situation) -> str:
    peak, reserved = situation.peak, None
    if situation.device.type == "cuda":
        peak = max(peak, torch.cuda.max_memory_allocated(situation.device))
        reserved = torch.cuda.memory_reserved(situation.device)
    words = f"peak so far {peak / GIB:.2f} GiB"
    if reserved is not None:
        gap = reserved - torch.cuda.memory_allocated(situation.device)
        words += f", reserved {reserved / GIB:.2f} GiB of which {gap / GIB:.2f} are fragmentation"
        if gap > reserved / 10:
            words += " (PYTORCH_ALLOC_CONF=expandable_segments:True helps)"
    prediction = situation.plan.prediction
    if prediction is None:
        return words
    return f"{words}, predicted {prediction.peak / GIB:.2f} GiB at {prediction.highest.name}"


def _ways(plan: RunMemory, options: whatif.Options) -> list[str]:
    """Changes that free memory, those that take the least away first; of each key the value that frees most."""
    if plan.prediction is None:
        return []
    needed = plan.planner.needed(plan.prediction)
    best: dict[str, whatif.ChangeRow] = {}
    for row in sorted(whatif.rows(plan.planner, options), key=lambda row: row.needed):
        if row.needed < needed:
            best.setdefault(row.change.partition("=")[0], row)
    freeing = sorted(best.values(), key=lambda row: (row.effort, row.needed))
    if not freeing:
        return ["  no change known here frees memory: a smaller model, or a larger card"]
    lines = ["  ways out, the smallest first, with what each frees:"]
    lines += [f"    {row.change}: {(needed - row.needed) / GIB:.3f} GiB ({row.cost})" for row in freeing[:WAYS]]
    return lines
