"""Experts of a mixture in 4 bits: one expert's matrices are dequantised while its tokens are there, never a stack.

transformers stacks the experts of a block in three-dimensional parameters, which bitsandbytes leaves as they are. Here
every expert's matrix is quantised on its own with bitsandbytes' functions. Backward keeps nothing of an expert: it is
computed again, one after the other.

E: experts. N: tokens. k: experts a token. S = N k: pairs of a token and an expert. H: hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import bitsandbytes as bnb
import torch
from peft.tuners.lora.layer import ParamWrapper
from torch.autograd import Function

from trainer.model.fused.pieces import is_shortened
from trainer.model.mixtures import products
from trainer.model.recompute import nothing_kept

BLOCK, SCALE_BLOCK = 64, 256
"""Weights that share a scale; scales that share a second one (Dettmers et al. 2023, section 3)."""


class Stack4bit(torch.nn.Module):
    """A stack of E matrices, each quantised as a Linear4bit would its weight. On the meta device it has a plan's
    shapes."""

    def __init__(self, shape: torch.Size, code: str, double_quant: bool, dtype: torch.dtype, device: torch.device):
        """`dtype`: of a matrix that is dequantised."""
        super().__init__()
        self.shape, self.quant_type, self.double_quant, self.dtype = shape, code, double_quant, dtype
        num, numel = shape[0], shape[1:].numel()
        blocks = -(-numel // BLOCK)

        def empty(*sizes: int, kind: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.empty(sizes, dtype=kind, device=device)

        self.weight = torch.nn.Parameter(empty(num, (numel + 1) // 2, kind=torch.uint8), requires_grad=False)
        self.weight.stands_for = num * numel
        self.register_buffer("absmax", empty(num, blocks, kind=torch.uint8 if double_quant else torch.float32))
        self.register_buffer("code", empty(16))
        if double_quant:
            self.register_buffer("nested_absmax", empty(num, -(-blocks // SCALE_BLOCK)))
            self.register_buffer("nested_code", empty(256))
            self.register_buffer("offset", empty(num))
        self.adapter: tuple[Any, ...] = ()
        """PEFT's layer beside this stack, in a tuple: it is no part of it"""

    @property
    def device(self) -> torch.device:
        return self.weight.device

    def scales(self) -> list[str]:
        """Names of the buffers that grow with the stack."""
        return ["absmax", "nested_absmax"] if self.double_quant else ["absmax"]

    def put(self, index: int, matrix: torch.Tensor) -> None:
        """Quantises one expert's matrix, on this stack's device."""
        codes, state = bnb.functional.quantize_4bit(
            matrix.to(self.device, self.dtype).contiguous(),
            blocksize=BLOCK,
            compress_statistics=self.double_quant,
            quant_type=self.quant_type,
        )
        self.weight[index].copy_(codes.view(-1))
        self.absmax[index].copy_(state.absmax)
        self.code.copy_(state.code)
        if self.double_quant:
            self.nested_absmax[index].copy_(state.state2.absmax)
            self.nested_code.copy_(state.state2.code)
            self.offset[index].copy_(state.offset)

    def matrix(self, index: int) -> torch.Tensor:
        """One expert's matrix, dequantised."""
        nested: dict[str, Any] = {}
        if self.double_quant:
            second = bnb.functional.QuantState(
                absmax=self.nested_absmax[index], blocksize=SCALE_BLOCK, code=self.nested_code, dtype=torch.float32
            )
            nested = {"offset": self.offset[index], "state2": second}
        state = bnb.functional.QuantState(
            absmax=self.absmax[index],
            shape=self.shape[1:],
            code=self.code,
            blocksize=BLOCK,
            quant_type=self.quant_type,
            dtype=self.dtype,
            **nested,
        )
        return bnb.functional.dequantize_4bit(self.weight[index].view(-1, 1), state)

    def fetch(self) -> None:
        """Brings the stack to the device, where it is streamed."""

    def active_adapter(self) -> Any:
        """PEFT's layer beside this stack; None where there is none, or it is off."""
        layer = self.adapter[0] if self.adapter else None
        return None if layer is None or layer.disable_adapters else layer


