"""Marks between the blocks of a traced step, and what a middle block leaves behind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from trainer.memory.predict.live_storages import Tracker
from trainer.memory.predict.profile import Interval, Profile, Saved
from trainer.memory.predict.standins import Outline, Standin4bit, Standin8bit
from trainer.model.checkpointing import Keep, attention_of, kept_operations


class Recorder:
    """Marks between blocks."""

    def __init__(self, rounding: int):
        self.tracker = Tracker(rounding)
        self.marks: list[tuple[str, int, int]] = []
        self._handles: list[Any] = []
        self._backward = False
        self._middle = _Middle(self.tracker)

    def hold_all(self, model: Outline) -> None:
        for tensor in [*model.adapted.parameters(), *model.adapted.buffers()]:
            self.tracker.hold(tensor, tensor.grad)
        for module in model.adapted.modules():
            if isinstance(module, (Standin4bit, Standin8bit)):
                self.tracker.hold(*module.scales())

    def watch(self, layers: list[torch.nn.Module]) -> None:
        if layers:
            self._handles += self._middle.watch(layers[len(layers) // 2], lambda: self._backward)
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
            saved=self._middle.saved,
        )

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()


class _Middle:
    """Watches one block's forward pass for what it makes."""

    def __init__(self, tracker: Tracker):
        self.saved: Saved | None = None
        self._tracker = tracker
        self._attention: tuple[int, int] = (0, 0)
        self._output: set[int] = set()

    def watch(self, block: torch.nn.Module, backward: Callable[[], bool]) -> list[Any]:
        """Handles of the hooks; nothing is noted once `backward` says so: the block is then run again."""
        tracker, groups = self._tracker, {}
        for name in (Keep.attention, Keep.linear):
            groups |= dict.fromkeys(kept_operations(name), name)

        def before_block(module, args):
            if not backward():
                tracker.outputs.clear()

        def before_attention(module, args, kwargs):
            if not backward():
                self._attention = (tracker.born, tracker.born)

        def after_attention(module, args, kwargs, output):
            if not backward():
                self._attention = (self._attention[0], tracker.born)
                tensors = output if isinstance(output, tuple) else (output,)
                self._output = {t.untyped_storage()._cdata for t in tensors if isinstance(t, torch.Tensor)}

        def after_block(module, args, output):
            if backward():
                return
            made = dict.fromkeys(Keep, 0)
            for operation, size in tracker.outputs.items():
                if operation in groups:
                    made[groups[operation]] += size
            inside = tracker.alive_from(*self._attention, self._output)
            self.saved = Saved(inside, made[Keep.attention], made[Keep.linear])

        handles = [block.register_forward_pre_hook(before_block), block.register_forward_hook(after_block)]
        attention = attention_of(block)
        if attention is not None:
            handles.append(attention.register_forward_pre_hook(before_attention, with_kwargs=True))
            handles.append(attention.register_forward_hook(after_attention, with_kwargs=True))
        return handles
