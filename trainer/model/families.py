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
from trainer.model.mixtures import decoder_experts

TEXT_KEYS = {
    "gemma3": {r"^language_model\.lm_head": "lm_head", r"^(?:model\.)?language_model\.(?:model\.)?": "model."},
}
"""Multimodal model types whose text decoder is taken alone: how its weights are renamed, as regular expressions.

`AutoModelForCausalLM` would build the vision tower as well.
"""

LEFT_OUT = {"gemma3": r"^(?:model\.)?(?:vision_tower|multi_modal_projector)\."}
"""What of their weights the text decoder does not take."""

IN_WHOLE = {"gemma3": "model.language_model"}
"""Name of the text decoder in the class that `AutoModelForCausalLM` builds of such a folder; alone it is `model`."""

HARMLESS = (
    r"\.rotary_emb\.inv_freq$",  # computed from the configuration; old checkpoints stored it
    r"\.attn(?:ention)?\.(?:masked_)?bias$",  # the causal mask of GPT-2's days, stored as a buffer
    r"^v_head\.",  # a value head of reinforcement learning beside the model
)
"""Weights in files that a model may leave unread, beside those that transformers knows of each class."""

RECURRENT = "it carries a state (convolution or recurrence) from token to token, so packed samples would see each other"


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
    if kind in TEXT_KEYS:
        return config.get_text_config(), TEXT_KEYS[kind]
    if config.is_encoder_decoder:
        raise ModelError(f"{where}: {kind} is an encoder-decoder model. Only causal language models can be trained.")
    if config.get_text_config() is not config:
        raise ModelError(
            f"{where}: {kind} is a multimodal model. Of those only the text decoder of {', '.join(TEXT_KEYS)} can be "
            "trained; take a text checkpoint of the same family."
        )
    if kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and not hasattr(config, "auto_map"):
        raise ModelError(f"{where}: {kind} is not a causal language model.")
    return config, None


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
    known += [LEFT_OUT[kind]] if kind in LEFT_OUT else []
    unread = sorted(key for key in keys if not any(re.search(pattern, key) for pattern in known))
    if unread:
        raise ModelError(
            f"{where}: the files hold {len(unread)} weights that this {kind} has no place for, such as {unread[0]}. "
            "Its config.json is of another model, or says that they are not there (attention_bias and the like)."
        )


def check_modules(skeleton: PreTrainedModel) -> None:
    """Raises ModelError for architectures whose modules quantisation, adapters or packing cannot handle."""
    decoder = skeleton.get_decoder()
    modules = list(decoder.modules())
    experts = decoder_experts(skeleton)
    stacked = [n for n, p in skeleton.named_parameters() if p.ndim == 3 and n.rpartition(".")[0] not in experts]
    if stacked or any(isinstance(module, torch.nn.Conv1d) for module in modules):
        why = RECURRENT
    elif not any(isinstance(module, torch.nn.Linear) for module in modules):
        why = "its layers are no torch.nn.Linear, so neither quant nor adapter reach them"
    else:
        return
    raise ModelError(f"{skeleton.config.model_type} ({type(skeleton).__name__}) cannot be trained here: {why}.")
