"""Attention over packed rows: each sample sees only itself, no T x T mask is ever built.

T: tokens in the row. H: query heads. K: key/value heads. D: head size. S: samples in the row.
"""

from __future__ import annotations

import importlib.util
import inspect
from functools import cache

import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.weak import WeakIdKeyDictionary
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AttentionInterface, PretrainedConfig
from transformers.masking_utils import AttentionMaskInterface

from trainer.errors import ModelError
from trainer.model.model_settings import Attention

PACKED = "trainer_packed"
"""Name under which the packed attention is registered with transformers."""
FLASH = "flash_attention_2"
"""transformers' name for the package flash-attn."""
FLASH_LARGEST_HEAD = 256
"""FlashAttention-2 (Dao 2023) in torch: mha_varlen_fwd refuses larger heads, and those that are no multiple of 8."""


def choose(
    config: PretrainedConfig, device: torch.device, dtype: torch.dtype, asked: Attention = Attention.auto
) -> tuple[str, str]:
    """The attention implementation for packed rows on this model and device, and why.

    transformers' own attention with the block mask it builds from position_ids serves what the fast paths do not do.
    Raises ModelError where what was asked for does not serve.
    """
    fastest, why = _fastest(config, device, dtype)
    if asked is Attention.varlen and fastest != PACKED:
        raise ModelError(f"model.attention=varlen cannot serve here ({why}). Use model.attention=auto.")
    if asked in (Attention.auto, Attention.varlen):
        return fastest, why
    return _named(config, device, dtype, asked), "asked for"


def _named(config: PretrainedConfig, device: torch.device, dtype: torch.dtype, asked: Attention) -> str:
    """transformers' attention by the name in the settings. Raises ModelError where it would compute something else."""
    if asked is Attention.eager:
        return "eager"
    does = beyond_sdpa(config)
    if does is not None:
        raise ModelError(f"model.attention={asked.name}: the model {does}. Use model.attention=eager or auto.")
    if asked is Attention.sdpa:
        return "sdpa"
    if device.type != "cuda" or importlib.util.find_spec("flash_attn") is None:
        raise ModelError(
            "model.attention=flash: needs a GPU and the package flash-attn. Use model.attention=auto: torch has the "
            "same kernel."
        )
    refused = flash_refuses(config, dtype)
    if refused is not None:
        raise ModelError(f"model.attention=flash: its kernels {refused}. Use model.attention=auto.")
    return FLASH


def _fastest(config: PretrainedConfig, device: torch.device, dtype: torch.dtype) -> tuple[str, str]:
    """What auto takes for packed rows, and why."""
    text = config.get_text_config()
    does = beyond_sdpa(config)
    if does is not None:
        return "eager", f"block mask: the model {does}"
    if getattr(text, "attention_chunk_size", None) is not None:
        return "sdpa", "block mask: the model attends in chunks"
    if not _class_says(config, "_supports_attention_backend"):
        return "sdpa", "block mask: the model calls its attention itself"
    if device.type == "cuda":
        refused = flash_refuses(config, dtype)
        if refused is not None:
            return "sdpa", f"block mask: flash kernels {refused}"
        if torch.cuda.get_device_capability(device) < (8, 0):
            return "sdpa", "block mask: flash kernels need compute capability 8.0"
        return PACKED, "varlen flash kernel"
    return PACKED, "one kernel call per sample"


def choose_padded(
    config: PretrainedConfig,
    device: torch.device = torch.device("cpu"),
    dtype: torch.dtype = torch.float32,
    asked: Attention = Attention.auto,
) -> tuple[str, str]:
    """The same for padded rows and for generation. transformers' sdpa leaves out unsaid what it does not know."""
    if asked is Attention.varlen:
        raise ModelError("model.attention=varlen is for packed rows: use packing=best_fit, or model.attention=auto.")
    if asked is not Attention.auto:
        return _named(config, device, dtype, asked), "asked for"
    does = beyond_sdpa(config)
    return ("sdpa", "padded rows") if does is None else ("eager", f"padded rows: the model {does}")


def beyond_sdpa(config: PretrainedConfig) -> str | None:
    """What the model's attention does that scaled_dot_product_attention cannot; None where it is plain."""
    if getattr(config.get_text_config(), "attn_logit_softcapping", None) is not None:
        return "caps its attention logits"
    if config.model_type == "gpt_oss":
        return "has attention sinks"
    if not _class_says(config, "_supports_sdpa"):
        return "has an attention of its own"
    return None


