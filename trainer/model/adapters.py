"""Options of the group `adapter`: what is trained on top of the frozen base.

Whatever the option, trainable parameters are fp32 masters: a bf16 adapter would round small updates away.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from trainer.errors import ModelError, closest
from trainer.ranges import AT_LEAST_1, BELOW_1, POSITIVE
from trainer.registry import Section, option

if TYPE_CHECKING:
    import torch

RANK = AT_LEAST_1.up_to(65536)
"""no model's layers are wider"""


@dataclass
class Adapter(Section, ABC):
    """Which parameters train."""

    trains_base: ClassVar[bool] = False
    """whether the weights of the base train themselves"""
    costs: ClassVar[str] = "another set of parameters trains"
    """what choosing it instead of another takes away"""

    @property
    def runs_fused(self) -> bool:
        """Whether the trainer's own functions take the place of the blocks' modules."""
        return False

    def variants(self) -> list[tuple[str, Adapter, str]]:
        """Other settings worth a look: the words that make them, the option with them, what they cost."""
        return []

    @abstractmethod
    def check(self, model: torch.nn.Module) -> None:
        """Raises ModelError if the option does not fit this model; `model` may be on the meta device."""

    def trained_whole(self, model: torch.nn.Module) -> list[str]:
        """Names in the settings by which frozen linear layers of the text decoder train whole."""
        return []

    @abstractmethod
    def attach(self, model: torch.nn.Module, new_ids: Sequence[int] = ()) -> torch.nn.Module:
        """The model with its trainable parameters, everything else frozen; the embeddings of new tokens train too."""


@option("adapter", "none")
@dataclass
class NoAdapter(Adapter):
    """All parameters train."""

    trains_base = True

    def check(self, model):
        pass

    def attach(self, model, new_ids=()):
        import torch

        for parameter in model.parameters():
            parameter.requires_grad_(True)
            parameter.data = parameter.data.to(torch.float32)
        return model


@option("adapter", "lora")
@dataclass
class LoRA(Adapter):
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
    modules_to_save: list[str]
    """name endings of modules trained and saved whole, such as embed_tokens"""
    fused: bool
    """own autograd functions where they know the modules: same result and adapter file, less memory and time"""

    @property
    def runs_fused(self):
        return self.fused

    def variants(self):
        ranks = [(self.r // 2, "less capacity")] if self.r > 1 else []
        ranks.append((self.r * 2, "more capacity"))
        return [(f"adapter.r={rank}", replace(self, r=rank), cost) for rank, cost in ranks]

    def problems(self, config):
        names = self.target_modules
        if isinstance(names, str) and names:
            return []
        if isinstance(names, list) and names and all(isinstance(name, str) and name for name in names):
            return []
        return [
            f"adapter.target_modules={names}: must be all-linear, a regular expression, or a list of module name "
            "endings"
        ]

    def check(self, model):
        find_targets(model, self.target_modules)
        missing = [
            name
            for name in self.modules_to_save
            if not any(_ends_with(module, name) for module, _ in model.named_modules())
        ]
        if missing:
            raise ModelError(f"adapter.modules_to_save: no module of the model is named {', '.join(missing)}.")

    def trained_whole(self, model):
        names = [f".{name}." for name in decoder_linears(model)]  # a module that holds such a layer counts too
        return [ending for ending in self.modules_to_save if any(f".{ending}." in name for name in names)]

    def attach(self, model, new_ids=()):
        import peft
        import torch

        from trainer.model.fused import modules as fused
        from trainer.model.new_tokens import keep_tables_apart, trainable_rows

        targets = find_targets(model, self.target_modules)
        config = peft.LoraConfig(
            task_type="CAUSAL_LM",
            r=self.r,
            lora_alpha=self.alpha,
            lora_dropout=self.dropout,
            target_modules=_shortest(model, targets),
            modules_to_save=list(self.modules_to_save) or None,
            **trainable_rows(model, new_ids),
        )
        model.requires_grad_(False)
        adapted = peft.get_peft_model(model, config)
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.to(torch.float32)
        keep_tables_apart(adapted)
        if self.fused:
            fused.install(adapted)
        return adapted


def decoder_linears(model: torch.nn.Module) -> list[str]:
    """Full names of the linear layers of the text decoder: no head, no vision tower."""
    import torch

    decoder = model.get_decoder()
    prefix = next(name for name, module in model.named_modules() if module is decoder)
    return [
        f"{prefix}.{name}" if prefix else name
        for name, module in decoder.named_modules()
        if isinstance(module, torch.nn.Linear)
    ]


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
    missing = [t for t in target_modules if not any(_ends_with(name, t) for name in every)]
    if missing:
        hints = ", ".join(f"{name}{closest(name, endings)}" for name in missing)
        raise ModelError(f"adapter.target_modules: no linear layer is named {hints}. There are: {', '.join(endings)}.")
    wanted = set(linears) | {name for name in every if name.rsplit(".", 1)[-1] == "lm_head"}
    return [name for name in every if name in wanted and any(_ends_with(name, t) for t in target_modules)]


def _ends_with(name: str, ending: str) -> bool:
    return name == ending or name.endswith("." + ending)


def _shortest(model: torch.nn.Module, targets: list[str]) -> list[str]:
    """Name endings where they mean the same modules, full names otherwise; it is what adapter_config.json shows."""
    endings = sorted({name.rsplit(".", 1)[-1] for name in targets})
    named = {n for n, _ in model.named_modules() if any(_ends_with(n, ending) for ending in endings)}
    return endings if named == set(targets) else targets
