"""What a parameter is beyond its shape: said where it is made, read where optimizers group parameters."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def set_rate_ratio(parameter: torch.nn.Parameter, ratio: float) -> None:
    """It learns at this multiple of the run's rate."""
    parameter.rate_ratio = ratio


def rate_ratio(parameter: torch.nn.Parameter) -> float:
    return getattr(parameter, "rate_ratio", 1.0)


def set_decays(parameter: torch.nn.Parameter, yes: bool) -> None:
    """Weight decay shrinks it, or not."""
    parameter.decays = yes


def decays(parameter: torch.nn.Parameter) -> bool:
    """What is not said decays where it is a matrix."""
    return getattr(parameter, "decays", parameter.ndim >= 2)


def is_table(parameter: torch.nn.Parameter) -> bool:
    """Of embeddings or of the output head."""
    return getattr(parameter, "is_table", False)


def mark_tables(model: torch.nn.Module) -> None:
    """Parameters of embeddings and of the output head, which an optimizer of hidden matrices must leave out."""
    import torch

    head = model.get_output_embeddings()
    for name, module in model.named_modules():
        inside = isinstance(module, torch.nn.Embedding) or module is head or "token_adapter" in name.split(".")
        for parameter in module.parameters() if inside else ():
            parameter.is_table = True


def is_hidden_matrix(parameter: torch.nn.Parameter) -> bool:
    """A matrix between two layers of hidden states; no row of it stands for a token."""
    return parameter.ndim == 2 and not is_table(parameter)
