"""Held-out prompts answered by the base and by what was trained, side by side."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from peft import PeftModel

from trainer.data.chat import Encoder
from trainer.data.options import TrainOn
from trainer.data.tokenize import opening
from trainer.export.generate import answer

if TYPE_CHECKING:
    from trainer.training.session import Ready

MAX_NEW_TOKENS = 64


def held_out_answers(ready: Ready, end_tokens: list[int], count: int) -> list[dict[str, str]]:
    """Up to `count` held-out dialogues: their last prompt, the expected answer, the base's and the trained one's.

    Without an adapter the base is gone, so only the trained model answers.
    """
    prepared, model = ready.prepared, ready.loop.model
    encoder = Encoder(prepared.tokenizer, TrainOn.assistant)
    dialogues = [pair for source in prepared.held_out.sources if (pair := opening(source)) is not None]
    spread = np.linspace(0, len(dialogues) - 1, min(count, len(dialogues))).astype(int)
    answers = []
    for messages, expected in (dialogues[i] for i in spread):

        def ask() -> str:
            return answer(model, encoder, messages, end_tokens, MAX_NEW_TOKENS, prepared.dtypes)  # noqa: B023

        row = {"prompt": messages[-1]["content"], "expected": expected}
        if isinstance(ready.adapted, PeftModel):
            with ready.adapted.disable_adapter():
                row["base"] = ask()
        row["trained"] = ask()
        answers.append(row)
    return answers
