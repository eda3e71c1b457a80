"""Mixtures of experts by their structure: which modules hold stacked experts, and which layers route to them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainer.errors import ModelError

if TYPE_CHECKING:
    import torch


def decoder_experts(model: torch.nn.Module) -> list[str]:
    """Full names of the modules of the text decoder that hold stacked experts, quantised or not."""
    inside = {id(module) for module in model.get_decoder().modules() if _stacks(module)}
    return [name for name, module in model.named_modules() if id(module) in inside]


def stack_names(model: torch.nn.Module) -> list[str]:
    """Full names of the stacks themselves."""
    return [f"{name}.{own}" for name in decoder_experts(model) for own in _stacks(model.get_submodule(name))]


def _stacks(module: torch.nn.Module) -> list[str]:
    """Names of what has three dimensions in a module of experts: parameters, or what stands for them in 4 bits."""
    if "Experts" not in type(module).__name__:
        return []
    return [name for name, held in [*module._parameters.items(), *module._modules.items()] if _ndim(held) == 3]


def _ndim(held: torch.nn.Parameter | torch.nn.Module | None) -> int:
    return len(getattr(held, "shape", ()))


def products(experts: torch.nn.Module) -> tuple[str, str]:
    """Names of an expert's two matrices, in order; of a module that `check_experts` lets pass."""
    return ("gate_up_proj" if experts.has_gate else "up_proj"), "down_proj"


def check_experts(model: torch.nn.Module, asked: str) -> None:
    """Raises ModelError for stacks that are not computed expert by expert, as transformers' own interface has it."""
    for name in decoder_experts(model):
        experts = model.get_submodule(name)
        known = hasattr(experts, "is_transposed") and hasattr(experts, "has_gate")
        if not known or set(_stacks(experts)) != set(products(experts)):
            raise ModelError(
                f"{asked}: the experts of this {model.config.model_type} ({type(experts).__name__}) are computed in a "
                "way of their own, so they would stay in 16 bits. Use quant=none."
            )


def check_auxiliary_loss(model: torch.nn.Module) -> None:
    """Raises ModelError where a mixture's configuration asks for a loss of its router beside that of the targets."""
    config = model.config.get_text_config()
    coefficient = getattr(config, "router_aux_loss_coef", None) or 0.0
    if decoder_experts(model) and getattr(config, "output_router_logits", False) and coefficient > 0:
        raise ModelError(
            f"{config.model_type}: output_router_logits=true adds a loss that balances the router "
            f"(router_aux_loss_coef={coefficient}), and the router is frozen here. Set output_router_logits to false "
            "in the model's config.json (or model.architecture)."
        )


def check_not_cached(model: torch.nn.Module, quantized_cache: bool) -> None:
    """Raises ModelError where a cache is asked for that holds no stacks."""
    if quantized_cache and decoder_experts(model):
        raise ModelError(
            f"model.quantized_cache=true: the experts of this {model.config.model_type} are stacked tensors, which the "
            "cache does not hold yet. Use model.quantized_cache=false."
        )


def routers(model: torch.nn.Module) -> set[str]:
    """Names of linear layers beside stacked experts that give a number an expert, or one for a shared expert: they
    stay as they are and frozen."""
    import torch

    found = set()
    for name in decoder_experts(model):
        beside, _, own = name.rpartition(".")
        num = _num_experts(model.get_submodule(name))
        for inner, module in model.get_submodule(beside).named_modules():
            if isinstance(module, torch.nn.Linear) and not inner.startswith(f"{own}."):
                found |= {f"{beside}.{inner}"} if module.out_features in (1, num) else set()
    return found


def active_weights(model: torch.nn.Module) -> int:
    """Weights of stacked experts that one token meets."""
    each = getattr(model.config.get_text_config(), "num_experts_per_tok", None) or 1
    holders = [model.get_submodule(name) for name in decoder_experts(model)]
    return sum(getattr(held, name).shape[1:].numel() * each for held in holders for name in _stacks(held))


def _num_experts(experts: torch.nn.Module) -> int:
    return getattr(experts, _stacks(experts)[0]).shape[0]
