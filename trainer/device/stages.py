"""Memory at each stage of a run: what is allocated, the highest since the stage before, and what lies idle."""

from __future__ import annotations

from dataclasses import dataclass

from trainer.units import GIB

LARGE_GAP, LEAST_GAP = 0.1, GIB // 4
"""Share of the reserved bytes from which the gap is worth a setting, and bytes: less is no trouble to a small run."""
REMEDIES = {
    "cuda": "PYTORCH_ALLOC_CONF=expandable_segments:True helps",
    "cpu": "MALLOC_MMAP_THRESHOLD_=65536 gives large blocks back at once",
}


@dataclass(frozen=True)
class Stage:
    """Bytes when a stage was first reached."""

    allocated: int
    peak: int
    """highest since the stage before"""
    reserved: int
    """taken from the device, or by malloc from the system: allocated bytes and the gap"""

    @property
    def gap(self) -> int:
        """Reserved and in no tensor's use: fragmentation."""
        return self.reserved - self.allocated

    def as_gib(self) -> dict[str, float]:
        names = ("allocated", "peak", "reserved", "gap")
        return {name: getattr(self, name) / GIB for name in names}


def sentence(stages: dict[str, Stage]) -> str:
    """All stages on one line."""
    return ", ".join(f"{name} {stage.allocated / GIB:.2f}" for name, stage in stages.items())


def fragmentation(stages: dict[str, Stage], device_type: str) -> str:
    """The largest gap, and the allocator's setting that helps where it is large."""
    name, stage = max(stages.items(), key=lambda item: item[1].gap)
    words = f"at most {stage.gap / GIB:.2f} of {stage.reserved / GIB:.2f} GiB reserved, after {name}"
    return f"{words}; {REMEDIES[device_type]}" if stage.gap > max(LEAST_GAP, LARGE_GAP * stage.reserved) else words