def _class_says(config: PretrainedConfig, attribute: str) -> bool:
    """What transformers' class says of itself; of code that a model brings along, the best."""
    known = type(config.get_text_config()) in MODEL_FOR_CAUSAL_LM_MAPPING
    return not known or bool(getattr(MODEL_FOR_CAUSAL_LM_MAPPING[type(config.get_text_config())], attribute))


def flash_refuses(config: PretrainedConfig, dtype: torch.dtype) -> str | None:
    """What of this model the flash kernels do not take, on any card; None where they take it."""
    if dtype is torch.float32:
        return "need bf16"
    size = head_size(config)
    if size % 8 or size > FLASH_LARGEST_HEAD:
        return f"take head sizes that are multiples of 8 up to {FLASH_LARGEST_HEAD}, not {size}"
    return None


def head_size(config: PretrainedConfig) -> int:
    """Numbers of one attention head, D."""
    text = config.get_text_config()
    return getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,  # (1, H, T, D)
    key: torch.Tensor,  # (1, K, T, D)
    value: torch.Tensor,  # (1, K, T, D)
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,  # (S + 1,) int32
    max_length_q: int | None = None,
    **_,
) -> tuple[torch.Tensor, None]:  # (1, T, H, D)
    """transformers' attention interface for a packed row."""
    assert attention_mask is None, "a packed row has no attention mask"
    assert cu_seq_lens_q is not None and max_length_q is not None, "packed attention needs the sample boundaries"
    # Rotary embeddings of fp32 masters leave queries and keys in fp32 beside values in autocast's dtype; autocast
    # casts for scaled_dot_product_attention, not for the kernels below it.
    query, key = query.to(value.dtype), key.to(value.dtype)
    if query.device.type == "cuda":
        return _varlen(query, key, value, scaling, sliding_window, cu_seq_lens_q, max_length_q), None
    return _per_sample(query, key, value, scaling, dropout, sliding_window, cu_seq_lens_q), None


def _varlen(query, key, value, scaling, sliding_window, cu_seqlens, max_length):
    """One flash kernel for the whole row. Its default window is bidirectional: (-1, 0) is causal."""
    from torch.nn.attention.varlen import varlen_attn

    window = (-1, 0) if sliding_window is None else (sliding_window - 1, 0)
    q, k, v = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))  # (T, heads, D)
    out = varlen_attn(
        q,
        k,
        v,
        cu_seqlens,
        cu_seqlens,
        max_length,
        max_length,
        scale=scaling,
        window_size=window,
        **({"enable_gqa": q.shape[1] != k.shape[1]} if asks_for_grouped_heads() else {}),
    )
    return out.unsqueeze(0)


@cache
def asks_for_grouped_heads() -> bool:
    """Whether torch's varlen kernel wants to be told of fewer key/value heads; torch 2.11 takes them untold."""
    from torch.nn.attention.varlen import varlen_attn

    return "enable_gqa" in inspect.signature(varlen_attn).parameters


