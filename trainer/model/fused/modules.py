"""Where the fused functions meet a model: chosen modules get a forward of their own, on the instance.

Nothing is replaced and no class is touched: modules, parameters and hooks stay PEFT's, so the saved adapter is the
same file. A pass that the functions do not cover (no gradients, adapters off or merged, hooks on an inner layer)
takes the module's own forward.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterator

import torch

from trainer.model.fused.functions import (
    GELU,
    GELU_TANH,
    SILU,
    Activation,
    Projection,
    gated_mlp,
    project,
    rms_norm,
)

SAME_INPUT = ("q_proj", "k_proj", "v_proj")
"""Names of layers that one attention module applies to one and the same tensor, in this order."""
GATED = ("gate_proj", "up_proj", "down_proj")
MIN_NORM_WEIGHT = 1e-6
"""A norm whose weight has smaller entries keeps its own forward: backward divides by the weight."""


def install(model: torch.nn.Module) -> None:
    """Gives fused forwards to all modules of an adapted model that qualify."""
    covered: set[torch.nn.Module] = set()
    for module in model.modules():
        layers = [getattr(module, name, None) for name in SAME_INPUT]
        if _eligible_together(layers):
            _install_group(layers)
            covered.update(layers)
        layers = [getattr(module, name, None) for name in GATED]
        if _eligible_together(layers) and _is_gated_mlp(module):
            _override(module, _mlp_forward(module, layers), "MLP", layers)
            covered.update(layers)
    for module in model.modules():
        if module not in covered and _is_adapted(module) and _eligible(module):
            _override(module, _single_forward(module), "single", [module])
        elif _is_rms_norm(module):
            _override(module, _norm_forward(module), "norm", [])


def remove(model: torch.nn.Module) -> None:
    """Gives every module its own forward back."""
    for module in model.modules():
        if _is_overridden(module):
            del module.__dict__["forward"]


KINDS = {"q/k/v": "q/k/v group", "MLP": "MLP", "single": "single layer", "norm": "norm"}
"""What a fused forward runs, in words."""


def describe(model: torch.nn.Module) -> str:
    """What of an adapted model runs through fused functions, and what does not, in one line."""
    forwards = [module.__dict__["forward"] for module in model.modules() if _is_overridden(module)]
    counts = Counter(forward.kind for forward in forwards if forward.kind)
    covered = {layer for forward in forwards for layer in forward.layers}
    left = sum(_is_adapted(module) and module not in covered for module in model.modules())
    parts = [f"{n} {words}{'s' * (n > 1)}" for kind, words in KINDS.items() if (n := counts[kind])]
    fused = f"fused {', '.join(parts)}" if parts else ""
    eager = f"PEFT's own forward for {left} adapted layers" if left else ""
    return "; ".join(part for part in (fused, eager) if part)


def _is_overridden(module: torch.nn.Module) -> bool:
    return hasattr(module.__dict__.get("forward"), "kind")


def _override(module: torch.nn.Module, forward: Callable[..., torch.Tensor], kind: str, layers: list) -> None:
    """`kind` counts in describe() where it is not empty; `layers` are the linear layers that `forward` computes."""
    forward.kind, forward.layers = kind, layers
    module.forward = forward


def _single_forward(layer: torch.nn.Module) -> Callable[..., torch.Tensor]:
    own = layer.forward

    def forward(x: torch.Tensor, *args, **kwargs) -> torch.Tensor:
        if args or kwargs or not _usable([layer], x):
            return own(x, *args, **kwargs)
        return project(x, [_projection(layer)], _tensors([layer]))[0]

    return forward


def _install_group(layers: list[torch.nn.Module]) -> None:
    """The first layer computes all outputs; the others hand theirs out if they are asked about the same tensor."""
    waiting: dict[torch.nn.Module, torch.Tensor] = {}
    asked: list[torch.Tensor] = []

    def first_forward(own):
        def forward(x: torch.Tensor, *args, **kwargs) -> torch.Tensor:
            waiting.clear()
            asked.clear()
            if args or kwargs or not _usable(layers, x):
                return own(x, *args, **kwargs)
            outputs = project(x, [_projection(layer) for layer in layers], _tensors(layers))
            asked.append(x)
            waiting.update(zip(layers[1:], outputs[1:], strict=True))
            return outputs[0]

        return forward

    def later_forward(layer, own):
        def forward(x: torch.Tensor, *args, **kwargs) -> torch.Tensor:
            if layer in waiting and asked[0] is x:
                output = waiting.pop(layer)
                if not waiting:
                    asked.clear()
                return output
            return own(x, *args, **kwargs)

        return forward

    _override(layers[0], first_forward(layers[0].forward), "q/k/v", layers)
    for layer in layers[1:]:
        _override(layer, later_forward(layer, layer.forward), "", [])


def _mlp_forward(mlp: torch.nn.Module, layers: list[torch.nn.Module]) -> Callable[..., torch.Tensor]:
    own, activation = mlp.forward, _activation(mlp.act_fn)

    def forward(x: torch.Tensor) -> torch.Tensor:
        trains = x.requires_grad or any(_is_adapted(layer) for layer in layers[:2])
        if not trains or not _usable(layers, x):
            return own(x)
        return gated_mlp(x, [_projection(layer) for layer in layers], activation, _tensors(layers))

    return forward


def _norm_forward(norm: torch.nn.Module) -> Callable[..., torch.Tensor]:
    own = norm.forward

    def forward(x: torch.Tensor) -> torch.Tensor:
        if not (torch.is_grad_enabled() and x.requires_grad) or norm.weight.requires_grad:
            return own(x)
        return rms_norm(x, norm.weight, norm.variance_epsilon)

    return forward


def _eligible_together(layers: list[torch.nn.Module | None]) -> bool:
    """All present and computable by the functions, at least one of them adapted."""
    return all(layer is not None and _eligible(layer) for layer in layers) and any(map(_is_adapted, layers))


def _eligible(layer: torch.nn.Module) -> bool:
    """A frozen plain or 4-bit linear layer, bare or with one plain LoRA of PEFT's (no DoRA, no trained bias)."""
    import bitsandbytes as bnb
    from peft.tuners.lora import Linear
    from peft.tuners.lora import bnb as peft_bnb

    base = _base(layer)
    known = type(base) is torch.nn.Linear or isinstance(base, bnb.nn.Linear4bit)
    if not known or any(p.requires_grad for p in base.parameters()):
        return False
    if not _is_adapted(layer):
        return layer is base
    names = list(layer.lora_A)
    return (
        type(layer) in (Linear, peft_bnb.Linear4bit)
        and len(names) == 1
        and not layer.lora_variant
        and not layer.fan_in_fan_out
        and not layer.lora_bias[names[0]]
        and type(layer.lora_dropout[names[0]]) in (torch.nn.Identity, torch.nn.Dropout)
    )


