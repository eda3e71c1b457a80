"""One micro-batch of the real step on fake tensors: how much each block keeps, and how high it rises.

The first, a middle and the last block are traced (block 0 has no backward into the frozen base, the last one borders
on the loss); every block between is like the middle one, so depth is a matter of repeating it. Run: embeddings,
blocks, loss, and back. The model, PEFT's modules, the checkpointing policy, autocast and the loss are those that train.
"""

from __future__ import annotations

import gc
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AttentionInterface, PretrainedConfig
from transformers.masking_utils import AttentionMaskInterface

from trainer.data.batch import MicroBatch
from trainer.memory.standins import Outline, Standin4bit, Standin8bit, outline
from trainer.memory.tracker import ROUNDING, Tracker
from trainer.model import attention
from trainer.model.precision import Dtypes

if TYPE_CHECKING:
    from trainer.config.schema import Config
    from trainer.model.checkpointing import Checkpointing

VARLEN = "trainer_planned_varlen"
"""The varlen kernel as the packed attention of CUDA calls it, on fake tensors of any device."""


@dataclass(frozen=True)
class Shape:
    """A micro-batch by its sizes."""

    lengths: tuple[int, ...]
    """tokens of each sample"""
    num_targets: int
    packed: bool

    @property
    def rows(self) -> int:
        return 1 if self.packed else len(self.lengths)

    @property
    def row_tokens(self) -> int:
        return sum(self.lengths) if self.packed else max(self.lengths)

    @property
    def num_tokens(self) -> int:
        """Positions that are computed, padding included."""
        return self.rows * self.row_tokens

    def scaled(self, tokens: int) -> Shape:
        """About as many tokens in the same kind of row: more or fewer samples of the longest length."""
        longest = max(self.lengths)
        full, rest = divmod(max(tokens, 2), longest)
        lengths = (longest,) * full + ((rest,) if rest > 1 and self.packed else ())
        lengths = lengths or (max(tokens, 2),)
        targets = max(1, round(self.num_targets * sum(lengths) / sum(self.lengths)))
        return replace(self, lengths=lengths, num_targets=targets)


@dataclass(frozen=True)
class Interval:
    """A stretch of the step, relative to what was live at its beginning. Bytes."""

    delta: int
    """live at the end, less live at the beginning"""
    peak: int
    """most, less live at the beginning"""

    def scaled(self, factor: float, base: Interval) -> Interval:
        """base + factor x (self - base): a straight line through two readings."""
        return Interval(
            round(base.delta + factor * (self.delta - base.delta)), round(base.peak + factor * (self.peak - base.peak))
        )


@dataclass(frozen=True)
class Profile:
    """The intervals of a micro-batch with few blocks."""

    before: Interval
    """input to the first block"""
    forward: tuple[Interval, ...]
    """one a block"""
    loss: Interval
    """last block's end to the scalar"""
    loss_backward: Interval
    backward: tuple[Interval, ...]
    """one a block, in the order of the blocks"""
    depth: int
    """blocks traced"""
    whole: bool
    """the model has no known blocks: everything is in `loss` and `loss_backward`, at full depth"""
    num_tokens: int

    def at(self, tokens: int, other: Profile) -> Profile:
        """The profile at another row length, on the straight line through two profiles."""
        factor = (tokens - self.num_tokens) / (other.num_tokens - self.num_tokens)

        def line(mine, theirs):
            if isinstance(mine, tuple):
                return tuple(line(m, t) for m, t in zip(mine, theirs, strict=True))
            return theirs.scaled(factor, mine)

        names = ("before", "forward", "loss", "loss_backward", "backward")
        return replace(self, num_tokens=tokens, **{n: line(getattr(self, n), getattr(other, n)) for n in names})


DEPTH = 3


def planned_attention(packed: bool, model_config: PretrainedConfig, device_type: str, dtype: torch.dtype) -> str:
    """Name of the attention that a run on such a device uses, as far as it can be traced without the device."""
    if not packed:
        return "sdpa"
    chosen, _ = attention.choose(model_config, torch.device("cpu"), dtype)
    if chosen == attention.PACKED and device_type == "cuda":
        return "sdpa" if dtype is torch.float32 else VARLEN
    return chosen


