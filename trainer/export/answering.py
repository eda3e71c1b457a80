"""Answers from a model, through the path that training's rows took.

B: prompts in a batch. T: tokens of the longest prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import torch
from transformers import PreTrainedModel, TextStreamer

from trainer.data.chat.encoder import Asked, Encoder
from trainer.model.precision import Dtypes


@dataclass(frozen=True)
class Sampling:
    """How a token is drawn; without it the likeliest is taken. Holtzman et al. 2019 for top_p."""

    temperature: float
    """divides the logits"""
    top_p: float
    """of the likeliest tokens that have this probability together"""
    top_k: int
    """of so many of the likeliest; 0: of all"""


Say = Callable[[str], None]
"""Takes the next piece of an answer."""


def answer(
    model: PreTrainedModel,
    encoder: Encoder,
    prompt: list[int],
    end_tokens: list[int],
    max_new_tokens: int,
    dtypes: Dtypes,
    say: Say | None = None,
    sampling: Sampling | None = None,
) -> str:
    """The model's answer to a prompt (token ids from `encoder.prompt`), greedy unless it is drawn; `say` hears it
    piece by piece."""
    streamer = None if say is None else _Pieces(encoder, say)
    (text,) = _generate(model, encoder, [prompt], end_tokens, max_new_tokens, dtypes, streamer, sampling)
    return text


def answer_many(
    model: PreTrainedModel,
    encoder: Encoder,
    prompts: Sequence[list[int]],
    end_tokens: list[int],
    max_new_tokens: int,
    dtypes: Dtypes,
    sampling: Sampling | None = None,
) -> list[str]:
    """Answers to prompts, all in one batch."""
    return _generate(model, encoder, prompts, end_tokens, max_new_tokens, dtypes, None, sampling)


def tidied(asked: Asked, text: str) -> str:
    """An answer without the spaces around it; what goes on from a text needs those."""
    return text if isinstance(asked, str) else text.strip()


@torch.no_grad()
def _generate(
    model: PreTrainedModel,
    encoder: Encoder,
    prompts: Sequence[list[int]],
    end_tokens: list[int],
    max_new_tokens: int,
    dtypes: Dtypes,
    streamer: TextStreamer | None,
    sampling: Sampling | None,
) -> list[str]:
    device = next(model.parameters()).device
    longest = max(map(len, prompts))
    # Padded on the left, so that every prompt ends where its answer begins.
    padding = [longest - len(prompt) for prompt in prompts]
    pad = end_tokens[0]
    rows = [[pad] * n + prompt for n, prompt in zip(padding, prompts, strict=True)]
    masks = [[0] * n + [1] * len(prompt) for n, prompt in zip(padding, prompts, strict=True)]
    more: dict[str, Any] = {} if streamer is None else {"streamer": streamer}
    more |= {"do_sample": False} if sampling is None else {"do_sample": True, **asdict(sampling)}
    with generating(model), dtypes.autocast() if dtypes.device_type == "cuda" else nullcontext():
        output = model.generate(
            input_ids=torch.tensor(rows, device=device),  # (B, T)
            attention_mask=torch.tensor(masks, device=device),
            max_new_tokens=max_new_tokens,
            eos_token_id=end_tokens,
            pad_token_id=pad,
            use_cache=True,
            **more,
        )
    return [encoder.tokenizer.decode(row, skip_special_tokens=True) for row in output[:, longest:]]


class _Pieces(TextStreamer):
    """transformers' streamer, telling instead of printing."""

    def __init__(self, encoder: Encoder, say: Say):
        super().__init__(encoder.tokenizer, skip_prompt=True, skip_special_tokens=True)
        self._say = say

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        if text:
            self._say(text)


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
