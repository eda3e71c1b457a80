"""Which modules an adapter may sit on, and which the user means."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from trainer.errors import ModelError, closest

if TYPE_CHECKING:
    import torch


def decoder_linears(model: torch.nn.Module) -> list[str]:
    """Full names of the linear layers of the text decoder: no head, no vision tower, no router of a mixture."""
    import torch

    from trainer.model.mixtures import routers

    decoder, left_out = model.get_decoder(), routers(model)
    prefix = next(name for name, module in model.named_modules() if module is decoder)
    names = [name for name, module in decoder.named_modules() if isinstance(module, torch.nn.Linear)]
    names = [f"{prefix}.{name}" if prefix else name for name in names]
    return [name for name in names if name not in left_out]


def find_targets(model: torch.nn.Module, target_modules: Any) -> list[str]:
    """Full names of the modules to adapt; ModelError where a name, or the expression, matches nothing."""
    import torch

    linears = decoder_linears(model)
    if target_modules == "all-linear":
        return linears
    every = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
    endings = sorted({name.rsplit(".", 1)[-1] for name in every})
    if isinstance(target_modules, str):
        try:
            expression = re.compile(target_modules)
        except re.error as error:
            raise ModelError(
                f"adapter.target_modules={target_modules!r} is not a regular expression: {error}."
            ) from None
        found = [name for name in every if expression.fullmatch(name)]
        if not found:
            raise ModelError(
                f"adapter.target_modules={target_modules!r} matches no linear layer as a whole name"
                f"{closest(target_modules, endings)}. A name such as {every[0]} must match from start to end; "
                f"a list holds name endings, of which there are: {', '.join(endings)}."
            )
        return found
    missing = [t for t in target_modules if not any(ends_with(name, t) for name in every)]
    if missing:
        hints = ", ".join(f"{name}{closest(name, endings)}" for name in missing)
        raise ModelError(f"adapter.target_modules: no linear layer is named {hints}. There are: {', '.join(endings)}.")
    wanted = set(linears) | {name for name in every if name.rsplit(".", 1)[-1] == "lm_head"}
    return [name for name in every if name in wanted and any(ends_with(name, t) for t in target_modules)]


def ends_with(name: str, ending: str) -> bool:
    return name == ending or name.endswith("." + ending)


def shortest(model: torch.nn.Module, targets: list[str]) -> list[str]:
    """Name endings where they mean the same modules, full names otherwise; it is what adapter_config.json shows."""
    endings = sorted({name.rsplit(".", 1)[-1] for name in targets})
    named = {n for n, _ in model.named_modules() if any(ends_with(n, ending) for ending in endings)}
    return endings if named == set(targets) else targets
