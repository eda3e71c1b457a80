"""The MLP of each block over pieces of the row: what it makes of a whole long row is never alive at once.

An MLP looks at one token at a time, so pieces of the row give the same rows. Forward keeps the MLP's input alone;
backward runs piece after piece forward again and back. Under full checkpointing that is no more arithmetic: a block's
recomputation ends at the kept input, before the MLP. Gradients of x are those of the whole row; those of adapters are
sums over pieces, in another order than one product over the row would add. (ALST: Bekman et al. 2025, section 3.2.)

T: tokens of a row. D: hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch.autograd import Function
from torch.autograd.graph import saved_tensors_hooks

from trainer.errors import ModelError
from trainer.model.fused.pieces import pieces
from trainer.model.recompute import checkpointable, nothing_kept

AUTO = "auto"


def num_tiles(tiles: int | str, tokens: int, width: int) -> int:
    """Pieces of a row of `tokens`: auto makes them as long as the hidden size is wide, where they weigh what a weight
    matrix does."""
    wanted = -(-tokens // width) if tiles == AUTO else tiles
    return max(1, min(wanted, tokens))


def check_tiles(model: torch.nn.Module, tiles: int | str) -> list[torch.nn.Module]:
    """The MLPs that run in pieces. Raises ModelError where a block has no module `mlp`."""
    if tiles == 1:
        return []
    blocks = checkpointable(model)
    mlps = [getattr(block, "mlp", None) for block in blocks]
    if not blocks or any(mlp is None for mlp in mlps):
        kind = type(blocks[mlps.index(None)] if blocks else model).__name__
        raise ModelError(f"model.mlp_tiles={tiles}: {kind} has no module mlp to run in pieces. Use model.mlp_tiles=1.")
    return mlps


def tile(model: torch.nn.Module, tiles: int | str) -> None:
    """Gives the MLP of every block a forward over `tiles` pieces (auto: by length). Raises ModelError."""
    width = model.config.get_text_config().hidden_size
    for mlp in check_tiles(model, tiles):
        mlp.forward = _forward(mlp, tiles, width)


def _forward(mlp: torch.nn.Module, tiles: int | str, width: int) -> Callable[[torch.Tensor], torch.Tensor]:
    own = mlp.forward

    @wraps(own)
    def forward(x: torch.Tensor) -> torch.Tensor:  # (B, T, D) -> (B, T, D)
        count = num_tiles(tiles, x.shape[-2], width)
        if count == 1:
            return own(x)
        trained = [p for p in mlp.parameters() if p.requires_grad]
        if not (torch.is_grad_enabled() and (x.requires_grad or trained)):
            return torch.cat([own(piece) for piece in x.chunk(count, dim=-2)], dim=-2)
        kept = _Keep.apply(x, *trained)
        return _Tiled.apply(kept, own, count, kept.grad_fn, *trained)

    return forward


class _Keep(Function):
    """x as it is, saved for `_Tiled`. A node of its own, because a recomputation ends at the last saved tensor: this
    one, before any piece has been computed."""

    @staticmethod
    def forward(ctx, x, *trained):
        ctx.save_for_backward(x)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad, *[None] * (len(ctx.needs_input_grad) - 1)


class _Tiled(Function):
    """The MLP piece by piece. It saves nothing but the generator's state: nothing else draws from it between two
    pieces, so pieces that run in the same order draw the same. `node` saved its input."""

    @staticmethod
    def forward(ctx, x, own, count, node, *trained):
        ctx.own, ctx.count, ctx.node, ctx.trained = own, count, node, trained
        ctx.autocast = torch.is_autocast_enabled(x.device.type), torch.get_autocast_dtype(x.device.type)
        ctx.state = _generator(x.device)
        out = torch.empty_like(x)
        for piece, target in pieces(list(zip(x.chunk(count, dim=-2), out.chunk(count, dim=-2), strict=True))):
            # As in backward, with a graph that is dropped at once: the fused functions compute in training only. What
            # that graph saves is hidden from a checkpoint around it, whose recomputation would go on for it.
            hidden = saved_tensors_hooks(torch.Tensor.detach, lambda tensor: tensor)
            with torch.enable_grad(), hidden, nothing_kept():
                target.copy_(own(piece.detach().requires_grad_()).detach())
        return out

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.node.saved_tensors
        grad_x = torch.empty_like(x)
        sums: list[Any] = [None] * len(ctx.trained)
        enabled, dtype = ctx.autocast
        now = _generator(x.device)
        _restore(x.device, ctx.state)
        parts = zip(*(tensor.chunk(ctx.count, dim=-2) for tensor in (x, grad, grad_x)), strict=True)
        for piece, grad_out, target in pieces(list(parts)):
            piece = piece.detach().requires_grad_()
            wanted = [piece, *ctx.trained]
            with torch.enable_grad(), torch.autocast(x.device.type, dtype=dtype, enabled=enabled):
                out = ctx.own(piece)
            found = list(torch.autograd.grad(out, wanted, grad_out, allow_unused=True))
            target.copy_(found.pop(0))
            sums = [g if s is None else s if g is None else s.add_(g) for s, g in zip(sums, found, strict=True)]
            del out, found  # before the next piece's
        _restore(x.device, now)
        return grad_x, None, None, None, *sums


def _generator(device: torch.device) -> torch.Tensor:
    """State of the generator that dropout draws from."""
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def _restore(device: torch.device, state: torch.Tensor) -> None:
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    else:
        torch.set_rng_state(state)
