"""Adapters that begin from the base's weights, not beside them: PiSSA and LoftQ."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from trainer.errors import ModelError
from trainer.model.adapters.lora import LoRA
from trainer.model.adapters.targets import find_targets
from trainer.ranges import AT_LEAST_1
from trainer.registry import option

if TYPE_CHECKING:
    import torch

    from trainer.model.adapters.weight_share import Pair, RoundTrip


@option("adapter", "pissa")
@dataclass
class PiSSA(LoRA):
    """B A begins as the r largest singular directions of W, and the frozen base keeps the rest (Meng et al. 2024).

    They are computed where each weight is still in full, before it is quantised. The result is a LoRA of rank 2 r on
    the base as it was: what B A has become less what it was.
    """

    svd_iterations: Annotated[int | None, AT_LEAST_1]
    """subspace iterations of a randomised decomposition; null: the exact one, minutes for a model of billions"""

    costs = "a decomposition of every adapted weight at each start, an adapter file twice as large"
    adapts_stacks = False

    def problems(self, config):
        problems = super().problems(config)
        if self.init_from is not None:
            problems.append("adapter.init_from: this adapter begins from the base's own weights. Use adapter=lora")
        if config.model.quantized_cache:
            problems.append(
                "model.quantized_cache=true: stores the base as it is, and this adapter takes a part out of it. "
                "Use model.quantized_cache=false"
            )
        return problems

    def check(self, model):
        super().check(model)
        for name in find_targets(model, self.target_modules):
            layer = model.get_submodule(name)
            if self.r > min(layer.in_features, layer.out_features):
                raise ModelError(
                    f"adapter.r={self.r}: {name} has {layer.out_features} x {layer.in_features} weights and no more "
                    f"singular directions than {min(layer.in_features, layer.out_features)}. Lower adapter.r."
                )

    def weight_share(self, quant, compute_dtype, device):
        from trainer.model.adapters.weight_share import WeightShare, round_trip

        return WeightShare(self, round_trip(quant, compute_dtype, device))

    def split(self, weight: torch.Tensor, round_trip: RoundTrip) -> tuple[torch.Tensor, Pair]:
        """A weight (d, k), in fp32, as what the base keeps of it (before it is quantised) and the first A, B."""
        from trainer.model.adapters.weight_share import low_rank

        a, b = low_rank(weight, self.r, self.alpha / self.r, self.svd_iterations)
        return weight - self.alpha / self.r * b @ a, (a, b)


@option("adapter", "loftq")
@dataclass
class LoftQ(PiSSA):
    """B A begins as the r largest singular directions of what quantising loses, in turns (Li et al. 2023)."""

    iterations: Annotated[int, AT_LEAST_1]
    """turns of quantising W - B A, and of B A after what that lost"""

    costs = "some decompositions of every adapted weight at each start, an adapter file twice as large"

    def problems(self, config):
        if config.quant.loaded_as is None:
            return [
                *super().problems(config),
                "adapter=loftq: makes up for what quantising loses; use quant=nf4, fp4 or int8, or adapter=pissa",
            ]
        return super().problems(config)

    def split(self, weight, round_trip):
        from trainer.model.adapters.weight_share import low_rank

        scale, product = self.alpha / self.r, 0.0
        for _ in range(self.iterations):
            kept = weight - product
            a, b = low_rank(weight - round_trip(kept), self.r, scale, self.svd_iterations)
            product = scale * b @ a
        return kept, (a, b)
