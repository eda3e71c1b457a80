"""What a plan reads of a configuration: the sections that memory depends on, each typed by the code that it is of."""

from __future__ import annotations

from typing import Protocol

from trainer.data.batches.packing import Packing
from trainer.data.data_settings import Data
from trainer.device.find import Device
from trainer.memory.memory_settings import MemoryOptions
from trainer.model.adapters import Adapter
from trainer.model.checkpointing import Checkpointing
from trainer.model.model_settings import Model
from trainer.model.offload.offloads import Offload
from trainer.model.precision import Precision
from trainer.model.quant import Quant
from trainer.training.losses import Loss
from trainer.training.optimizers import Optim
from trainer.training.train_settings import Train


class Sections(Protocol):
    """A dataclass with these sections; the configuration of a run is one."""

    device: Device
    model: Model
    data: Data
    quant: Quant
    adapter: Adapter
    checkpointing: Checkpointing
    precision: Precision
    optim: Optim
    loss: Loss
    packing: Packing
    offload: Offload
    memory: MemoryOptions
    train: Train
