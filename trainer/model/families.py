"""Which architectures can be trained, and the text decoder of those that are more than one.

What cannot be trained is refused by name before a weight is read, never trained wrongly.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import torch
from transformers import PretrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from trainer.errors import ModelError

TEXT_KEYS = {r"^(?:model\.)?language_model\.lm_head": "lm_head", r"^(?:model\.)?language_model\.(?:model\.)?": "model."}
"""How the weights of a multimodal checkpoint are renamed for its text decoder alone, as regular expressions.

`AutoModelForCausalLM` would build the vision tower as well. `trainer adopt` proves for a model that it fits.
"""

LEFT_OUT = (
    r"^(?:model\.)?(?:vision_tower|vision_model|vision_embed\w*|visual|audio_tower|embed_vision|embed_audio|vqmodel|"
    r"multi_?modal_projector|image_newline)(?:\.|$)"
)
"""What of a multimodal checkpoint's weights the text decoder does not take."""

IN_WHOLE = "model.language_model"
"""Name of the text decoder in the class of such a folder; alone it is `model`."""

HARMLESS = (
    r"\.rotary_emb\.inv_freq$",  # computed from the configuration; old checkpoints stored it
    r"\.attn(?:ention)?\.(?:masked_)?bias$",  # the causal mask of GPT-2's days, stored as a buffer
    r"^v_head\.",  # a value head of reinforcement learning beside the model
)
"""Weights in files that a model may leave unread, beside those that transformers knows of each class."""


def text_config(config: PretrainedConfig, where: str) -> tuple[PretrainedConfig, dict[str, str] | None]:
    """The configuration of the causal text decoder, and how the checkpoint's weights are renamed for it.

    Raises ModelError, with the model's type, for what is none.
    """
    kind = config.model_type
    if getattr(config, "quantization_config", None) is not None:
        method = config.quantization_config
        method = method.get("quant_method") if isinstance(method, dict) else getattr(method, "quant_method", None)
        raise ModelError(
            f"{where}: the checkpoint is quantised already ({method}). Adapters are trained on a base that is "
            "quantised here: take the unquantised checkpoint, and choose quant=nf4, fp4, int8 or none."
        )
    if config.is_encoder_decoder:
        raise ModelError(f"{where}: {kind} is an encoder-decoder model. Only causal language models can be trained.")
    if multimodal(config):
        text = config.get_text_config()
        if text.model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
            return text, TEXT_KEYS
        raise ModelError(
            f"{where}: {kind} is a multimodal model whose text decoder ({text.model_type}) transformers does not "
            "build alone; take a text checkpoint of the same family."
        )
    if kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and not hasattr(config, "auto_map"):
        raise ModelError(f"{where}: {kind} is not a causal language model.")
    return config, None


def multimodal(config: PretrainedConfig) -> bool:
    """Whether a text decoder is one part of what the configuration describes. Raises ModelError where it is unclear."""
    try:
        return config.get_text_config() is not config
    except ValueError as error:
        raise ModelError(f"{config.model_type} is not a causal language model: {str(error).split('.')[0]}.") from error


def in_whole(config: PretrainedConfig) -> str | None:
    """Name of the text decoder in the model that transformers' documented class builds of such a folder; None where
    that class builds the decoder alone."""
    if not multimodal(config):
        return None
    built = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type, "")
    return None if built.endswith("ForCausalLM") else IN_WHOLE


def rotary_boundary(config: PretrainedConfig, max_length: int) -> int | None:
    """Length in tokens up to which a row gets the short set of rotary factors, and above it, whole, the long one
    (LongRoPE, Ding et al. 2024; transformers chooses by the longest sample of a row); None where there is one set.

    Raises ModelError for factors that change with each length (dynamic NTK), where samples can be that long.
    """
    text = config.get_text_config()
    parameters = getattr(text, "rope_parameters", None) or {}
    sets = [parameters, *(value for value in parameters.values() if isinstance(value, dict))]
    kinds = {one.get("rope_type"): one for one in sets}
    if "dynamic" in kinds and max_length > text.max_position_embeddings:
        raise ModelError(
            f"data.max_length={max_length}: above {text.max_position_embeddings} tokens the rotary factors of this "
            f"{config.model_type} change with the longest sample so far (rope_type=dynamic), so no sample would train "
            f"as it does alone. Use data.max_length={text.max_position_embeddings}."
        )
    return kinds["longrope"]["original_max_position_embeddings"] if "longrope" in kinds else None


def check_unread(keys: Iterable[str], kind: str, model_class: type[PreTrainedModel], where: str) -> None:
    """Raises ModelError for weights in the files that the model has no place for: without them it is another model.

    `kind`: the model type that the folder's config.json names.
    """
    known = [*HARMLESS, *(model_class._keys_to_ignore_on_load_unexpected or ())]
    known += [LEFT_OUT] if kind != model_class.config_class.model_type else []
    unread = sorted(key for key in keys if not any(re.search(pattern, key) for pattern in known))
    if unread:
        raise ModelError(
            f"{where}: the files hold {len(unread)} weights that this {kind} has no place for, such as {unread[0]}. "
            "Its config.json is of another model, or says that they are not there (attention_bias and the like)."
        )


def check_modules(skeleton: PreTrainedModel) -> None:
    """Raises ModelError for architectures none of whose modules quantisation and adapters can handle."""
    if any(isinstance(module, torch.nn.Linear) for module in skeleton.get_decoder().modules()):
        return
    raise ModelError(
        f"{skeleton.config.model_type} ({type(skeleton).__name__}) cannot be trained here: its layers are no "
        "torch.nn.Linear, so neither quant nor adapter reach them."
    )