def _usable(layers: list[torch.nn.Module], x: torch.Tensor) -> bool:
    """Whether this very pass computes what the functions compute."""
    if not torch.is_grad_enabled():
        return False
    device = x.device.type
    if torch.is_autocast_enabled(device) and x.dtype is not torch.get_autocast_dtype(device):
        return False
    for layer in layers:
        base = _base(layer)
        if base._forward_hooks or base._forward_pre_hooks:
            return False
        if not _is_adapted(layer):
            continue
        if layer.disable_adapters or layer.merged or layer._forward_hooks or layer._forward_pre_hooks:
            return False
        if not torch.is_autocast_enabled(device) and x.dtype is not next(iter(layer.lora_A.values())).weight.dtype:
            return False
    return True


def _projection(layer: torch.nn.Module) -> Projection:
    if not _is_adapted(layer):
        return Projection(layer, adapted=False)
    (name,) = layer.lora_A
    dropout = layer.lora_dropout[name]
    rate = dropout.p if isinstance(dropout, torch.nn.Dropout) and dropout.training else 0.0
    return Projection(layer.base_layer, adapted=True, scale=layer.scaling[name], dropout=rate)


def _tensors(layers: list[torch.nn.Module]) -> list[torch.Tensor]:
    """A and B of each adapted layer."""
    return [tensor for layer in layers if _is_adapted(layer) for tensor in _pair(layer)]


def _pair(layer: torch.nn.Module) -> Iterator[torch.Tensor]:
    (name,) = layer.lora_A
    return iter((layer.lora_A[name].weight, layer.lora_B[name].weight))


def _is_adapted(layer: torch.nn.Module) -> bool:
    return hasattr(layer, "lora_A")


def _base(layer: torch.nn.Module) -> torch.nn.Module:
    return layer.base_layer if _is_adapted(layer) else layer


def _activation(module: torch.nn.Module) -> Activation | None:
    from transformers.activations import GELUActivation, GELUTanh, SiLUActivation

    if isinstance(module, torch.nn.GELU):
        return GELU_TANH if module.approximate == "tanh" else GELU
    known = {torch.nn.SiLU: SILU, SiLUActivation: SILU, GELUTanh: GELU_TANH, GELUActivation: GELU}
    return known.get(type(module))


@torch.no_grad()
def _is_gated_mlp(module: torch.nn.Module) -> bool:
    """Whether a module is down(act(gate(x)) * up(x)): names suggest it, one row of numbers proves it."""
    activation = _activation(getattr(module, "act_fn", None))
    if activation is None:
        return False
    base = _base(module.gate_proj)
    device = base.weight.device
    if device.type == "meta":
        return True  # no numbers: the planner traces shapes of models whose names say enough
    dtype = getattr(base, "compute_dtype", None) or base.weight.dtype
    x = torch.linspace(-1, 1, base.in_features, device=device, dtype=dtype)[None]  # (1, D)
    with torch.autocast(device.type, dtype=dtype, enabled=dtype is not torch.float32):
        expected = module.down_proj(activation.forward(module.gate_proj(x)) * module.up_proj(x))
        return torch.equal(module(x), expected)


@torch.no_grad()
def _is_rms_norm(module: torch.nn.Module) -> bool:
    """Whether a module is w * normalised(x) with a frozen w without zeros, by its numbers."""
    weight, epsilon = getattr(module, "weight", None), getattr(module, "variance_epsilon", None)
    if not isinstance(weight, torch.Tensor) or weight.ndim != 1 or not isinstance(epsilon, float):
        return False
    if weight.requires_grad or len(inspect.signature(module.forward).parameters) != 1:  # a gate beside x, or more
        return False
    if weight.is_meta:
        return True
    if not bool((weight.abs() > MIN_NORM_WEIGHT).all()):
        return False
    x = torch.linspace(-1, 2, weight.numel(), device=weight.device, dtype=weight.dtype)[None]  # (1, D)
    return torch.equal(module(x), rms_norm(x, weight, epsilon))