def trace(
    config: Config,
    model_config: PretrainedConfig,
    dtypes: Dtypes,
    device_type: str,
    shape: Shape,
    checkpointing: Checkpointing,
    depth: int = DEPTH,
) -> Profile:
    """Runs forward and backward of one micro-batch on fake tensors.

    With accumulation the gradients of earlier micro-batches are there when it begins, and it adds to them.
    """
    chosen = planned_attention(shape.packed, model_config, device_type, dtypes.compute)
    num_layers = model_config.get_text_config().num_hidden_layers
    model = outline(config, model_config, dtypes.compute, chosen, min(depth, num_layers))
    whole = not model.layers()
    if whole and depth < num_layers:
        model = outline(config, model_config, dtypes.compute, chosen)
    recorder = _Recorder(ROUNDING[device_type])
    with FakeTensorMode(allow_non_fake_inputs=True):
        _to_fakes(model)
        model.base.train()
        checkpointing.apply(model.base)
        for parameter in model.trainable():
            if config.train.accumulation_steps > 1:
                parameter.grad = torch.empty_like(parameter)
        recorder.hold_all(model)
        batch = fake_batch(shape, chosen)
        recorder.watch([] if whole else model.layers())
        with recorder.tracker:
            recorder.start()
            with dtypes.autocast():
                loss = config.loss.sum(model.base, batch)
            recorder.mark("loss")
            (loss / shape.num_targets).backward()
            del loss
            recorder.mark("end")
    profile = recorder.profile(len(model.layers()), whole, shape.num_tokens)
    recorder.close()
    del model, batch
    gc.collect()  # hooks and modules refer to each other
    return profile


class _Recorder:
    """Marks between blocks."""

    def __init__(self, rounding: int):
        self.tracker = Tracker(rounding)
        self.marks: list[tuple[str, int, int]] = []
        self._handles: list[Any] = []
        self._backward = False

    def hold_all(self, model: Outline) -> None:
        for tensor in [*model.adapted.parameters(), *model.adapted.buffers()]:
            self.tracker.hold(tensor, tensor.grad)
        for module in model.adapted.modules():
            if isinstance(module, (Standin4bit, Standin8bit)):
                self.tracker.hold(*module.scales())

    def watch(self, layers: list[torch.nn.Module]) -> None:
        for index, layer in enumerate(layers):
            last = index == len(layers) - 1
            self._handles.append(layer.register_forward_pre_hook(self._before(index)))
            self._handles.append(layer.register_forward_hook(self._after(index, last)))

    def start(self) -> None:
        self.tracker.mark()
        self.marks.append(("start", self.tracker.live, self.tracker.live))

    def mark(self, name: str) -> None:
        if name == "loss":
            self._backward = True
        self.marks.append((name, *self.tracker.mark()))

    def _before(self, index: int):
        def hook(module, args):
            if not self._backward:  # else the block is run again
                self.mark(f"forward {index}")

        return hook

    def _after(self, index: int, last: bool):
        def hook(module, args, output):
            if self._backward:
                return
            if last:
                self.mark("body")
            hidden = output if isinstance(output, torch.Tensor) else output[0]
            if hidden.requires_grad:
                hidden.register_hook(lambda _: self.mark(f"backward {index}"))

        return hook

    def profile(self, depth: int, whole: bool, num_tokens: int) -> Profile:
        live = {name: now for name, now, _ in self.marks}
        order = [name for name, _, _ in self.marks]
        rise = {name: peak for name, _, peak in self.marks}

        def between(begin: str, end: str) -> Interval:
            if begin not in live or end not in live:
                return Interval(0, 0)
            inner = order[order.index(begin) + 1 : order.index(end) + 1]
            return Interval(live[end] - live[begin], max([rise[name] for name in inner], default=0) - live[begin])

        if whole:
            zero = Interval(0, 0)
            return Profile(zero, (), between("start", "loss"), between("loss", "end"), (), depth, whole, num_tokens)
        backwards = [i for i in range(depth) if f"backward {i}" in live]
        assert backwards, "no block has a backward pass"
        first = min(backwards)

        def ends(index: int) -> str:
            return f"backward {index - 1}" if index > first else "end"

        return Profile(
            before=between("start", "forward 0"),
            forward=tuple(
                between(f"forward {i}", f"forward {i + 1}" if i + 1 < depth else "body") for i in range(depth)
            ),
            loss=between("body", "loss"),
            loss_backward=between("loss", f"backward {max(backwards)}"),
            backward=tuple(between(f"backward {i}", ends(i)) for i in range(depth)),
            depth=depth,
            whole=whole,
            num_tokens=num_tokens,
        )

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()


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
    else:  # transformers builds this mask from position_ids, which have no values here
        mask = torch.empty((1, 1, tokens, tokens), dtype=torch.bool)
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
    )


def _to_fakes(model: Outline) -> None:
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
        if isinstance(module, (Standin4bit, Standin8bit)):
            module.convert(fake)


def _planned_varlen(
    module, query, key, value, attention_mask, scaling=None, dropout=0.0, sliding_window=None, **kwargs
):
    boundaries, longest = kwargs["cu_seq_lens_q"], kwargs["max_length_q"]
    return attention._varlen(query, key, value, scaling, sliding_window, boundaries, longest), None


AttentionInterface.register(VARLEN, _planned_varlen)
AttentionMaskInterface.register(VARLEN, attention._no_mask)
