"""Allocation history of a run's first steps: a file for pytorch's memory viewer on CUDA, a table on a CPU."""

from __future__ import annotations

import gc
import json
import sys
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from trainer.model.live_storages import LiveStorages

LARGEST = 30
STAGES = {"first forward": "forward", "first backward": "backward", "first step": "step"}
"""What the loop calls the end of each stage of a step, and what it is called here."""
OURS = str(Path(__file__).resolve().parent.parent)
MACHINERY = ("/torch/", "/transformers/utils/", "/model/live_storages.py", "/memory/snapshot.py")


class Allocations(LiveStorages):
    """Live storages that know which line made each, with the largest at the peak."""

    def __init__(self) -> None:
        super().__init__(rounding=1)
        self.made: dict[int, tuple[int, str, tuple[int, ...], str]] = {}
        self.at_peak: list[tuple[int, str, tuple[int, ...], str]] = []
        self._highest = 0

    def hold_living(self) -> None:
        """Counts what there is already."""
        for item in gc.get_objects():
            kind = type(item)  # not isinstance: some objects do things when they are asked for their class
            if issubclass(kind, torch.Tensor) and not issubclass(kind, FakeTensor) and item.device.type == "cpu":
                super()._count(item)
                self._note(item, "before the recording")
        self._highest, self.at_peak = self.live, self._largest()

    def _count(self, tensor: torch.Tensor) -> None:
        if tensor.untyped_storage()._cdata in self._seen:
            return
        super()._count(tensor)
        self._note(tensor, _line())
        if self.live > self._highest:
            self._highest = self.live
            if self.live > 1.02 * sum(item[0] for item in self.at_peak[:1]):
                self.at_peak = self._largest()

    def _note(self, tensor: torch.Tensor, line: str) -> None:
        storage = tensor.untyped_storage()
        dtype = str(tensor.dtype).removeprefix("torch.")
        self.made[storage._cdata] = (storage.nbytes(), line, tuple(tensor.shape), dtype)

    def _largest(self) -> list[tuple[int, str, tuple[int, ...], str]]:
        alive = [self.made[key] for key in self._seen if key in self.made]
        return sorted(alive, reverse=True)[:LARGEST]


@dataclass(frozen=True)
class StageMark:
    """The end of a stage within a step. Bytes."""

    step: int
    """from 1, of those that are recorded"""
    stage: str
    live: int
    peak: int
    """highest since the mark before"""


@dataclass
class AllocationSnapshot:
    """Records `steps` optimizer steps from the first of this run on."""

    device: torch.device
    steps: int
    folder: Path
    heights: list[int] = field(default_factory=list)
    """live bytes before the first step and after each"""
    timeline: list[StageMark] = field(default_factory=list)
    """every stage of the recorded steps"""
    _recorder: Allocations | None = None

    @property
    def started(self) -> bool:
        return bool(self.heights)

    def start(self) -> None:
        """The recording begins: before the first step."""
        if self.device.type == "cuda":
            torch.cuda.memory._record_memory_history(max_entries=200_000)
        else:
            self._recorder = Allocations()
            self._recorder.hold_living()
            self._recorder.__enter__()
        self.heights.append(self._live())

    def _live(self) -> int:
        """Bytes now."""
        return self._recorder.live if self._recorder else torch.cuda.memory_allocated(self.device)

    def mark(self, stage: str, allocated: int, peak: int) -> None:
        """Notes a stage of a step; on a CPU the recorder's own count, to the byte, takes the place of the
        allocator's."""
        if stage not in STAGES:
            return
        if self._recorder is not None:
            allocated, peak = self._recorder.mark()
        self.timeline.append(StageMark(len(self.heights), STAGES[stage], allocated, peak))

    def after_step(self) -> Path | None:
        """Called after each optimizer step; returns the file once it is written."""
        if self.steps == 0:
            return None
        self.heights.append(self._live())
        self.steps -= 1
        return self.stop() if self.steps == 0 else None

    def stop(self) -> Path | None:
        """Ends the recording and writes it."""
        self.steps = 0
        if self.device.type == "cuda":
            file = self.folder / "memory_snapshot.pickle"  # the format that pytorch.org/memory_viz reads
            torch.cuda.memory._dump_snapshot(str(file))
            torch.cuda.memory._record_memory_history(enabled=None)
            self._write({})
            return file
        if self._recorder is None:
            return None
        recorder, self._recorder = self._recorder, None
        recorder.__exit__(None, None, None)
        rows = [{"bytes": b, "line": line, "shape": s, "dtype": d} for b, line, s, d in recorder.at_peak]
        return self._write({"peak_bytes": recorder._highest, "largest_at_peak": rows})

    def _write(self, content: dict[str, Any]) -> Path:
        """memory_snapshot.json: the timeline, what its shape means, and what else is known."""
        file = self.folder / "memory_snapshot.json"
        marks = [asdict(mark) for mark in self.timeline]
        heights = {"live_before": self.heights[0], "live_after_step": self.heights[1:]}
        content = {**content, **heights, "timeline": marks, "shape": self.shape()}
        file.write_text(json.dumps(content, indent=1), encoding="utf-8")
        return file

    def abandon(self) -> None:
        """Ends a recording that a run's end cut off."""
        if self.steps:
            self.stop()

    def shape(self) -> str:
        """What the timeline looks like, between steps and within the last one."""
        peak = max([mark.peak for mark in self.timeline], default=0)
        return f"after each step: {timeline_shape(self.heights, peak)}; within a step: {step_shape(self.timeline)}"


