"""Optimizer state to plain tensors and numbers, and back. No pickle.

bitsandbytes' code tables (qmap) are shared between parameters and constant: they are not saved. Its own
load_state_dict would move paged state off its pages, so the state is initialised as in a first step and then filled.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

TALLIES = ("step", "lr_max", "weight_sum")
"""What some optimizers count for a whole group of parameters and not for each."""
TENSORS, SCALARS = "optimizer.safetensors", "optimizer.json"
GROUP = "group-"
"""In SCALARS: before a group's number."""
MADE_BY = "made_by"
"""In SCALARS: the optimizer's class. Checkpoints of earlier versions lack it."""


def save_optimizer(optimizer: torch.optim.Optimizer, folder: Path) -> None:
    """Writes the state of every parameter, numbered in the groups' order."""
    tensors: dict[str, torch.Tensor] = {}
    scalars: dict[str, float | int | str] = {MADE_BY: _name(optimizer)}
    for index, (_, _, parameter) in enumerate(_parameters(optimizer)):
        for key, value in flat(optimizer.state.get(parameter, {})).items():
            if isinstance(value, torch.Tensor):
                tensors[f"{index}.{key}"] = value.detach().cpu().contiguous()
            else:
                scalars[f"{index}.{key}"] = value
    for index, group in enumerate(optimizer.param_groups):
        scalars |= {f"{GROUP}{index}.{key}": group[key] for key in TALLIES if key in group}
    save_file(tensors, folder / TENSORS)
    (folder / SCALARS).write_text(json.dumps(scalars))


def load_optimizer(optimizer: torch.optim.Optimizer, folder: Path) -> None:
    """Fills a freshly built optimizer with what save_optimizer wrote. Raises ValueError where another optimizer did."""
    saved: dict[int, dict[str, torch.Tensor | float | int]] = {}
    scalars = json.loads((folder / SCALARS).read_text())
    made_by = scalars.pop(MADE_BY, _name(optimizer))
    for index, group in enumerate(optimizer.param_groups):
        for key in TALLIES:
            if f"{GROUP}{index}.{key}" in scalars:
                group[key] = scalars.pop(f"{GROUP}{index}.{key}")
    for name, value in [*load_file(folder / TENSORS).items(), *scalars.items()]:
        index, _, key = name.partition(".")
        saved.setdefault(int(index), {})[key] = value
    is_bitsandbytes = hasattr(optimizer, "init_state")
    foreign = ValueError(f"its optimizer state is that of {made_by}, and this run's optimizer is {_name(optimizer)}")
    if made_by != _name(optimizer) and not (is_bitsandbytes and made_by.startswith("bitsandbytes.")):
        raise foreign
    if is_bitsandbytes:
        optimizer.check_overrides()
        optimizer.to_gpu()
        optimizer.initialized = True
    for index, (group_index, in_group, parameter) in enumerate(_parameters(optimizer)):
        if index not in saved:
            continue
        if is_bitsandbytes:
            optimizer.init_state(optimizer.param_groups[group_index], parameter, group_index, in_group)
        state = optimizer.state[parameter]
        if is_bitsandbytes and _kinds(state) != _kinds(saved[index]):  # paged or not, the state is the same
            raise foreign
        for name, value in saved[index].items():
            part, _, key = name.rpartition(".")
            state = vars(optimizer.state[parameter][part]) if part else optimizer.state[parameter]
            if isinstance(state.get(key), torch.Tensor):
                state[key].copy_(value)
            elif isinstance(value, torch.Tensor) and key != "step":
                state[key] = value.to(parameter.device)
            else:
                state[key] = value  # torch keeps its step counter on the host


def flat(state: dict[str, Any]) -> dict[str, Any]:
    """A parameter's state without code tables; what objects in it hold, by their name and its name."""
    found: dict[str, Any] = {}
    for key, value in state.items():
        if key.startswith("qmap"):
            continue
        if hasattr(value, "__dict__") and not isinstance(value, torch.Tensor):
            held = (torch.Tensor, int, float)
            found |= {f"{key}.{name}": part for name, part in vars(value).items() if isinstance(part, held)}
        else:
            found[key] = value
    return found


def _name(optimizer: torch.optim.Optimizer) -> str:
    return f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"


def _kinds(state: dict[str, torch.Tensor | float | int]) -> dict[str, torch.dtype | None]:
    """What a parameter's state is made of."""
    return {key: getattr(value, "dtype", None) for key, value in state.items() if not key.startswith("qmap")}


def _parameters(optimizer: torch.optim.Optimizer):
    """(group index, index in the group, parameter), in order."""
    for group_index, group in enumerate(optimizer.param_groups):
        for in_group, parameter in enumerate(group["params"]):
            yield group_index, in_group, parameter
