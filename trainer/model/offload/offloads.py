"""Options of the group `offload`: what lies in host memory or on disk, and comes to the device when it is used."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from trainer.errors import ConfigError, ModelError
from trainer.registry import Section, option
from trainer.units import GIB

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from trainer.model.adapters import Adapter
    from trainer.model.checkpointing import Checkpointing
    from trainer.model.offload.block_stream import BlockSource


@dataclass
class Offload(Section, ABC):
    """What is not on the device all the time."""

    moves: ClassVar[bool] = True
    """whether anything is elsewhere"""

    streams: ClassVar[bool] = False
    """whether the frozen blocks are fetched when they are used"""
    from_disk: ClassVar[bool] = False
    """whether they come from files"""
    effort: ClassVar[int] = 2
    """how much it takes away, beside other changes: 0 nothing, 9 another training"""
    uses_host: ClassVar[bool] = True
    """whether it moves to host memory, which on a CPU is the device's own"""

    def policy(self, policy: Checkpointing) -> Checkpointing:
        """The checkpointing policy that runs: the configured one, or one that keeps its inputs elsewhere."""
        return policy

    def check(self, model: PreTrainedModel, adapter: Adapter) -> None:
        """Raises ModelError where this model (on the meta device) cannot be run this way."""

    @abstractmethod
    def source(self, device: torch.device, needed: int) -> BlockSource | None:
        """Where the frozen blocks lie; None: on the device.

        `needed`: bytes, of blocks or of inputs, that are to lie elsewhere. Raises ConfigError or StorageError where
        they do not fit there.
        """


def check_host(what: str, needed: int, way_out: str) -> None:
    """Raises ConfigError where the host has less memory than is to be pinned."""
    import psutil

    free = psutil.virtual_memory().available
    if needed > free:
        raise ConfigError(
            f"{what} take {needed / GIB:.2f} GiB of host memory that cannot be swapped out, and {free / GIB:.2f} GiB "
            f"are free. {way_out}, or a machine with more memory."
        )


@option("offload", "none")
@dataclass
class NoOffload(Offload):
    """Everything stays on the device."""

    moves = False

    def source(self, device, needed):
        return None


@option("offload", "activations")
@dataclass
class Activations(Offload):
    """The inputs of checkpointed blocks in (pinned) host memory, copied while the device computes."""

    effort = 1

    def problems(self, config):
        if config.checkpointing.recomputes_blocks:
            return []
        return [
            "offload=activations moves the inputs of blocks that are recomputed, and this checkpointing has none: use "
            "checkpointing=full, selective, every_k, sqrt or auto"
        ]

    def policy(self, policy):
        from trainer.model.offload.activations import MovedInputs

        return policy if policy.moves_inputs else MovedInputs(policy)

    def source(self, device, needed):
        check_host("offload=activations: the inputs of the blocks", needed, "Use fewer tokens a micro-batch")
        return None


@dataclass
class StreamedBase(Offload):
    """Frozen blocks fetched one ahead of use, in forward, recompute and backward; embeddings, norms, head and
    adapters stay."""

    streams = True

    def problems(self, config):
        key = f"offload={self.name}"
        problems = []
        if config.adapter.trains_base:
            problems.append(f"{key} streams frozen blocks, and adapter=none trains them: use adapter=lora")
        if config.quant.keeps_copies:
            problems.append(f"{key} streams plain and 4-bit weights; LLM.int8() keeps its own copies: use quant=nf4")
        if not config.engine.one_process:
            problems.append(f"{key} is made for one process on one device: use engine=single")
        if config.model.trust_remote_code:
            problems.append(f"{key} does not serve models with code of their own: leave out one of the two")
        if config.model.quantized_cache:
            problems.append(f"{key} keeps its own files while it runs: leave out model.quantized_cache=true")
        return problems

    def check(self, model, adapter):
        from trainer.model.offload.streamed_base import decoder_blocks

        key = f"offload={self.name}"
        if not decoder_blocks(model):
            raise ModelError(f"{key}: {type(model).__name__} is not built from blocks that can be fetched one by one.")
        whole = adapter.trained_whole(model)
        if whole:
            raise ModelError(
                f"adapter.modules_to_save={whole}: trains whole layers of blocks that {key} streams, which are frozen. "
                "Leave them out, or use offload=none."
            )


@option("offload", "base_cpu")
@dataclass
class BaseCpu(StreamedBase):
    """Frozen blocks in host memory, pinned for a GPU."""

    name = "base_cpu"

    def source(self, device, needed):
        from trainer.model.offload.block_sources import HostSource

        check_host("offload=base_cpu: the blocks of the base", needed, "Use offload=base_disk")
        return HostSource(device)


@option("offload", "base_disk")
@dataclass
class BaseDisk(StreamedBase):
    """Frozen blocks in safetensors files, read as they are needed."""

    folder: str | None
    """where the files are written, best a fast local disk; null: streamed/ in the trainer's cache folder"""

    name = "base_disk"
    from_disk = True
    uses_host = False
    effort = 3

    def source(self, device, needed):
        from pathlib import Path

        from trainer.model.offload.block_sources import FileSource

        cache = os.environ.get("TRAINER_CACHE", "~/.cache/trainer")
        folder = Path(os.path.expanduser(f"{cache}/streamed" if self.folder is None else self.folder))
        return FileSource(folder, device, needed)
