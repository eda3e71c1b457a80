"""From traced blocks to a whole run: how much memory it needs at which moment, and where the peak lies."""

from __future__ import annotations

from dataclasses import dataclass, replace

from trainer.memory.predict.profile import Interval, Profile
from trainer.memory.predict.static import Static


@dataclass(frozen=True)
class Moment:
    """A stretch of the run: bytes beside the static ones."""

    name: str
    kept: int
    """what is kept for backward when it begins"""
    peak: int
    freed: int = 0
    """of the static bytes, those that are not there then: gradients, between steps"""


@dataclass(frozen=True)
class Prediction:
    """Allocator bytes of a run."""

    static: Static
    moments: tuple[Moment, ...]
    host: int = 0
    """bytes of the other pool, host memory; 0 on a CPU, where there is one pool"""

    @property
    def highest(self) -> Moment:
        return max(self.moments, key=lambda moment: moment.peak)

    @property
    def peak(self) -> int:
        """Most bytes at once."""
        return self.base + self.highest.peak

    @property
    def base(self) -> int:
        """What is there between steps: gradients too, if a micro-batch adds to those of an earlier one."""
        return self.static.total

    def lines(self) -> dict[str, int]:
        """What the peak is made of."""
        top = self.highest
        live = "optimizer workspace" if top.name == "optimizer step" else top.name
        kept = min(top.kept, top.peak)
        found = {**self.static.lines(), "kept for backward": kept, live: top.freed + top.peak - kept}
        if top.freed:
            found["gradients"] -= top.freed
        return {name: size for name, size in found.items() if size}


def predict(
    static: Static,
    profiles: list[Profile],
    workspace: int,
    accumulates: bool,
    segment: int | None = None,
    between_steps: dict[str, int] | None = None,
) -> Prediction:
    """One profile a block (the same one again and again for a uniform policy).

    With `segment`, profiles are those of [none, full], and blocks are recomputed `segment` at a time. Without
    accumulation the gradients come into being during backward: they are in the intervals, not in the base.
    `between_steps`: what the run does then by name, and its bytes.
    """
    gradients = 0 if accumulates else static.gradients
    moments = _whole(profiles[0]) if profiles[0].whole else _fold(profiles, segment)
    moments = [Moment(m.name, m.kept, m.peak - gradients) for m in moments]
    moments.append(Moment("optimizer step", 0, workspace))
    for name, size in (between_steps or {}).items():
        moments.append(Moment(name, 0, size - static.gradients, static.gradients))
    return Prediction(static, tuple(moments))


def without_inputs(profile: Profile, size: int) -> Profile:
    """A recomputed block whose kept input, of `size` bytes, is in host memory: forward keeps less, backward frees
    less."""
    return replace(
        profile,
        forward=tuple(Interval(i.delta - size, i.peak) for i in profile.forward),
        backward=tuple(Interval(i.delta + size, max(i.peak, i.delta + size)) for i in profile.backward),
    )


def _whole(profile: Profile) -> list[Moment]:
    kept = profile.loss.delta
    return [Moment("forward", 0, profile.loss.peak), Moment("backward", kept, kept + profile.loss_backward.peak)]


def _fold(profiles: list[Profile], segment: int | None) -> list[Moment]:
    """Walks the step, block by block."""
    if segment is not None:
        return _fold_segments(*profiles[:2], len(profiles), segment)
    moments: list[Moment] = []
    live = 0

    def go(name: str, interval: Interval, kept: int | None = None) -> None:
        nonlocal live
        moments.append(Moment(name, live if kept is None else kept, live + interval.peak))
        live += interval.delta

    depth, first, last = len(profiles), profiles[0], profiles[-1]
    go("embeddings", first.before)
    kept_by = []
    for index, profile in enumerate(profiles):
        before = live
        go(f"forward of block {index}", _pick(profile.forward, index, depth))
        kept_by.append(live - before)
    go("loss", last.loss)
    go("loss backward", last.loss_backward, kept=sum(kept_by))
    for index in reversed(range(depth)):
        go(f"backward of block {index}", _pick(profiles[index].backward, index, depth), kept=sum(kept_by[:index]))
    return moments


def _pick(intervals: tuple[Interval, ...], index: int, depth: int) -> Interval:
    """The traced block that a block of the whole model is like."""
    if len(intervals) == depth:
        return intervals[index]
    if index == 0:
        return intervals[0]
    return intervals[-1] if index == depth - 1 else intervals[1]


def _fold_segments(none: Profile, full: Profile, depth: int, segment: int) -> list[Moment]:
    """Blocks recomputed a segment at a time: one kept input, then forward and backward of the segment as under none."""
    moments: list[Moment] = [Moment("embeddings", 0, full.before.peak)]
    starts = list(range(0, depth, segment))
    live = full.before.delta
    kept_by = []
    for start in starts:
        interval = _pick(full.forward, start, depth)
        moments.append(Moment(f"forward of block {start}", live, live + interval.peak))
        kept_by.append(interval.delta)
        live += interval.delta
    moments.append(Moment("loss", live, live + full.loss.peak))
    live += full.loss.delta
    moments.append(Moment("loss backward", sum(kept_by), live + full.loss_backward.peak))
    live += full.loss_backward.delta
    for number, start in reversed(list(enumerate(starts))):
        blocks = range(start, min(start + segment, depth))
        kept = sum(kept_by[:number])
        name = f"backward of blocks {blocks[0]} to {blocks[-1]}" if len(blocks) > 1 else f"backward of block {start}"
        again = live - kept_by[number]  # the segment's input is the first thing that its own forward keeps
        peak = again
        for index in blocks:
            interval = _pick(none.forward, index, depth)
            peak = max(peak, again + interval.peak)
            again += interval.delta
        for index in reversed(blocks):
            interval = _pick(none.backward, index, depth)
            peak = max(peak, again + interval.peak)
            again += interval.delta
        moments.append(Moment(name, kept, peak))
        live = again
    return moments
