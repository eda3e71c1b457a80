"""Low-rank updates: LoRA, and what changes its scale, its direction or its learning rates.

d: output features of a layer. k: input features.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from trainer.errors import ModelError
from trainer.model.adapters.adapter import PeftAdapter
from trainer.model.adapters.targets import decoder_linears, ends_with, find_targets, shortest
from trainer.model.mixtures import stack_names
from trainer.model.roles import set_rate_ratio
from trainer.ranges import AT_LEAST_1, BELOW_1, POSITIVE
from trainer.registry import name_of, option

if TYPE_CHECKING:
    import torch

RANK = AT_LEAST_1.up_to(65536)
"""no model's layers are wider"""


class Bias(Enum):
    """Which biases of the base train."""

    none = "none"
    lora_only = "lora_only"
    all = "all"


@option("adapter", "lora")
@dataclass
class LoRA(PeftAdapter):
    """W x + (alpha / r) B A x with W frozen (Hu et al. 2021), through PEFT."""

    r: Annotated[int, RANK]
    """rank of the update"""
    alpha: Annotated[float, POSITIVE]
    """scale of the update: alpha / r"""
    dropout: Annotated[float, BELOW_1]
    """dropout on the adapter's input, 0 to below 1"""
    target_modules: Any
    """all-linear: every linear layer of the text decoder; another string: a regular expression that matches whole
    module names; a list: name endings"""
    target_parameters: list[str]
    """name endings of stacked experts that are adapted too, such as experts.down_proj: each expert by itself"""
    modules_to_save: list[str]
    """name endings of modules trained and saved whole, such as embed_tokens"""
    bias: Bias
    """which biases of the base train: none, those of the adapted layers (lora_only), or all"""
    fused: bool
    """own autograd functions where they know the modules: same result and adapter file, less memory and time"""

    shapes_update = (
        "peft_type",
        "target_modules",
        "target_parameters",
        "modules_to_save",
        "r",
        "lora_alpha",
        "use_rslora",
        "use_dora",
        "bias",
    )
    grows = True
    variant: ClassVar[dict[str, Any]] = {}
    """fields of peft.LoraConfig by which the update is another than LoRA's"""
    adapts_stacks: ClassVar[bool] = True
    """whether PEFT has this update for stacked experts"""

    @property
    def runs_fused(self):
        return self.fused

    def variants(self):
        ranks = [(self.r // 2, "less capacity")] if self.r > 1 else []
        ranks.append((self.r * 2, "more capacity"))
        return [(f"adapter.r={rank}", replace(self, r=rank), cost) for rank, cost in ranks]

    def problems(self, config):
        problems = super().problems(config)
        if self.target_parameters and (self.dropout or not self.adapts_stacks):
            problems.append(
                f"adapter.target_parameters={self.target_parameters}: PEFT adapts stacked experts without dropout, as "
                "lora, rslora and lora_plus do: leave them out, or use one of those with adapter.dropout=0"
            )
        names = self.target_modules
        if isinstance(names, str) and names:
            return problems
        if isinstance(names, list) and names and all(isinstance(name, str) and name for name in names):
            return problems
        return [
            *problems,
            f"adapter.target_modules={names}: must be all-linear, a regular expression, or a list of module name "
            "endings",
        ]

    def check(self, model):
        super().check(model)
        missing = [
            name
            for name in self.modules_to_save
            if not any(ends_with(module, name) for module, _ in model.named_modules())
        ]
        if missing:
            raise ModelError(f"adapter.modules_to_save: no module of the model is named {', '.join(missing)}.")
        found = stack_names(model)
        missing = [name for name in self.target_parameters if not any(ends_with(one, name) for one in found)]
        if missing:
            raise ModelError(
                f"adapter.target_parameters: no stacked experts are named {', '.join(missing)}. There are: "
                f"{', '.join(sorted({'.'.join(one.split('.')[-2:]) for one in found})) or 'none in this model'}."
            )

    def trained_whole(self, model):
        names = [f".{name}." for name in decoder_linears(model)]  # a module that holds such a layer counts too
        return [ending for ending in self.modules_to_save if any(f".{ending}." in name for name in names)]

    def config(self, model, new_ids=()):
        import peft

        from trainer.model.new_tokens import trainable_rows

        targets = find_targets(model, self.target_modules)
        self._check_bias(model, targets)
        return peft.LoraConfig(
            task_type="CAUSAL_LM",
            r=self.r,
            lora_alpha=self.alpha,
            lora_dropout=self.dropout,
            target_modules=shortest(model, targets),
            target_parameters=list(self.target_parameters) or None,
            modules_to_save=list(self.modules_to_save) or None,
            bias=self.bias.name,
            **self.variant,
            **trainable_rows(model, new_ids),
        )

    def _check_bias(self, model: torch.nn.Module, targets: list[str]) -> None:
        biases = {name for name, _ in model.named_parameters() if name.endswith("bias")}
        if self.bias is Bias.lora_only:
            biases &= {f"{name}.bias" for name in targets}
        if self.bias is not Bias.none and not biases:
            raise ModelError(
                f"adapter.bias={self.bias.name}: this model has no such bias, so none would train. "
                "Use adapter.bias=none."
            )

    def attach(self, model, new_ids=()):
        from trainer.model.experts import beside
        from trainer.model.fused import modules as fused

        with beside(model):
            adapted = super().attach(model, new_ids)
        if self.fused:
            fused.install(adapted)
        return adapted


@option("adapter", "rslora")
@dataclass
class RankStabilisedLoRA(LoRA):
    """LoRA with the scale alpha / sqrt(r), which keeps its size as r grows (Kalajdzievski 2023)."""

    variant = {"use_rslora": True}


@option("adapter", "dora")
@dataclass
class DoRA(LoRA):
    """LoRA for the direction of each output's weights, and a trained length (Liu et al. 2024)."""

    variant = {"use_dora": True}
    adapts_stacks = False
    costs = "norms of the adapted weights in every forward pass"

    def problems(self, config):
        problems = super().problems(config)
        if config.offload.streams:
            key = f"offload={name_of('offload', config.offload)}"
            problems.append(f"adapter=dora: begins from the norms of weights that {key} moves away: use adapter=lora")
        if config.quant.loaded_as is not None and not config.quant.stores_4bit:
            key = f"quant={name_of('quant', config.quant)}"
            problems.append(f"adapter=dora: begins from the weights' norms, which {key} cannot give: use quant=nf4")
        return problems


@option("adapter", "lora_plus")
@dataclass
class LoRAPlus(LoRA):
    """LoRA whose B learns faster than its A (Hayou et al. 2024)."""

    learning_rate_ratio: Annotated[float, POSITIVE]
    """learning rate of B over that of A, which has optim.learning_rate"""

    def attach(self, model, new_ids=()):
        adapted = super().attach(model, new_ids)
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                set_rate_ratio(parameter, self.learning_rate_ratio)
        return adapted
