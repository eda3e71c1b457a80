"""What a run says about its streamed blocks: where they lie, how fast they come, and how much of that is hidden."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from trainer.memory.predict.moved import moved_blocks
from trainer.model.offload.block_sources import FileSource
from trainer.tracking.console import Screen
from trainer.units import GIB

if TYPE_CHECKING:
    from trainer.memory.run_plan import RunMemory
    from trainer.model.offload.block_stream import BlockStream
    from trainer.run.build import Ready
    from trainer.run.journal import Journal

WAITING = 0.1
"""Share of the time from which a run says that its source is too slow for it."""


def say_start(screen: Screen, ready: Ready) -> None:
    """At the start: what will be moved in this run, if anything."""
    prepared = ready.prepared
    if ready.stream is not None:
        _say_where(screen, ready.stream, prepared.plan)
    if prepared.plan.policy.moves_inputs:
        _say_inputs(screen, prepared.plan, prepared.device.type)


def told(ready: Ready, journal: Journal) -> Callable[[], None]:
    """To be called after every step: tells what was moved after the first of this process and after the last."""
    begun_step, begun_seconds = journal.state.step, journal.state.seconds

    def after_step() -> None:
        step, seconds = journal.state.step, journal.state.seconds - begun_seconds
        if step in (begun_step + 1, ready.loop.steps.num_steps):
            _report(ready, journal, seconds)

    return after_step


def _say_where(screen: Screen, stream: BlockStream, plan: RunMemory) -> None:
    """What of the frozen blocks, and for files how fast the disk is."""
    depth = len(stream.blocks)
    sizes = [block.size for block in stream.blocks]
    moved = moved_blocks(plan.policy, depth) * sum(sizes) / depth
    words = f"offload: {depth} blocks, {sum(sizes) / GIB:.3f} GiB, {moved / GIB:.3f} GiB moved a micro-batch"
    if isinstance(stream.source, FileSource):
        rate = stream.source.bytes_per_second()
        words += f"; {stream.source.folder} gives {rate / GIB:.2f} GiB/s, so at least {moved / rate:.2f} s of reading"
    elif stream.device.type == "cpu":
        words += "; on a CPU from memory to memory, which saves nothing: for trying only"
    screen.say(words)


def _say_inputs(screen: Screen, plan: RunMemory, device_type: str) -> None:
    """What of the blocks' inputs is in host memory."""
    size = plan.planner.moved_inputs(plan.policy)
    words = f"offload: {size / GIB:.3f} GiB of block inputs in host memory, moved there and back each micro-batch"
    if device_type == "cpu":
        words += "; on a CPU from memory to memory, which saves nothing: for trying only"
    screen.say(words)


def _report(ready: Ready, journal: Journal, seconds: float) -> None:
    """What was moved since the beginning, and whether the computation hid it; `seconds` went by in steps."""
    moving = ready.stream or ready.mover
    hidden = None if moving is None else moving.copies.hidden_share()
    if hidden is None:
        return
    copies = moving.copies
    rate = moving.moved_bytes / copies.copy_seconds
    journal.row(
        "offload",
        step=journal.state.step,
        what=moving.what,
        moved_gib=moving.moved_bytes / GIB,
        copy_seconds=copies.copy_seconds,
        waited_seconds=copies.waited_seconds,
        hidden_share=hidden,
    )
    words = (
        f"offload: {moving.moved_bytes / GIB:.3f} GiB of {moving.what} moved at {rate / GIB:.2f} GiB/s, "
        f"{hidden:.0%} of it hidden "
        f"behind the computation, {copies.waited_seconds:.1f} s waited"
    )
    if copies.waited_seconds > WAITING * seconds:
        words += ". More tokens a micro-batch hide more" + (
            "; a faster disk: offload.folder" if isinstance(getattr(moving, "source", None), FileSource) else ""
        )
    journal.screen.say(words)
