"""A tiny twin of a model: every structural field of its configuration kept, widths, depth and lengths shrunk.

Lengths (windows, chunks, the length that rotary factors were made for) shrink below those of the samples that the
checks use, so that what happens past them is seen; caps shrink to where they act on numbers of a twin's size.
"""

from __future__ import annotations

import math
import re
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

HIDDEN, HEADS, HEAD_DIM, VOCABULARY, WINDOW, ORIGINAL_LENGTH, LONGEST = 64, 4, 16, 256, 8, 16, 64
LENGTHS = 5, 13, 23, 37
"""Tokens of the samples of a check: below and above WINDOW and ORIGINAL_LENGTH, none above LONGEST."""
MOST_LAYERS, EXPERTS = 8, 4
FIRST_ID, LAST_ID = 10, 200
"""Token ids of the samples."""

DEPTHS = "num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_blocks"
# bitsandbytes' CPU kernel takes a row for whole blocks of 64: what a linear layer reads is a multiple of that.
SIZES = {
    r"vocab_size|vocab_size_per_layer_input|unpadded_vocab_size|decoder_vocab_size": VOCABULARY,
    r"hidden_size|d_model|n_embd|emb_dim|embedding_dim|embedding_size|word_embed_proj_dim|lru_width": HIDDEN,
    r"attention_hidden_size|input_embedding_size|output_embedding_size": HIDDEN,
    r"\w*intermediate_size\w*|\w*ffn_dim|ffn_hidden_size|expert_ffn_hidden_size|d_inner|dim_ff|dff|n_inner": 2 * HIDDEN,
    r"num_attention_heads|n_heads?|num_heads|swa_num_attention_heads|\w*coder_attention_heads": HEADS,
    r"head_dim|swa_head_dim|global_head_dim|kv_channels|attention_head_dim|d_head|d_kv": HEAD_DIM,
    r"query_pre_attn_scalar|attention_head_size": HEAD_DIM,
    r"\w*_rank|hidden_size_per_layer_input": HIDDEN,
    r"v_head_dim": HEAD_DIM,
    r"qk_rope_head_dim|qk_nope_head_dim|rotary_dim|index_head_dim": 8,
    r"qk_head_dim": 16,
    r"linear_(?:key|value)_head_dim|linear_head_dim": HEAD_DIM,
    r"mamba_d_head|mamba_head_dim|mamba_headdim": HEAD_DIM,
    r"mamba_d_state|state_size|ssm_state_size": 8,
    r"num_local_experts|num_experts|n_routed_experts|moe_num_experts": EXPERTS,
    r"max_position_embeddings|n_positions|n_ctx|max_seq_len|model_max_length": LONGEST,
    r"context_length|max_target_positions": LONGEST,
    r"sliding_window(?:_size)?|window_size|attention_window_size|local_attention|keep_window_size": WINDOW,
    r"attention_chunk_size|chunk_size|mamba_chunk_size|index_topk|block_size|floor_scale|log_scaling_n_floor": WINDOW,
    r"original_max_position_embeddings|rel_extent": ORIGINAL_LENGTH,
    r"image_size": 28,
    r"patch_size": 14,
    r"num_kv_shared_layers": 1,
    r"num_experts_per_tok|moe_topk|num_experts_per_token|n_group|topk_group": 2,
    r"first_k_dense_replace|n_shared_experts|moe_layer_start_index": 1,
}
"""The most that a whole number of such a name is in a twin."""
CAPS = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0}
KEPT_APART = "architectures", "model_type", "transformers_version", "quantization_config", "dtype", "torch_dtype"
TOKENS = re.compile(r"\w*_token_id|\w*_token_index|\w*_index")


def twin_config(config: PretrainedConfig, vocab_size: int = VOCABULARY) -> PretrainedConfig:
    """The shrunk configuration, of the same class; nested ones are shrunk alike."""
    return type(config)(**_shrunk(config.to_dict(), vocab_size))


def _shrunk(fields: dict[str, Any], vocab_size: int) -> dict[str, Any]:
    fields = {key: value for key, value in fields.items() if key not in KEPT_APART and not key.startswith("_")}
    chosen = _chosen_layers(fields)
    found = {key: _field(key, value, vocab_size, chosen) for key, value in fields.items()}
    found |= _dependent(fields, found)
    return found


def _field(key: str, value: Any, vocab_size: int, layers: list[int] | None) -> Any:
    """A field of a twin."""
    if key.endswith("_config") and isinstance(value, dict):
        kind = {"model_type": value["model_type"]} if "model_type" in value else {}
        return kind | _shrunk(value, vocab_size)
    if key == "per_layer_config" and isinstance(value, dict):
        places = {index: place for place, index in enumerate(layers or ())}
        return {f"{places[int(i)]:02d}": _shrunk(own, vocab_size) for i, own in value.items() if int(i) in places}
    if isinstance(value, dict) and all(isinstance(name, str) for name in value):
        return {name: _field(name, inner, vocab_size, layers) for name, inner in value.items()}
    if layers is not None and key in DEPTHS:
        return len(layers)
    if isinstance(value, list) and value:
        return _listed(key, value, vocab_size, layers)
    if key in CAPS and value is not None:
        return min(value, CAPS[key])
    return _number(key, value, vocab_size)


def _number(key: str, value: Any, vocab_size: int) -> Any:
    if isinstance(value, float) and "drop" in key:
        return 0.0  # two runs of one sample could not be compared
    if isinstance(value, bool) or not isinstance(value, int):
        return value
    if TOKENS.fullmatch(key):
        return value if value < FIRST_ID else vocab_size - 1  # none that a sample has stands for an image
    for pattern, most in SIZES.items():
        if re.fullmatch(pattern, key):
            return min(value, vocab_size if most == VOCABULARY else most)
    return value


