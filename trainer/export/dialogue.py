"""A dialogue with a trained model: it keeps what was said, within what the model can take. What was trained on plain
text only goes on from each text by itself."""

from __future__ import annotations

from dataclasses import dataclass, field

from trainer.data.chat.messages import Message
from trainer.export.answering import Say
from trainer.export.reload import Trained


@dataclass
class Conversation:
    """Turns so far; the oldest go when the model's positions run out."""

    trained: Trained
    max_new_tokens: int
    system: str | None = None
    as_text: bool = False
    """ask with the text itself, not through the chat template"""
    turns: list[Message] = field(default_factory=list)
    forgotten: int = 0
    """turns that were left out, question and answer counted as one"""

    def ask(self, question: str, say: Say | None = None) -> str:
        """The answer, which joins the history. An answer that is interrupted leaves the history as it was."""
        if self.as_text:
            return self.trained.answer(question, self.max_new_tokens, say)
        asked = [*self.turns, {"role": "user", "content": question}]
        while len(asked) > 1 and not self._fits(asked):
            asked = asked[2:]
            self.forgotten += 1
        text = self.trained.answer(self._messages(asked), self.max_new_tokens, say)
        self.turns = [*asked, {"role": "assistant", "content": text}]
        return text

    def forget(self) -> None:
        """Begins anew."""
        self.turns, self.forgotten = [], 0

    def _messages(self, turns: list[Message]) -> list[Message]:
        return turns if self.system is None else [{"role": "system", "content": self.system}, *turns]

    def _fits(self, turns: list[Message]) -> bool:
        return len(self.trained.prompt(self._messages(turns))) + self.max_new_tokens <= self.trained.positions
