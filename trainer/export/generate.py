"""Answers from a model, through the same template and tokenizer path as training."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from transformers import PreTrainedModel

from trainer.data.chat import Encoder
from trainer.model.precision import Dtypes


@torch.no_grad()
def answer(
    model: PreTrainedModel,
    encoder: Encoder,
    messages: list[dict[str, str]],
    end_tokens: list[int],
    max_new_tokens: int,
    dtypes: Dtypes,
) -> str:
    """The model's greedy answer to a dialogue that ends with a user's turn."""
    prompt = torch.tensor([encoder.prompt(messages)], device=next(model.parameters()).device)
    with generating(model), dtypes.autocast() if dtypes.device_type == "cuda" else nullcontext():
        output = model.generate(
            input_ids=prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=max_new_tokens,
            do_sample=False,
            eos_token_id=end_tokens,
            pad_token_id=end_tokens[0],
            use_cache=True,
        )
    return encoder.tokenizer.decode(output[0, prompt.shape[1] :], skip_special_tokens=True).strip()


@contextmanager
def generating(model: PreTrainedModel) -> Iterator[None]:
    """The model as generation needs it: evaluation mode and transformers' own attention, then as it was."""
    was_training, attention = model.training, model.config._attn_implementation
    model.eval()
    model.set_attn_implementation("eager" if attention == "eager" else "sdpa")
    try:
        yield
    finally:
        model.set_attn_implementation(attention)
        model.train(was_training)