def timeline_shape(heights: list[int], peak: int) -> str:
    """What the heights before the first step and after each mean, beside the highest within a step: a staircase is a
    leak; one rise at the first step is optimizer state. Each stair is over a thousandth of the peak; single heights
    differ by up to a hundredth, with the batches that are prepared ahead."""
    if len(heights) < 4:
        return "too few steps to tell a shape"
    first, *rises = [after - before for before, after in pairwise(heights)]
    if all(rise > max(peak // 1000, 1) for rise in rises):
        return f"a staircase: {sum(rises) / len(rises):,.0f} bytes more after every step, a leak"
    if any(abs(rise) > peak // 100 for rise in rises):
        return "uneven"
    if first > peak // 100:
        return "one rise at the first step, then level: optimizer state"
    return "level: nothing is left behind by a step"


def step_shape(timeline: list[StageMark]) -> str:
    """What the highest moment of the last recorded step means: a plateau at the end of forward is activations, a spike
    in the optimizer's step is its workspace or its state coming to life."""
    marks = [mark for mark in timeline if mark.step == timeline[-1].step] if timeline else []
    stages = {mark.stage for mark in marks}
    if not {"forward", "backward", "step"} <= stages:
        return "no whole step was recorded"
    floor = min(mark.live for mark in marks)
    top = max(marks, key=lambda mark: mark.peak)
    kept = max(mark.live for mark in marks if mark.stage == "forward")
    if top.stage == "step":
        return f"a spike of {top.peak - floor:,} bytes at the optimizer's step: its workspace, or its state at first"
    return (
        f"a plateau of activations: {kept - floor:,} bytes are kept when forward ends, {top.peak - floor:,} at the "
        f"highest, in {top.stage}"
    )


def _line() -> str:
    """The innermost line outside torch: file:line function."""
    frame: Any = sys._getframe(3)
    while frame is not None:
        name = frame.f_code.co_filename
        if not any(part in name for part in MACHINERY):
            short = name.removeprefix(OURS).split("site-packages/")[-1].lstrip("/")
            return f"{short}:{frame.f_lineno} {frame.f_code.co_name}"
        frame = frame.f_back
    return "unknown"


def statistics(device: torch.device) -> list[tuple[str, str]]:
    """memory.stats=true: the allocator's statistics, largest first; of a CPU, malloc's own."""
    if device.type == "cuda":
        found = {k: v for k, v in torch.cuda.memory_stats(device).items() if v}
    else:
        from trainer.device.malloc import malloc_statistics

        found = malloc_statistics()
    return [(name, f"{value:,}") for name, value in sorted(found.items(), key=lambda item: -item[1])]
