"""A base whose blocks are streamed: assembled block by block, each block sent to its source when it is complete."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from trainer.model.adapters import decoder_linears
from trainer.model.experts import stacks
from trainer.model.loading import base as load
from trainer.model.loading.assemble import Fill, assemble, at_random
from trainer.model.model_settings import Weights
from trainer.model.offload.block_stream import BlockSource, BlockStream, StreamedBlock, install, streamed_block
from trainer.model.offload.copies import Copies, copies_for
from trainer.model.precision import Dtypes
from trainer.model.quant import Quant

if TYPE_CHECKING:
    from trainer.model.model_settings import Model


def decoder_blocks(model: PreTrainedModel) -> list[str]:
    """Full names of the decoder's blocks, in their order; empty where transformers knows none."""
    decoder = model.get_decoder()
    inside = {id(module) for module in decoder.modules() if isinstance(module, GradientCheckpointingLayer)}
    return [name for name, module in model.named_modules() if id(module) in inside]


def streamed_base(
    model: Model,
    config: PretrainedConfig,
    quant: Quant,
    dtypes: Dtypes,
    device: torch.device,
    attention: str,
    source: BlockSource,
    copies: Copies | None = None,
    before: Fill | None = None,
) -> tuple[PreTrainedModel, BlockStream]:
    """The base with the linear weights of its blocks in `source`, and what brings them. The same numbers as resident.

    `copies` (by default the device's own) does the copying; `before` sees each module before it is quantised.
    """
    fill, found = at_random, None
    if model.weights is Weights.pretrained:
        found = load.find(model)
        fill = load.from_files(model, found)
    sending = _Sending(source, device)
    base = assemble(config, quant, dtypes, device, attention, fill, sending.filled, before)
    blocks = sending.finish(base)
    stream = BlockStream(blocks, source, copies or copies_for(device, reads=source.reads), device)
    install(stream)
    if found is not None:
        quant.mark(base)  # PEFT picks its layers by it
        load.named(base, found)
    return load.settled(base), stream


class _Sending:
    """Notices when the last module of a block is there, and sends the block away."""

    def __init__(self, source: BlockSource, device: torch.device):
        self.source, self.device = source, device
        self.blocks: list[StreamedBlock] = []
        self._filling: str | None = None

    def filled(self, base: PreTrainedModel, name: str) -> None:
        block = self._block_of(base, name)
        if block != self._filling:
            self.finish(base)
        self._filling = block

    def finish(self, base: PreTrainedModel) -> list[StreamedBlock]:
        """Sends the block that is complete now; returns all."""
        if self._filling is not None:
            inside = [name for name in [*decoder_linears(base), *stacks(base)] if name.startswith(f"{self._filling}.")]
            block = streamed_block(len(self.blocks), {name: base.get_submodule(name) for name in inside})
            self.source.put(block)
            block.unbind(self.device)
            self.blocks.append(block)
            self._filling = None
        return self.blocks

    @staticmethod
    def _block_of(base: PreTrainedModel, name: str) -> str | None:
        """The block that a module belongs to."""
        parts = name.split(".")
        for length in range(1, len(parts) + 1):
            holder = ".".join(parts[:length])
            if isinstance(base.get_submodule(holder), GradientCheckpointingLayer):
                return holder
        return None
