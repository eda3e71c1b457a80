"""What a model does to its head's outputs before they are its logits: read off its configuration, and proven on it.

A loss that never makes all logits calls the head itself, so it has to do the same. H: hidden size. V: vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from trainer.errors import ModelError

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

MAGNITUDES = 0.5, 8.0, 64.0, 512.0
"""Largest outputs of the head in a proof: a cap shows in large ones."""
MODERATE = 2
"""How many of them have slopes that rounding leaves alone: near a cap the slope of bf16 numbers is noise."""


@dataclass(frozen=True)
class LogitMap:
    """z -> cap * tanh(scale * z / cap); without a cap, scale * z."""

    scale: float = 1.0
    """Granite divides by logits_scaling, Cohere multiplies by logit_scale"""
    cap: float | None = None
    """Gemma 2's final_logit_softcapping (Gemma Team 2024, section 2)"""

    @property
    def plain(self) -> bool:
        return self.scale == 1.0 and self.cap is None

    def __call__(self, outputs: torch.Tensor) -> torch.Tensor:
        """Logits (n, V) of the head's outputs (n, V)."""
        logits = outputs if self.scale == 1.0 else outputs * self.scale
        return logits if self.cap is None else self.cap * torch.tanh(logits / self.cap)

    def apply_(self, outputs: torch.Tensor) -> torch.Tensor:
        """The same in the outputs' own memory."""
        if self.scale != 1.0:
            outputs.mul_(self.scale)
        return outputs if self.cap is None else outputs.div_(self.cap).tanh_().mul_(self.cap)


def logit_map(config: PretrainedConfig) -> LogitMap:
    """What the configuration says; `check_logit_map` proves that it is all."""
    text = config.get_text_config()
    scale = 1.0 / (getattr(text, "logits_scaling", None) or 1.0)
    for name in ("logit_scale", "lm_head_multiplier"):
        scale *= getattr(text, name, None) or 1.0
    return LogitMap(scale, getattr(text, "final_logit_softcapping", None))


def check_logit_map(model: PreTrainedModel) -> None:
    """Compares the model's own logits and their slope with the map of its head's outputs, for outputs of several
    sizes. Raises ModelError. The model's attention must be one that takes a plain row."""
    head, mapped = model.get_output_embeddings(), logit_map(model.config)
    if head is None:
        raise ModelError(f"{type(model).__name__} has no output head of its own. Use loss=full.")
    # The frozen one: trained rows beside it (model.new_tokens) are fp32.
    weight = min(head.parameters(), key=lambda p: p.requires_grad)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(len(MAGNITUDES), weight.shape[-1], generator=generator).to(weight.device)  # (4, H)
    with torch.no_grad():
        sizes = head(hidden.to(weight.dtype)).float().abs().amax(1, keepdim=True)
        hidden *= torch.tensor(MAGNITUDES, device=weight.device)[:, None] / sizes.clamp_min(1e-30)
    hidden = hidden.to(weight.dtype).requires_grad_()
    theirs = _own_logits(model, hidden)
    ours = mapped(head(hidden).float())
    direction = torch.randn(theirs.shape, generator=generator).to(weight.device)
    slopes = [torch.autograd.grad((x * direction).sum(), hidden)[0].float()[:MODERATE] for x in (theirs, ours)]
    rounding = 4 * torch.finfo(weight.dtype).eps
    for left, right in ((theirs.detach(), ours.detach()), slopes):
        if not bool(((left - right).abs().amax(1) <= rounding * left.abs().amax(1)).all()):
            raise ModelError(
                f"{type(model).__name__} ({model.config.model_type}) does more between its head and its logits than "
                f"is known here ({mapped}), so a loss that calls the head itself would be another one. Use loss=full."
            )


def _own_logits(model: PreTrainedModel, hidden: torch.Tensor) -> torch.Tensor:
    """Logits (n, V), fp32, that the model's own forward makes of hidden states (n, H)."""

    def replace(module, args, output):
        output["last_hidden_state"] = hidden[None]
        return output

    handle = model.get_decoder().register_forward_hook(replace)
    try:
        one_token = torch.zeros(1, 1, dtype=torch.int64, device=hidden.device)
        return model(input_ids=one_token, use_cache=False).logits[0].float()
    finally:
        handle.remove()
