"""Weights, adapter and optimizer: what is prepared becomes a run that can take its first step."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError

from trainer.certificate.probe import check_packing
from trainer.config.saved import Run
from trainer.config.schema import Config
from trainer.data.batches.batch import MicroBatch, collate
from trainer.data.batches.loader import evaluation_batches
from trainer.device.measure import Memory
from trainer.errors import ModelError
from trainer.model import attention
from trainer.model.adapters import Adapter
from trainer.model.adapters.weight_share import WeightShare
from trainer.model.fused.tiles import tile
from trainer.model.loading.base import load_base
from trainer.model.neftune import add_noise
from trainer.model.new_tokens import grow
from trainer.model.offload.activations import Mover
from trainer.model.offload.block_stream import BlockStream
from trainer.model.offload.streamed_base import streamed_base
from trainer.model.roles import mark_tables
from trainer.run.clock import Clock
from trainer.run.prepare import Prepared
from trainer.training.loop import Loop
from trainer.training.loss_scaling import LossScaling
from trainer.training.losses import training_loss
from trainer.training.outliers import Outliers
from trainer.training.throughput import count_arithmetic
from trainer.training.weights import load_trainable, total_parameters

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass
class Ready:
    """A run that can take its first step."""

    prepared: Prepared
    loop: Loop
    adapted: torch.nn.Module
    """the PEFT model around loop.model, or loop.model itself"""
    held_out: Callable[[], Iterable[MicroBatch]] | None
    """makes the held-out micro-batches"""
    attention: str
    trainable_parameters: int
    total_parameters: int
    stream: BlockStream | None
    """what brings the frozen blocks"""
    mover: Mover | None
    """what keeps block inputs in host memory"""
    weight_share: WeightShare | None
    """what took a part of the base's weights for the adapter"""

    def without_adapter(self) -> AbstractContextManager[None]:
        """The base, as far as it is still there."""
        return self.adapted.disable_adapter() if self.weight_share is None else self.weight_share.as_begun(self.adapted)

    def close(self) -> None:
        """Called when the run ends, however it does."""
        if self.mover is not None:
            self.mover.copies.close()
        if self.stream is not None:
            self.stream.close()


def build(run: Run, prepared: Prepared, memory: Memory, clock: Clock) -> Ready:
    """Weights, adapter, checkpointing and optimizer; ends with the packing check."""
    config, device, dtypes = run.config, prepared.device, prepared.dtypes
    if prepared.steps.packing.packed:
        chosen, why = attention.choose(prepared.config, device, dtypes.compute, config.model.attention)
    else:
        chosen, why = attention.choose_padded(prepared.config, device, dtypes.compute, config.model.attention)
    with clock.stage("weights"):
        torch.manual_seed(config.seed)
        weight_share = config.adapter.weight_share(config.quant, dtypes.compute, device)
        base, stream = _load(config, prepared, chosen, weight_share)
    memory.at("weights loaded")
    with clock.stage("adapter"):
        torch.manual_seed(config.seed)
        adapted = _adapt(config, prepared, base, weight_share)
        parameters = [p for p in adapted.parameters() if p.requires_grad]
        config.train.group(parameters, config.optim.learning_rate)
        optimizer = config.optim.build(parameters)
    memory.at("adapter attached")
    trainable, total = total_parameters(adapted)
    base_trains = trainable == total
    loop = Loop(
        model=base,
        parameters=parameters,
        optimizer=optimizer,
        schedule=config.schedule,
        loss=training_loss(config.loss, config.train.label_smoothing),
        steps=prepared.steps,
        dtypes=dtypes,
        accelerator=config.engine.build(cpu=device.type == "cpu"),
        arithmetic=count_arithmetic(prepared.skeleton, 0 if base_trains else trainable, base_trains),
        recomputed=prepared.plan.recomputed,
        memory=memory,
        max_grad_norm=config.train.max_grad_norm,
        outliers=Outliers(config.train.skip_outliers),
        scaling=LossScaling(dtypes.compute),
        peak_learning_rate=config.optim.learning_rate,
    )
    _check(config, prepared, loop, clock)
    held_out = None
    if prepared.held_out is not None:
        tokens = prepared.held_out

        def held_out() -> Iterable[MicroBatch]:
            return evaluation_batches(tokens, prepared.steps.packing, prepared.plan.train)

    mover = getattr(prepared.plan.policy, "mover", None)
    return Ready(prepared, loop, adapted, held_out, f"{chosen} ({why})", trainable, total, stream, mover, weight_share)


def _load(
    config: Config, prepared: Prepared, attention: str, weight_share: WeightShare | None
) -> tuple[PreTrainedModel, BlockStream | None]:
    """The frozen base, on the device or streamed to it."""
    what = (config.model, prepared.config, config.quant, prepared.dtypes, prepared.device, attention)
    if prepared.source is None:
        return load_base(*what, before=weight_share), None
    return streamed_base(*what, prepared.source, before=weight_share)


def _adapt(
    config: Config, prepared: Prepared, base: PreTrainedModel, weight_share: WeightShare | None
) -> torch.nn.Module:
    """Puts into the base what trains, and what changes how it computes; returns the PEFT model around it, if any."""
    new_ids = prepared.tokenizer.convert_tokens_to_ids(config.model.new_tokens)
    grow(base, new_ids)
    adapted = config.adapter.attach(base, new_ids)
    mark_tables(adapted)
    begin_from(config.adapter, adapted)
    if weight_share is not None:
        weight_share.put(adapted)
    tile(base, config.model.mlp_tiles)
    add_noise(base, config.train.neftune_alpha)
    prepared.plan.policy.apply(base)
    config.kernels.install(base)
    return adapted


def begin_from(adapter: Adapter, adapted: torch.nn.Module) -> None:
    """Puts in the weights that training begins from. Raises ModelError where they are another model's."""
    folder = adapter.init_folder()
    if folder is None:
        return
    try:
        load_trainable(adapted, folder)
    except (SafetensorError, OSError, ValueError, RuntimeError) as error:
        raise ModelError(f"adapter.init_from={folder}: does not fit this model: {error}.") from error


def _check(config: Config, prepared: Prepared, loop: Loop, clock: Clock) -> None:
    """Packed samples do not see each other, and compiled code computes what plain code does. Raises ModelError."""
    with clock.stage("packing check"):
        packed, vocab_size = prepared.steps.packing.packed, prepared.config.get_text_config().vocab_size
        check_packing(loop.model, config.loss, loop.dtypes, vocab_size, packed, config.quant.rounding)
    if config.kernels.graphs() is not None:
        with clock.stage("compilation"):
            batch = collate(*prepared.steps.fullest(), prepared.steps.packing.packed).to(prepared.device)
            config.kernels.verify(loop.model, config.loss.sum, loop.dtypes, batch, loop.memory)
