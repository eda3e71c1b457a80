"""train.samples: prompts of the user's own, answered at every evaluation."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

from trainer.config.saved import Run
from trainer.data.chat.encoder import Encoder
from trainer.data.chat.messages import BadRow
from trainer.data.data_settings import TrainOn
from trainer.data.tokens.counts import asked_as
from trainer.errors import DataError
from trainer.export.answering import answer_many, tidied
from trainer.export.result import stop_tokens
from trainer.redact import redacted
from trainer.run.build import Ready
from trainer.run.prepare import Prepared
from trainer.training.train_settings import ANSWER_TOKENS

Answers = list[dict[str, str]]
"""A prompt and its answer each."""


class Sampler:
    """Asks as the run's rows ask: through the chat template, or as plain text."""

    def __init__(self, prompts: list[str], prepared: Prepared):
        """Raises DataError for a prompt that the template refuses."""
        self.prompts, self._prepared = prompts, prepared
        self._encoder = Encoder(prepared.tokenizer, TrainOn.assistant, today=prepared.today)
        as_text = asked_as(prepared.counts) == "text"
        self._asked = [text if as_text else [{"role": "user", "content": text}] for text in prompts]
        self._ids = [self._encoded(number) for number in range(len(prompts))]

    @cached_property
    def _ends(self) -> list[int]:
        return stop_tokens(self._prepared.steps.ends(), self._prepared.tokenizer)

    def _encoded(self, number: int) -> list[int]:
        try:
            return self._encoder.prompt(self._asked[number])
        except BadRow as error:
            raise DataError(f"train.samples[{number}]={self.prompts[number]!r}: {error}.") from None

    def answers(self, ready: Ready) -> Answers:
        """Greedy ones of the weights as they are."""
        dtypes = self._prepared.dtypes
        texts = answer_many(ready.loop.model, self._encoder, self._ids, self._ends, ANSWER_TOKENS, dtypes)
        asked = zip(self.prompts, self._asked, texts, strict=True)
        return [{"prompt": prompt, "answer": redacted(tidied(form, text))} for prompt, form, text in asked]


def asking(run: Run, sampler: Sampler | None, ready: Ready) -> Callable[[], Answers] | None:
    """What asks the run's prompts, or None where it has none."""
    if sampler is None:
        return None

    def ask() -> Answers:
        with run.config.optim.evaluating(ready.loop.optimizer):
            return sampler.answers(ready)

    return ask
