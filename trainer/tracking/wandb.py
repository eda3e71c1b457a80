"""Weights & Biases: the rows of metrics.jsonl on its own step axis. Its trouble is never the run's."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.tracking.options import Mode

if TYPE_CHECKING:
    from trainer.tracking.options import WandB

PREFIX = {"train": "train", "eval": "eval"}
"""Events that are logged, and the section their values appear in."""


def has_key() -> bool:
    """Whether W&B would find an API key without asking."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    import netrc

    with contextlib.suppress(OSError, netrc.NetrcParseError):
        host = os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai").split("//")[-1].split("/")[0]
        return netrc.netrc(os.environ.get("NETRC")).authenticators(host) is not None
    return False


def resolve_mode(mode: Mode) -> Mode:
    """auto becomes online with a key, offline without: decided before any weight is read, never a prompt."""
    if mode is not Mode.auto:
        return mode
    return Mode.online if has_key() else Mode.offline


class WandBTracker:
    """One W&B run that keeps its id over every resume."""

    def __init__(self, options: WandB, run_dir: Path, run_id: str, config: dict[str, Any]):
        import wandb

        self.offline = resolve_mode(options.mode) is Mode.offline
        self.run = wandb.init(
            project=options.project,
            name=options.name or run_dir.name,
            id=run_id,
            resume=None if self.offline else "allow",
            dir=str(run_dir),
            config=config,
            mode="offline" if self.offline else "online",
            settings=wandb.Settings(silent=True, console="off", init_timeout=30),
        )
        self.run.define_metric("step")
        self.run.define_metric("*", step_metric="step")

    @property
    def where(self) -> str:
        """One line for the screen."""
        if self.offline:
            return "W&B offline (no API key, or track.mode=offline); send it later with: wandb sync " + str(
                Path(self.run.dir).parent
            )
        return f"W&B {self.run.url}"

    def log(self, row: dict[str, Any]) -> None:
        if row["event"] not in PREFIX:
            return
        prefix = PREFIX[row["event"]]
        values = {f"{prefix}/{key}": value for key, value in row.items() if key not in ("event", "step", "time")}
        self.run.log({**values, "step": row["step"]})

    def finish(self, summary: dict[str, Any]) -> None:
        self.run.summary.update({key: value for key, value in summary.items() if value is not None})
        self.run.finish(exit_code=0 if summary["status"] == "completed" else 1)