def quantise(
    experts: torch.nn.Module, code: str, double_quant: bool, compute_dtype: torch.dtype, device: torch.device
) -> None:
    """Puts 4-bit stacks in place of a module's parameters, and the rest of it on `device`.

    The values may be on the host: one matrix at a time goes to the device. On the meta device only shapes are made.
    """
    for name in products(experts):
        values = experts._parameters.pop(name)
        home = values.device if values.is_meta else device
        stack = Stack4bit(values.shape, code, double_quant, compute_dtype, home)
        if not values.is_meta:
            for index, matrix in enumerate(values.detach()):
                stack.put(index, matrix)
        setattr(experts, name, stack)
    for parameter in experts._parameters.values():
        if parameter is not None and not parameter.is_meta:
            parameter.data = parameter.data.to(device)
    experts.forward = partial(_forward, experts)


def stacks(model: torch.nn.Module) -> dict[str, Stack4bit]:
    """The 4-bit stacks inside a module, by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, Stack4bit)}


@contextmanager
def beside(model: torch.nn.Module) -> Iterator[None]:
    """Within it PEFT finds parameters where the stacks are; what it puts there is computed with the stacks after it."""
    places = [(holder, own, child) for holder in model.modules() for own, child in holder.named_children()]
    places = [(holder, own, child) for holder, own, child in places if isinstance(child, Stack4bit)]
    for experts, name, stack in places:
        del experts._modules[name]
        values = torch.empty((), dtype=stack.dtype, device=stack.device).expand(stack.shape)
        experts.register_parameter(name, torch.nn.Parameter(values, requires_grad=False))
    yield
    for experts, name, stack in places:
        del experts._parameters[name]
        setattr(experts, name, stack)
    stacked = {id(experts) for experts, _, _ in places}
    for layer in model.modules():
        if isinstance(layer, ParamWrapper) and id(layer.get_base_layer()) in stacked:
            experts = layer.get_base_layer()
            getattr(experts, layer.parameter_name).adapter = (layer,)
            layer.forward = experts.forward  # the experts ask their stacks for what is beside them


def _forward(
    experts: torch.nn.Module, hidden: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """hidden (N, H), the experts of each token (N, k) and their weights (N, k) -> (N, H)."""
    adapters = [getattr(experts, name).active_adapter() for name in products(experts)]
    factors = [part["default"].weight for layer in adapters if layer for part in (layer.lora_A, layer.lora_B)]
    scales = [layer.scaling["default"] if layer else None for layer in adapters]
    return _Experts.apply(experts, scales, hidden, top_k_index, top_k_weights, *factors)


@dataclass
class _Routes:
    """Which tokens go to which expert.

    An expert's tokens go through it in pieces of no more than the mean load, S / E rounded up. Some expert always has
    that many, so the workspace does not depend on the routing: a plan runs one such piece.
    """

    tokens: torch.Tensor
    """(S,) token of each pair, the pairs of an expert one after the other"""
    order: torch.Tensor
    """(S,) the pair's place among the router's"""
    experts: list[tuple[int, list[slice]]]
    """each expert that has tokens, and its pieces"""

    @classmethod
    def of(cls, top_k_index: torch.Tensor, num_experts: int) -> _Routes:
        flat = top_k_index.reshape(-1)
        order = torch.argsort(flat, stable=True)
        counts = torch.zeros(num_experts, dtype=torch.int64, device=flat.device)
        counts.index_add_(0, flat, torch.ones_like(flat))
        load = -(-len(flat) // num_experts)
        # The one read of the device: the router alone knows which weights to dequantise.
        numbers = [load] if is_shortened() else counts.tolist()
        found, begin = [], 0
        for index, count in enumerate(numbers):
            end = begin + count
            if count:
                found.append((index, [slice(b, min(b + load, end)) for b in range(begin, end, load)]))
            begin = end
        return cls(order // top_k_index.shape[-1], order, found)


class _Experts(Function):
    """The sum over a token's experts of weight x expert(token), in fp32."""

    @staticmethod
    def forward(ctx, experts, scales, hidden, top_k_index, top_k_weights, *factors):
        routes = _Routes.of(top_k_index, experts.num_experts)
        ctx.experts, ctx.scales, ctx.routes = experts, scales, routes
        ctx.save_for_backward(hidden, top_k_weights, *factors)
        out = torch.zeros_like(hidden, dtype=torch.float32)
        weights = top_k_weights.reshape(-1)[routes.order]

        def through(expert: _Expert, pieces: list[slice]) -> None:
            for piece in pieces:  # a token comes once to an expert: no two rows are added to one place at a time
                tokens = routes.tokens[piece]
                out.index_add_(0, tokens, expert(hidden[tokens], weights[piece]).float())

        with torch.autocast(hidden.device.type, enabled=False), nothing_kept():
            for index, pieces in routes.experts:
                through(_Expert(experts, scales, factors, index), pieces)
        return out.to(hidden.dtype)

    @staticmethod
    def backward(ctx, grad):
        routes = ctx.routes
        hidden, top_k_weights, *factors = ctx.saved_tensors
        weights = top_k_weights.reshape(-1)[routes.order]
        grad_hidden = torch.zeros_like(hidden, dtype=torch.float32)
        grad_weights = torch.zeros_like(weights)
        grad_factors = [torch.zeros_like(factor) for factor in factors]

        def through(expert: _Expert, pieces: list[slice]) -> None:
            for piece in pieces:
                tokens = routes.tokens[piece]
                x, weight, *own = expert.gradients(hidden[tokens], weights[piece], grad[tokens])
                grad_hidden.index_add_(0, tokens, x.float())
                grad_weights[piece] = weight
                for total, one in zip(expert.of_mine(grad_factors), own, strict=True):
                    total.add_(one)

        with torch.autocast(hidden.device.type, enabled=False):
            for index, pieces in routes.experts:
                through(_Expert(ctx.experts, ctx.scales, factors, index), pieces)
        placed = torch.empty_like(grad_weights)
        placed[routes.order] = grad_weights
        return None, None, grad_hidden.to(hidden.dtype), None, placed.view_as(top_k_weights), *grad_factors


