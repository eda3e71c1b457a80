"""One micro-batch of the real step on fake tensors: how much each block keeps, and how high it rises.

The first, a middle and the last block are traced (block 0 has no backward into the frozen base, the last one borders
on the loss); every block between is like the middle one, so depth is a matter of repeating it. Run: embeddings,
blocks, loss, and back. The model, PEFT's modules, the checkpointing policy, autocast and the loss are those that train.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AttentionInterface, PretrainedConfig
from transformers.masking_utils import AttentionMaskInterface

from trainer.data.batches.batch import MicroBatch
from trainer.errors import PlanError, TrainerError
from trainer.memory.predict.outline import Outline, outline
from trainer.memory.predict.profile import Profile, Shape
from trainer.memory.predict.recorder import Recorder
from trainer.model import attention
from trainer.model.fused.pieces import shortened
from trainer.model.live_storages import ROUNDING
from trainer.model.model_settings import Attention
from trainer.model.precision import Dtypes
from trainer.model.standins import Standin
from trainer.registry import name_of
from trainer.training.losses import training_loss

if TYPE_CHECKING:
    from trainer.memory.predict.sections import Sections
    from trainer.model.checkpointing import Checkpointing

VARLEN = "trainer_planned_varlen"
"""The varlen kernel as the packed attention of CUDA calls it, on fake tensors of any device."""


DEPTH = 3


def planned_attention(
    packed: bool,
    model_config: PretrainedConfig,
    device_type: str,
    dtype: torch.dtype,
    asked: Attention = Attention.auto,
) -> str:
    """Name of the attention that a run on such a device uses, as far as it can be traced without the device."""
    if asked is Attention.flash:  # torch's kernel keeps what flash-attn keeps
        asked = Attention.varlen if packed else Attention.sdpa
    if not packed:
        return attention.choose_padded(model_config, asked=asked)[0]
    chosen, _ = attention.choose(model_config, torch.device("cpu"), dtype, asked)
    if chosen == attention.PACKED and device_type == "cuda":
        return VARLEN if attention.flash_refuses(model_config, dtype) is None else "sdpa"
    return chosen


def trace(
    config: Sections,
    model_config: PretrainedConfig,
    dtypes: Dtypes,
    device_type: str,
    shape: Shape,
    checkpointing: Checkpointing,
    counter: AbstractContextManager | None = None,
    depth: int = DEPTH,
) -> Profile:
    """Runs forward and backward of one micro-batch on fake tensors.

    `counter` sees the operations of the step. With accumulation the gradients of earlier micro-batches are there when
    it begins, and it adds to them.
    """
    chosen = planned_attention(shape.packed, model_config, device_type, dtypes.compute, config.model.attention)
    num_layers = model_config.get_text_config().num_hidden_layers
    model = outline(config, model_config, dtypes.compute, chosen, min(depth, num_layers))
    whole = not model.layers()
    if whole and depth < num_layers:
        model = outline(config, model_config, dtypes.compute, chosen)
    recorder = Recorder(ROUNDING[device_type])
    with FakeTensorMode(allow_non_fake_inputs=True), shortened():
        to_fakes(model)
        model.base.train()
        checkpointing.apply(model.base)
        for parameter in model.trainable():
            if config.train.accumulation_steps > 1:
                parameter.grad = torch.empty_like(parameter)
        recorder.hold_all(model)
        batch = fake_batch(shape, chosen)
        recorder.watch([] if whole else model.layers())
        with counter or nullcontext(), recorder.storages:
            recorder.start()
            try:
                with dtypes.autocast():
                    loss = training_loss(config.loss, config.train.label_smoothing).sum(model.base, batch)
                recorder.mark("loss")
                (loss / shape.num_targets).backward()
            except TrainerError:
                raise
            except Exception as error:
                raise PlanError.of(f"a step of {_options(config, checkpointing)}", error) from error
            del loss
            recorder.mark("end")
    profile = recorder.profile(len(model.layers()), whole, shape.num_tokens)
    recorder.close()
    return profile


def _options(config: Sections, checkpointing: Checkpointing) -> str:
    """The options that a step runs through."""
    policy = f"checkpointing={name_of('checkpointing', checkpointing)}"
    groups = ("quant", "adapter", "loss")
    return ", ".join([*(f"{group}={name_of(group, getattr(config, group))}" for group in groups), policy])


class _HostBoundaries:
    """cu_seqlens of the per-sample attention, which asks for the lengths on the host: fakes have no values."""

    def __init__(self, lengths: tuple[int, ...]):
        self._lengths = list(lengths)

    def diff(self) -> _HostBoundaries:
        return self

    def tolist(self) -> list[int]:
        return self._lengths


def fake_batch(shape: Shape, chosen: str) -> MicroBatch:
    """A micro-batch of these sizes; call it under a FakeTensorMode."""

    def ints(*sizes: int) -> torch.Tensor:
        return torch.empty(sizes, dtype=torch.int64)

    rows, tokens = shape.rows, shape.row_tokens
    mask, boundaries = None, None
    if not shape.packed:
        mask = ints(rows, tokens)
    elif chosen == attention.PACKED:
        boundaries = _HostBoundaries(shape.lengths)
    elif chosen == VARLEN:
        boundaries = torch.empty((len(shape.lengths) + 1,), dtype=torch.int32)
    # else transformers builds its T x T masks from position_ids, as in a run
    return MicroBatch(
        input_ids=ints(rows, tokens),
        labels=ints(rows, tokens),
        target_index=ints(shape.num_targets),
        position_ids=ints(rows, tokens),
        attention_mask=mask,
        cu_seqlens=boundaries,
        max_length=max(shape.lengths),
        num_tokens=sum(shape.lengths),
        num_targets=shape.num_targets,
        num_samples=len(shape.lengths),
        samples=tuple(range(len(shape.lengths))),
    )


def to_fakes(model: Outline) -> None:
    """Replaces every meta tensor by a fake one, shared tensors by one."""
    made: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def fake(tensor: torch.Tensor | None) -> torch.Tensor | None:
        if tensor is None:
            return None
        if id(tensor) not in made:
            new = torch.empty(tensor.shape, dtype=tensor.dtype)
            if isinstance(tensor, torch.nn.Parameter):
                new = torch.nn.Parameter(new, requires_grad=tensor.requires_grad)
            made[id(tensor)] = (new, tensor)  # the old one stays alive, so that ids stay unique
        return made[id(tensor)][0]

    for module in model.adapted.modules():
        for holder in (module._parameters, module._buffers):
            for name, tensor in holder.items():
                holder[name] = fake(tensor)
    for module in model.adapted.modules():
        if isinstance(module, Standin):
            module.convert(fake)


def _planned_varlen(
    module, query, key, value, attention_mask, scaling=None, dropout=0.0, sliding_window=None, **kwargs
):
    boundaries, longest = kwargs["cu_seq_lens_q"], kwargs["max_length_q"]
    query, key = query.to(value.dtype), key.to(value.dtype)
    return attention._varlen(query, key, value, scaling, sliding_window, boundaries, longest), None


AttentionInterface.register(VARLEN, _planned_varlen)
AttentionMaskInterface.register(VARLEN, attention._no_mask)
