"""The picture of a run's memory, against bytes made up so that every kind has another size, and against a run's own."""

from __future__ import annotations

import json
from xml.etree import ElementTree

import pytest

from tests.support import train_here
from trainer.device.stages import Stage
from trainer.memory.advice.picture import LEFT
from trainer.memory.advice.timeline import by_kind, timeline
from trainer.units import GIB

WEIGHTS, ADAPTER, KEPT, GRADIENTS, STATE, BUFFER = 64, 8, 32, 4, 2, 1
ALLOCATED = {
    "weights loaded": WEIGHTS,
    "adapter attached": WEIGHTS + ADAPTER,
    "first evaluation": WEIGHTS + ADAPTER + BUFFER,
    "first forward": WEIGHTS + ADAPTER + KEPT,
    "first backward": WEIGHTS + ADAPTER + GRADIENTS,
    "first step": WEIGHTS + ADAPTER + GRADIENTS + STATE,
    "first save": WEIGHTS + ADAPTER + STATE,
}
STAGES = {name: Stage(size * GIB, (size + 16) * GIB, size * GIB) for name, size in ALLOCATED.items()}


def test_each_kind_has_its_own_bytes():
    base = {"weights": WEIGHTS, "adapter": ADAPTER}
    expected = {
        "weights loaded": {"weights": WEIGHTS},
        "adapter attached": base,
        "first evaluation": {**base, "other": BUFFER},
        "first forward": {**base, "kept for backward": KEPT},
        "first backward": {**base, "gradients": GRADIENTS},
        "first step": {**base, "gradients": GRADIENTS, "optimizer state": STATE},
        "first save": {**base, "optimizer state": STATE},
    }
    found = by_kind(STAGES)
    assert {name: {kind: size // GIB for kind, size in kinds.items()} for name, kinds in found.items()} == expected
    for name, kinds in found.items():
        assert sum(kinds.values()) == STAGES[name].allocated


def test_bars_are_as_long_as_their_bytes_and_the_plan_is_marked():
    picture = ElementTree.fromstring(timeline(STAGES, 120 * GIB, 126 * GIB, "a < b"))
    texts = [element.text for element in picture.iter() if element.tag.endswith("text")]
    assert texts[0] == "a < b" and all(name in texts for name in STAGES)
    assert "peak measured 120.000 GiB" in texts and "peak planned 126.000 GiB" in texts
    forward = texts.index("first forward")
    assert texts[forward + 1 : forward + 3] == ["104.000", "120.000"]
    rects = [e.attrib for e in picture.iter() if e.tag.endswith("rect") and e.get("height") == "16"]
    measured, planned = (float(e.get("x1")) - LEFT for e in picture.iter() if e.tag.endswith("line"))
    assert measured / planned == pytest.approx(120 / 126, rel=1e-3)
    rows = {y: [r for r in rects if r["y"] == y] for y in dict.fromkeys(r["y"] for r in rects)}
    for (whole, *kinds), stage in zip(rows.values(), STAGES.values(), strict=True):
        assert whole["class"] == "passing"
        assert float(whole["width"]) / planned == pytest.approx(stage.peak / GIB / 126, rel=1e-3)
        assert sum(float(k["width"]) for k in kinds) / planned == pytest.approx(stage.allocated / GIB / 126, rel=5e-3)


def test_a_run_writes_its_picture(base_overrides, tmp_path):
    train_here([*base_overrides, "data.eval_fraction=0.3"], tmp_path)
    summary = json.loads((tmp_path / "summary.json").read_text())
    picture = ElementTree.parse(tmp_path / "memory.svg").getroot()
    texts = [element.text for element in picture.iter() if element.tag.endswith("text")]
    names = ["weights loaded", "adapter attached", "first evaluation", "first forward", "first backward", "first step"]
    assert list(summary["memory_stages_gib"]) == [*names, "first save"]
    for name, stage in summary["memory_stages_gib"].items():
        row = texts.index(name)
        assert texts[row + 1 : row + 3] == [f"{stage[height]:.3f}" for height in ("allocated", "peak")]
    assert f"peak measured {summary['peak_memory_gib']:.3f} GiB" in texts
    assert f"peak planned {summary['predicted_peak_memory_gib']:.3f} GiB" in texts
