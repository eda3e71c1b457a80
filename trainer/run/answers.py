"""Held-out prompts answered by the base and by what was trained, side by side."""

from __future__ import annotations

from typing import TYPE_CHECKING

from peft import PeftModel

from trainer.data.chat.encoder import Encoder
from trainer.data.data_settings import TrainOn
from trainer.data.tokens.tokenize import openings
from trainer.export.answering import answer

if TYPE_CHECKING:
    from trainer.run.session import Ready

MAX_NEW_TOKENS = 64


def held_out_answers(ready: Ready, end_tokens: list[int], count: int) -> list[dict[str, str]]:
    """Up to `count` held-out dialogues: their last prompt, the expected answer, the base's and the trained one's.

    Without an adapter the base is gone, so only the trained model answers.
    """
    prepared, model = ready.prepared, ready.loop.model
    encoder = Encoder(prepared.tokenizer, TrainOn.assistant)
    answers = []
    for messages, expected in openings(prepared.held_out, count):

        def ask() -> str:
            return answer(model, encoder, messages, end_tokens, MAX_NEW_TOKENS, prepared.dtypes)  # noqa: B023

        row = {"prompt": messages[-1]["content"], "expected": expected}
        if isinstance(ready.adapted, PeftModel):
            with ready.adapted.disable_adapter():
                row["base"] = ask()
        row["trained"] = ask()
        answers.append(row)
    return answers
