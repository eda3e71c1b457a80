"""Optimizers of the library pytorch-optimizer, an extra: GaLore and schedule-free AdamW."""

from __future__ import annotations

import importlib.util
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Annotated

from trainer.ranges import AT_LEAST_1, POSITIVE
from trainer.registry import option
from trainer.training.optimizers.adam import Adam
from trainer.training.optimizers.matrices import ForMatrices

LIBRARY = "pytorch_optimizer"


def missing(option_name: str) -> list[str]:
    """One line where the library is not there."""
    if importlib.util.find_spec(LIBRARY) is not None:
        return []
    return [
        f"optim={option_name}: needs the library pytorch-optimizer, which is not installed: pip install "
        "'trainer[optimizers]'"
    ]


@option("optim", "galore_adamw")
@dataclass
class GaLore(ForMatrices):
    """AdamW in the gradient's own singular directions (Zhao et al. 2024): for weights (d, k) with d <= k, state of
    rank x (d + 2 k) numbers instead of 2 d k."""

    rank: Annotated[int, AT_LEAST_1]
    """dimensions of that space; a matrix whose shorter side has no more is AdamW's"""
    update_interval: Annotated[int, AT_LEAST_1]
    """steps from one decomposition to the next"""
    scale: Annotated[float, POSITIVE]
    """of the projected update"""

    costs = "a singular value decomposition of each gradient every optim.update_interval steps"

    def problems(self, config):
        if config.adapter.trains_base:
            return missing("galore_adamw")
        return [
            *missing("galore_adamw"),
            "optim=galore_adamw: projects gradients of whole weights, and an adapter's are low-rank already: use "
            "adapter=none with quant=none, or optim=adamw_8bit",
        ]

    def takes(self, parameter):
        return super().takes(parameter) and min(parameter.shape) > self.rank

    def for_matrices(self, parameters):
        from pytorch_optimizer import GaLore
        from pytorch_optimizer.optimizer.utils.galore import GaLoreProjector

        how = {"rank": self.rank, "update_proj_gap": self.update_interval}
        how |= {"scale": self.scale, "projection_type": "std"}
        groups = [{**group, **how} for group in self.groups(parameters)]
        optimizer = GaLore(groups, lr=self.learning_rate, betas=tuple(self.betas), eps=self.eps)
        for parameter in parameters:  # made here and not in the first step, for a saved one to be loaded into
            optimizer.state[parameter]["projector"] = GaLoreProjector(**how)
        return optimizer

    def memory(self, parameters, device_type):
        found = super().memory(parameters, device_type)
        largest = max((p.numel() + min(p.shape) ** 2 for p in parameters if self.takes(p)), default=0)
        # Of a decomposition: the singular vectors of both sides and what LAPACK or cuSOLVER works in.
        return replace(found, workspace=max(found.workspace, 3 * 4 * largest))


@option("optim", "adamw_schedule_free")
@dataclass
class ScheduleFreeAdamW(Adam):
    """AdamW that averages its weights instead of lowering its rate (Defazio et al. 2024).

    It trains at a point between the average and the newest weights. Evaluation and the result are of the average;
    a checkpoint holds the point where training goes on.
    """

    costs = "weights are averaged: held-out loss and the result are the average's"

    def problems(self, config):
        problems = missing("adamw_schedule_free")
        if self.betas[0] == 0:
            problems.append("optim.betas: the first must be above 0 for adamw_schedule_free, which divides by it")
        if config.schedule.factor(1000, 1000) < 1:
            problems.append(
                "optim=adamw_schedule_free: takes the place of a falling learning rate: use schedule=constant, whose "
                "warm-up it keeps"
            )
        return problems

    def build(self, parameters):
        from pytorch_optimizer import ScheduleFreeAdamW

        return ScheduleFreeAdamW(
            self.groups(parameters), lr=self.learning_rate, betas=tuple(self.betas), eps=self.eps, foreach=False
        )

    @contextmanager
    def evaluating(self, optimizer):
        import torch

        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        trained = [p.detach().clone() for p in parameters]  # there and back is not the same to the last bit
        optimizer.eval()
        try:
            yield
        finally:
            optimizer.train()
            with torch.no_grad():
                for parameter, value in zip(parameters, trained, strict=True):
                    parameter.copy_(value)
