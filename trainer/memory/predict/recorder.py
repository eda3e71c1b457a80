"""Marks between the blocks of a traced step."""

from __future__ import annotations

from typing import Any

import torch

from trainer.memory.predict.outline import Outline
from trainer.memory.predict.profile import Interval, Profile
from trainer.model.live_storages import LiveStorages
from trainer.model.standins import Standin


class Recorder:
    """Marks between blocks."""

    def __init__(self, rounding: int):
        self.storages = LiveStorages(rounding)
        self.marks: list[tuple[str, int, int]] = []
        self._handles: list[Any] = []
        self._backward = False

    def hold_all(self, model: Outline) -> None:
        for tensor in [*model.adapted.parameters(), *model.adapted.buffers()]:
            self.storages.hold(tensor, tensor.grad)
        for module in model.adapted.modules():
            if isinstance(module, Standin):
                self.storages.hold(*module.scales())

    def watch(self, layers: list[torch.nn.Module]) -> None:
        for index, layer in enumerate(layers):
            last = index == len(layers) - 1
            self._handles.append(layer.register_forward_pre_hook(self._before(index)))
            self._handles.append(layer.register_forward_hook(self._after(index, last)))

    def start(self) -> None:
        self.storages.mark()
        self.marks.append(("start", self.storages.live, self.storages.live))

    def mark(self, name: str) -> None:
        if name == "loss":
            self._backward = True
        self.marks.append((name, *self.storages.mark()))

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