def flash_backward_bytes(query: torch.Size, key: torch.Size, num_samples: int, itemsize: int) -> int:
    """Scratch of FlashAttention-2's backward beside dq, dk and dv: query (T, H, D), key (T, K, D).

    mha_varlen_bwd (aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp): dq is summed in fp32 with heads
    rounded up to 32 numbers and 128 rows a sample more, beside a number a row and head; with fewer key/value heads
    dk and dv are made for every query head and then added up. train.deterministic sums several such dq: not in here.
    """
    tokens, heads, size = query
    rounded = -(-size // 32) * 32 if size <= 192 else 256
    rows = tokens + 128 * num_samples
    summed = rows * heads * (4 * rounded + 4)
    expanded = 2 * tokens * heads * size * itemsize if key[1] != heads else 0
    return summed + expanded


@torch.compiler.disable  # lengths are read on the host: a compiled block calls this as it is (kernels=compiled)
def _per_sample(query, key, value, scaling, dropout, sliding_window, cu_seqlens):
    """One kernel a sample: the same arithmetic as running each alone. Keys and values are not expanded to H heads."""
    lengths, masks = _of_row(cu_seqlens, sliding_window, query)
    if query.device.type == "cpu" and dropout == 0.0 and value.shape[-1] == query.shape[-1]:
        return _PerSample.apply(query, key, value, lengths, masks, scaling)
    gqa = query.shape[1] != key.shape[1]
    outputs = []
    for q, k, v, mask in zip(*(x.split(lengths, dim=2) for x in (query, key, value)), masks, strict=True):
        out = scaled_dot_product_attention(
            q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=mask is None, scale=scaling, enable_gqa=gqa
        )
        outputs.append(out.transpose(1, 2))
    return torch.cat(outputs, dim=1)


class _PerSample(torch.autograd.Function):
    """The loop above on torch's CPU flash kernel, whose outputs lie in one row at once.

    Autograd would keep every sample's output twice (the kernel's own and the row's) and run one node a sample.
    """

    @staticmethod
    def forward(ctx, query, key, value, lengths, masks, scaling):
        out = query.new_empty(1, query.shape[2], query.shape[1], value.shape[3])  # (1, T, H, D)
        logsumexps = []
        pieces = zip(
            *(x.split(lengths, dim=2) for x in (query, key, value)), out.split(lengths, dim=1), masks, strict=True
        )
        for q, k, v, row, mask in pieces:
            sample, logsumexp = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                q, k, v, 0.0, mask is None, attn_mask=mask, scale=scaling
            )
            row.copy_(sample.transpose(1, 2))
            logsumexps.append(logsumexp)
        ctx.lengths, ctx.masks, ctx.scaling = lengths, masks, scaling
        ctx.save_for_backward(query, key, value, out, *logsumexps)
        return out

    @staticmethod
    def backward(ctx, grad_out):
        query, key, value, out, *logsumexps = ctx.saved_tensors
        grads = [torch.empty_like(x) for x in (query, key, value)]
        by_sample = [
            x.split(ctx.lengths, dim=2) for x in (grad_out.transpose(1, 2), query, key, value, out.transpose(1, 2))
        ]
        targets = [x.split(ctx.lengths, dim=2) for x in grads]
        for i, (logsumexp, mask) in enumerate(zip(logsumexps, ctx.masks, strict=True)):
            results = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                *(pieces[i] for pieces in by_sample), logsumexp, 0.0, mask is None, attn_mask=mask, scale=ctx.scaling
            )
            for target, result in zip(targets, results, strict=True):
                target[i].copy_(result)
        return *grads, None, None, None


_ROWS = WeakIdKeyDictionary()
"""What all layers share about the row whose boundaries are a key; forgotten with the boundaries."""


def _of_row(cu_seqlens, window: int | None, like: torch.Tensor) -> tuple[list[int], list[torch.Tensor | None]]:
    """Lengths of a row's samples, and the mask of each: None where plain causal attention sees the same."""
    row = _ROWS.setdefault(cu_seqlens, {})
    if "lengths" not in row:
        row["lengths"] = cu_seqlens.diff().tolist()
    lengths = row["lengths"]
    if window is None or max(lengths) <= window:
        return lengths, [None] * len(lengths)
    key = (window, like.dtype)
    if key not in row:
        row[key] = [_additive_mask(n, window, like) if n > window else None for n in lengths]
    return lengths, row[key]


def _additive_mask(length: int, window: int, like: torch.Tensor) -> torch.Tensor:
    """(length, length) in like's dtype: 0 in the window, -inf outside."""
    mask = torch.zeros(length, length, dtype=like.dtype, device=like.device)
    return mask.masked_fill_(~_window_mask(length, window, like.device), float("-inf"))


def _window_mask(length: int, window: int, device: torch.device) -> torch.Tensor:
    """(length, length) bool: position i sees i - window + 1 to i."""
    distance = torch.arange(length, device=device)[:, None] - torch.arange(length, device=device)[None, :]
    return (distance >= 0) & (distance < window)


def _no_mask(*args, attention_mask: torch.Tensor | None = None, **kwargs) -> None:
    """Mask builder for packed rows: none. Padded batches and generation use sdpa, never this."""
    assert attention_mask is None, "a packed row has no attention mask"


AttentionInterface.register(PACKED, packed_attention)
AttentionMaskInterface.register(PACKED, _no_mask)
