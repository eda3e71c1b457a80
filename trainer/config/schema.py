"""The root of the configuration: which sections there are and how they are typed.

Each section's dataclass lives with the code it configures; here they are only put together. Nothing in this
module or in what it imports may import torch or transformers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from trainer.data.batches.packing import Packing
from trainer.data.data_settings import Data
from trainer.device.find import Device
from trainer.memory.memory_settings import MemoryOptions
from trainer.model.adapters import Adapter
from trainer.model.checkpointing import Checkpointing
from trainer.model.kernels import Kernels
from trainer.model.model_settings import Model
from trainer.model.offload.offloads import Offload
from trainer.model.precision import Precision
from trainer.model.quant import Quant
from trainer.ranges import numbers
from trainer.tracking import tensorboard, wandb  # noqa: F401  (their options)
from trainer.tracking.search import Search
from trainer.tracking.trackers import Track
from trainer.training.engine import Engine
from trainer.training.losses import Loss
from trainer.training.optimizers import Optim
from trainer.training.schedules import Schedule
from trainer.training.train_settings import Train


@dataclass
class Config:
    """A whole run. Every value comes from conf/, a recipe or the command line."""

    recipe: str
    """name of the recipe, or custom"""
    seed: Annotated[int, numbers("must be from 0 to 4294967295", minimum=0, exclusiveMaximum=2**32)]
    """drives the adapter's initial weights, dropout, data order and the held-out split"""
    device: Device
    """auto: a GPU if there is one"""
    output_dir: str
    """the run folder; a sweep's folder holds one subfolder a trial"""
    debug: bool
    """show tracebacks instead of one-line errors"""
    model: Model
    data: Data
    quant: Quant
    adapter: Adapter
    checkpointing: Checkpointing
    precision: Precision
    optim: Optim
    schedule: Schedule
    loss: Loss
    kernels: Kernels
    packing: Packing
    offload: Offload
    engine: Engine
    track: Track
    memory: MemoryOptions
    search: Search
    train: Train


SECTIONS: dict[str, type] = {
    "model": Model,
    "data": Data,
    "quant": Quant,
    "adapter": Adapter,
    "checkpointing": Checkpointing,
    "precision": Precision,
    "optim": Optim,
    "schedule": Schedule,
    "loss": Loss,
    "kernels": Kernels,
    "packing": Packing,
    "offload": Offload,
    "engine": Engine,
    "track": Track,
    "memory": MemoryOptions,
    "search": Search,
}
"""Sections whose option is picked by name; `train` is the one section without options."""
