"""Rotary positions scaled for contexts longer than the model was made for (model.rope_scaling)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainer.errors import ModelError
from trainer.model.model_settings import RopeScaling

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from trainer.model.model_settings import Model


def scaled(config: PretrainedConfig, model: Model) -> PretrainedConfig:
    """The same configuration with the positions that the settings ask for. Raises ModelError where the model has none
    to scale, or has scaled them itself."""
    if model.rope_scaling is RopeScaling.none:
        return config
    kind, text = model.rope_scaling.name, config.get_text_config()
    own = getattr(text, "rope_parameters", None)
    if not own or "rope_type" not in own:
        has = "rotary positions of each kind of layer" if own else "no rotary positions that transformers could scale"
        raise ModelError(f"model.rope_scaling={kind}: this {text.model_type} has {has}. Use model.rope_scaling=none.")
    if own["rope_type"] != "default":
        raise ModelError(
            f"model.rope_scaling={kind}: this {text.model_type} has rope_type={own['rope_type']} for "
            f"{text.max_position_embeddings:,} tokens already. Use model.rope_scaling=none."
        )
    before = text.max_position_embeddings
    text.rope_parameters = {**own, "rope_type": kind, "factor": model.rope_factor}
    if model.rope_scaling is RopeScaling.yarn:
        text.rope_parameters["original_max_position_embeddings"] = before
    if model.rope_scaling is not RopeScaling.dynamic:  # it reads its own length there
        text.max_position_embeddings = int(before * model.rope_factor)
    return config
