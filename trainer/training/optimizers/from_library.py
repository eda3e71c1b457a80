"""Optimizers of the library pytorch-optimizer, an extra: GaLore and schedule-free AdamW."""

from __future__ import annotations

import importlib.util
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Annotated

from trainer.ranges import AT_LEAST_1, POSITIVE
from trainer.registry import name_of, option
from trainer.training.optimizers.adam import Adam, AdamW8bit
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
        name = name_of("optim", self)
        if config.adapter.trains_base:
            return missing(name)
        return [
            *missing(name),
            f"optim={name}: projects gradients of whole weights, and an adapter's are low-rank already: use "
            "adapter=none with quant=none, or optim=adamw_8bit",
        ]

    def takes(self, parameter):
        return super().takes(parameter) and min(parameter.shape) > self.rank

    def for_matrices(self, parameters):
        from pytorch_optimizer import GaLore
        from pytorch_optimizer.optimizer.utils.galore import GaLoreProjector

        how = self._how()
        groups = [{**group, **how} for group in self.groups(parameters)]
        optimizer = GaLore(groups, lr=self.learning_rate, betas=tuple(self.betas), eps=self.eps)
        for parameter in parameters:  # made here and not in the first step, for a saved one to be loaded into
            optimizer.state[parameter]["projector"] = GaLoreProjector(**how)
        return optimizer

    def _how(self):
        """In the library's words."""
        how = {"rank": self.rank, "update_proj_gap": self.update_interval}
        return how | {"scale": self.scale, "projection_type": "std"}

    def memory(self, parameters, device_type):
        found = super().memory(parameters, device_type)
        return replace(found, workspace=max(found.workspace, self._decomposition(parameters)))

    def _decomposition(self, parameters):
        """Bytes of the largest: the singular vectors of both sides and what LAPACK or cuSOLVER works in."""
        return 3 * 4 * max((p.numel() + min(p.shape) ** 2 for p in parameters if self.takes(p)), default=0)


@option("optim", "galore_adamw_8bit")
@dataclass
class GaLore8bit(GaLore):
    """The same with moments in 8 bits: for weights (d, k) with d <= k, 4 rank d + 2.03 rank k bytes of state."""

    def for_matrices(self, parameters):
        import bitsandbytes as bnb
        from pytorch_optimizer.optimizer.utils.galore import GaLoreProjector

        from trainer.training.optimizers.projected import Projected

        def inner(groups):
            return bnb.optim.AdamW8bit(groups, lr=self.learning_rate, betas=tuple(self.betas), eps=self.eps)

        groups = self.groups(parameters)
        return Projected(groups, inner, lambda: GaLoreProjector(**self._how()), self.rank, self.learning_rate)

    def memory(self, parameters, device_type):
        """Of the parts, each measured: bitsandbytes' step reads values, which a plan has none of."""
        import torch

        from trainer.model.live_storages import rounded
        from trainer.training.optimizer_memory import OptimizerMemory, measured
        from trainer.training.optimizers.projected import projected_shape

        size = rounded(device_type)
        (_, matrices), (build, others) = self._shares(parameters)
        with torch.device("meta"):
            stand_ins = [torch.nn.Parameter(torch.empty(projected_shape(p.shape, self.rank))) for p in matrices]
            bases = [torch.empty(self.rank, min(p.shape)) for p in matrices]
        eight_bits = AdamW8bit(self.learning_rate, self.weight_decay, self.betas, self.eps)
        low, rest = (measured(b, p, device_type) for b, p in ((eight_bits.build, stand_ins), (build, others)))
        state = low.state + rest.state + sum(map(size, bases))
        return OptimizerMemory(state, max(rest.workspace, self._decomposition(parameters)))


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