class _Expert:
    """One expert, its matrices dequantised for as long as this lives."""

    def __init__(
        self, experts: torch.nn.Module, scales: list[float | None], factors: Sequence[torch.Tensor], index: int
    ):
        """`factors`: A (E r, in) and B (out, r E) of each product that has a scale, as PEFT holds them."""
        self.experts, self.scales, self.index = experts, scales, index
        self.factors = self.of_mine(factors)
        stacks = [getattr(experts, name) for name in products(experts)]
        for stack in stacks:
            stack.fetch()
        self.dtype = stacks[0].dtype
        self.matrices = [stack.matrix(index) for stack in stacks]
        self.biases: list[torch.Tensor | None] = [None, None]
        if experts.has_bias:
            self.biases = [getattr(experts, f"{name}_bias")[index] for name in products(experts)]

    def of_mine(self, factors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Views: A (r, in), B (out, r) of this expert in turn."""
        num, index = self.experts.num_experts, self.index
        return [
            factor.view(factor.shape[0], -1, num)[:, :, index]
            if place % 2
            else factor.view(num, -1, factor.shape[1])[index]
            for place, factor in enumerate(factors)
        ]

    def __call__(self, x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """(n, H) of its tokens, and their weights (n,) -> (n, H)."""
        return self._run(x.to(self.dtype), weights, self.factors)

    def gradients(self, x: torch.Tensor, weights: torch.Tensor, grad: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Of x, of the weights, and of each A and B."""
        with torch.enable_grad():
            x, weights, *factors = (t.detach().requires_grad_() for t in (x.to(self.dtype), weights, *self.factors))
            y = self._run(x, weights, factors)
            return torch.autograd.grad(y, [x, weights, *factors], grad.to(y.dtype))

    def _run(self, x: torch.Tensor, weights: torch.Tensor, factors: Sequence[torch.Tensor]) -> torch.Tensor:
        experts, left = self.experts, iter(factors)
        y = self._product(0, x, left)
        y = experts._apply_gate(y) if experts.has_gate else experts.act_fn(y)
        y = self._product(1, y, left)
        if experts.has_post_expert_norm:
            y = experts.post_expert_norm(y)
        return y * weights[:, None]

    def _product(self, which: int, x: torch.Tensor, factors: Iterator[torch.Tensor]) -> torch.Tensor:
        matrix, bias, scale = self.matrices[which], self.biases[which], self.scales[which]
        y = x @ matrix if self.experts.is_transposed else x @ matrix.T
        if bias is not None:
            y = y + bias.to(y.dtype)
        if scale is not None:
            a, b = next(factors).to(x.dtype), next(factors).to(x.dtype)
            y = y + scale * ((x @ a.T) @ b.T)
        return y