def _listed(key: str, value: list, vocab_size: int, layers: list[int] | None) -> list:
    if key.endswith("token_id"):
        return [min(token, vocab_size - 1 - place) for place, token in enumerate(value)]
    if key in ("short_factor", "long_factor"):
        return value[: HEAD_DIM // 2]
    if key == "mrope_section":
        share = HEAD_DIM // 2 // 4
        return [HEAD_DIM // 2 - (len(value) - 1) * share, *[share] * (len(value) - 1)]
    if layers is not None and len(value) > layers[-1] and len(value) >= len(layers) and _per_layer(value, layers):
        return [_number(key, value[index], vocab_size) for index in layers]
    if layers is not None and re.search(r"layers|idxs|layer_ids|indices", key) and all(_is_index(v) for v in value):
        return [place for place, index in enumerate(layers) if index in value]
    return value


def _is_index(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _per_layer(value: list, layers: list[int]) -> bool:
    """Whether a list has an entry a layer; one of layers' numbers is strictly rising."""
    rising = all(_is_index(v) for v in value) and all(a < b for a, b in zip(value, value[1:], strict=False))
    return not (rising and len(value) > 1)


def _chosen_layers(fields: dict[str, Any]) -> list[int] | None:
    """Numbers of the layers that a twin keeps: the first of each kind, in order, and of one kind two."""
    depth = next((fields[key] for key in DEPTHS if isinstance(fields.get(key), int)), None)
    if not depth:
        return None
    lists = [v for k, v in fields.items() if isinstance(v, list) and len(v) == depth and not k.endswith("theta")]
    indexed = [
        set(v)
        for k, v in fields.items()
        if isinstance(v, list) and re.search("layers|idxs|layer_ids", k) and len(v) != depth and all(map(_is_index, v))
    ]
    kinds: dict[str, list[int]] = {}
    for index in range(depth):
        kind = str([row[index] for row in lists] + [index in row for row in indexed])
        kinds.setdefault(kind, []).append(index)
    prefix = max(first[0] for first in kinds.values()) + 1
    if prefix <= MOST_LAYERS:
        return list(range(min(depth, max(2, prefix))))
    chosen = sorted(first[0] for first in kinds.values())[:MOST_LAYERS]
    return chosen if len(chosen) > 1 else [0, 1]


def _dependent(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """Fields that must agree with others."""
    agreed: dict[str, Any] = {}
    heads = next((k for k in ("num_attention_heads", "n_head", "n_heads", "num_heads") if old.get(k)), None)
    for key in (
        "num_key_value_heads",
        "swa_num_key_value_heads",
        "num_kv_heads",
        "num_query_groups",
        "num_global_key_value_heads",
    ):
        if isinstance(old.get(key), int) and heads is not None and isinstance(old[heads], int):
            whole = old[key] == old[heads]
            agreed[key] = new[heads] if whole else 1 if old[key] == 1 else max(1, new[heads] // 2)
    if isinstance(old.get("qk_rope_head_dim"), int) and old.get("head_dim") == old["qk_rope_head_dim"]:
        agreed["head_dim"] = new["qk_rope_head_dim"]
    expand = next((old[k] for k in ("mamba_expand", "expand") if isinstance(old.get(k), (int, float))), None)
    for key in ("mamba_n_heads", "n_mamba_heads", "mamba_num_heads"):
        if isinstance(old.get(key), int):
            size = next((new[k] for k in ("mamba_d_head", "mamba_head_dim", "mamba_headdim") if k in new), HEAD_DIM)
            agreed[key] = int((expand or 2) * HIDDEN) // size if "mamba_dt_rank" not in old else old[key]
    if isinstance(old.get("mamba_d_ssm"), int):
        agreed["mamba_d_ssm"] = int(expand * HIDDEN)
    if old.get("model_type") is None and {"num_heads", "n_groups", "state_size", "expand"} <= old.keys():  # Mamba 2
        agreed["num_heads"] = int(old["expand"] * HIDDEN) // new["head_dim"]
    for key in ("n_groups", "mamba_n_groups", "mamba_ngroups"):
        if isinstance(old.get(key), int):
            agreed[key] = min(old[key], 2)
    if isinstance(old.get("linear_num_key_heads"), int):
        ratio = max(1, old["linear_num_value_heads"] // old["linear_num_key_heads"])
        agreed |= {"linear_num_key_heads": 2, "linear_num_value_heads": 2 * min(ratio, 4)}
    for key in ("mamba_dt_rank", "time_step_rank"):
        if isinstance(old.get(key), int):
            agreed[key] = HIDDEN
    return agreed


@torch.no_grad()
def give_values(model: PreTrainedModel, seed: int = 0) -> None:
    """Values with which every parameter shows in the loss: matrices that keep a vector's size, and, of what begins at
    zero or one (norms, biases, sinks, head scales), noise upon it."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float32)
        if name.endswith(("A_log", "dt_bias", "dt_proj.bias")):
            continue
        if parameter.ndim < 2:
            parameter.add_(0.1 * noise)
        else:
            parameter.copy_(noise / math.sqrt(parameter[0].numel() if parameter.ndim == 2 else parameter.shape[-1]))
    tie = getattr(model, "tie_weights", None)
    if tie is not None:
        tie()


def plain_twin(config: PretrainedConfig, attention: str = "eager", trust_remote_code: bool = False) -> PreTrainedModel:
    """A text decoder's twin by transformers alone, in fp32 on the CPU."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        config, attn_implementation=attention, dtype=torch.float32, trust_remote_code=trust_remote_code
    )
    give_values(model)
    return model.eval()
