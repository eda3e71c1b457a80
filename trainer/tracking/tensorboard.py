"""TensorBoard: the rows of metrics.jsonl as event files in the run folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from trainer.errors import ConfigError
from trainer.registry import option
from trainer.tracking.axes import Axes
from trainer.tracking.trackers import IDENTITY, SUMMARY, Track

FOLDER = "tensorboard"


@option("track", "tensorboard")
@dataclass
class TensorBoard(Track):
    """TensorBoard event files in the run folder."""

    log_samples: bool
    """write the answers to train.samples as texts"""

    def build(self, run_dir, run_id, config):
        return TensorBoardTracker(self, run_dir, run_id, config)


class TensorBoardTracker:
    """One run's event files; a resumed run goes on in the same folder, and its rows replace those it makes anew."""

    def __init__(self, options: TensorBoard, run_dir: Path, run_id: str, config: dict[str, Any]):
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise ConfigError(
                "track=tensorboard: the package tensorboard is not installed. Install it with "
                "pip install 'trainer[tensorboard]', or use track=local."
            ) from None
        self._options, self._make, self._writers = options, SummaryWriter, {}
        self._folder, self._axes = run_dir / FOLDER, Axes()
        self._texts = {"config": config, "run_id": run_id}

    @property
    def where(self) -> str:
        return f"tensorboard --logdir {self._folder}"

    def identify(self, manifest: dict[str, Any]) -> None:
        self._texts["identity"] = {key: manifest[key] for key in IDENTITY if manifest.get(key) is not None}

    def log(self, row: dict[str, Any]) -> None:
        if self._options.log_samples and row["event"] == "samples":
            self._writer("steps", row["step"]).add_text("samples", _table(row["answers"]), row["step"])
        values = self._axes.by_step(row)
        if not values:
            return
        self._write("steps", row["step"], values)
        self._write("tokens", self._axes.num_tokens, self._axes.by_tokens(row))

    def finish(self, summary: dict[str, Any]) -> None:
        values = {key: summary[key] for key in SUMMARY if summary.get(key) is not None}
        if "steps" in self._writers:
            self._writers["steps"].add_text("summary", _table(values))
        for writer in self._writers.values():
            writer.close()

    def _writer(self, axis: str, position: int) -> Any:
        """That of an axis: a folder each, since a resumed run takes back what lies behind it."""
        if axis not in self._writers:
            self._writers[axis] = self._make(str(self._folder / axis), purge_step=position)
            for name, value in self._texts.items() if axis == "steps" else ():
                self._writers[axis].add_text(name, _table(value))
        return self._writers[axis]

    def _write(self, axis: str, position: int, values: dict[str, float]) -> None:
        """Puts values at a position of an axis."""
        writer = self._writer(axis, position)
        for name, value in values.items():
            writer.add_scalar(name, value, position)
        writer.flush()


def _table(value: Any) -> str:
    """As preformatted text: TensorBoard renders Markdown."""
    text = yaml.safe_dump(value, sort_keys=False, allow_unicode=True)
    return "\n".join("    " + line for line in text.splitlines())
