"""Methods of PEFT that are no low-rank update: IA3, and any other by its name."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from trainer.errors import ModelError, closest, listing
from trainer.model.adapters.adapter import PeftAdapter
from trainer.model.adapters.targets import decoder_linears, ends_with, find_targets, shortest
from trainer.registry import option

if TYPE_CHECKING:
    import torch

OURS = (
    "task_type",
    "peft_type",
    "inference_mode",
    "base_model_name_or_path",
    "revision",
    "auto_mapping",
    "peft_version",
)
"""Fields of PEFT's configurations that the trainer fills."""


@option("adapter", "ia3")
@dataclass
class IA3(PeftAdapter):
    """A trained factor for each key, value and inner feature of the MLP (Liu et al. 2022)."""

    target_modules: list[str]
    """name endings of the layers whose outputs are scaled"""
    feedforward_modules: list[str]
    """those of them whose inputs are scaled instead"""

    shapes_update = ("peft_type", "target_modules", "feedforward_modules")
    costs = "far fewer numbers train, at a higher learning rate"

    def problems(self, config):
        strangers = sorted(set(self.feedforward_modules) - set(self.target_modules))
        if strangers:
            return [
                *super().problems(config),
                f"adapter.feedforward_modules={strangers}: must be among adapter.target_modules={self.target_modules}",
            ]
        return super().problems(config)

    def config(self, model, new_ids=()):
        import peft

        return peft.IA3Config(
            task_type="CAUSAL_LM",
            target_modules=shortest(model, find_targets(model, self.target_modules)),
            feedforward_modules=list(self.feedforward_modules),
        )


@option("adapter", "peft")
@dataclass
class AnyMethod(PeftAdapter):
    """Any method of the installed PEFT that lives inside the model."""

    method: str
    """its name in peft.PeftType, such as LOHA, OFT or VERA"""
    fields: dict[str, Any]
    """its settings by PEFT's own names; without target_modules every linear layer of the text decoder is one"""

    def config(self, model, new_ids=()):
        from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING

        known = {kind.value: cls for kind, cls in PEFT_TYPE_TO_CONFIG_MAPPING.items()}
        name = self.method.upper()
        if name not in known:
            raise ModelError(
                f"adapter.method={self.method}: unknown to the installed PEFT{closest(name, known)}. "
                f"It has: {', '.join(sorted(known))}."
            )
        allowed = [field.name for field in fields(known[name]) if field.name not in OURS]
        wrong = [f"adapter.fields.{key}: unknown{closest(key, allowed)}" for key in self.fields if key not in allowed]
        if wrong:
            raise ModelError(f"{listing(wrong)}\n{name} has: {', '.join(sorted(allowed))}.")
        values = dict(self.fields)
        if "target_modules" in allowed:
            values["target_modules"] = self._targets(model, values.get("target_modules", "all-linear"))
        try:
            config = known[name](task_type="CAUSAL_LM", **values)
        except (TypeError, ValueError) as error:
            raise ModelError(f"adapter.method={name} adapter.fields={self.fields}: {error}") from None
        if config.is_prompt_learning:
            raise ModelError(
                f"adapter.method={name}: puts tokens before the text, in a forward pass of PEFT's own that packed rows "
                "and the loss on target tokens do not go through. Use a method that changes layers, such as LOHA."
            )
        return config

    def _targets(self, model: torch.nn.Module, wanted: Any) -> Any:
        """As PEFT wants them. Not only linear layers: some methods train norms or embeddings."""
        if wanted == "all-linear":
            return shortest(model, find_targets(model, wanted))
        names = [name for name, _ in model.named_modules()]
        missing = [t for t in wanted if not any(ends_with(n, t) for n in names)] if isinstance(wanted, list) else []
        if missing:
            endings = {name.rsplit(".", 1)[-1] for name in names}
            hints = ", ".join(f"{name}{closest(name, endings)}" for name in missing)
            raise ModelError(f"adapter.fields.target_modules: no module of this model is named {hints}.")
        return wanted

    def attach(self, model, new_ids=()):
        room = type(self.config(model)).__module__.rpartition(".")[0]
        quantised = any(not model.get_submodule(n).weight.is_floating_point() for n in decoder_linears(model))
        if quantised and importlib.util.find_spec(f"{room}.bnb") is None:
            raise ModelError(
                f"adapter.method={self.method}: the installed PEFT has no layers of this method for quantised weights. "
                "Use quant=none."
            )
        adapted = super().attach(model, new_ids)
        if hasattr(adapted.base_model, "update_and_allocate"):
            raise ModelError(
                f"adapter.method={self.method}: moves its ranks between steps, by a call that the loop does not make. "
                "Use adapter=lora."
            )
        return adapted
