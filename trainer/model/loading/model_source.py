"""Where a pretrained model lies: a folder of the user's, or what the hub gave."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from trainer.model.loading.hub import HubSnapshot


@dataclass(frozen=True)
class ModelSource:
    """Where a pretrained model lies."""

    folder: Path
    asked: str
    """how the user named it, for messages"""
    hub: HubSnapshot | None

    @property
    def commit(self) -> str | None:
        return self.hub.commit if self.hub is not None else None
