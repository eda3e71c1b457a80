"""A chat template's text of a dialogue: byte for byte transformers' own, within the limits of sandbox.py."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from trainer.data.chat.jinja_process import DAY
from trainer.data.chat.messages import THOUGHTS, BadRow, Message
from trainer.data.chat.sandbox import BrokenTemplate, RanAway, TemplateRefuses, sandbox
from trainer.errors import DataError, ModelError, TrainerError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class ChatTemplate:
    """The template of a tokenizer."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, chosen: str | None, today: str | None = None):
        """`today`: the day that strftime_now tells, YYYY-MM-DD; None: the real one."""
        self.tokenizer, self.today = tokenizer, today
        self.what = f"data.chat_template={chosen}"
        self._error: type[TrainerError] = DataError
        if chosen is None:
            self.what = f"the chat template of {tokenizer.name_or_path or 'the model'}"
            self._error = ModelError
        self._special = tokenizer.special_tokens_map

    def check(self) -> None:
        """Tries it on a question, so that a broken or hostile one is known early.

        Raises DataError for a template that the settings name, ModelError for the model's own.
        """
        if self.tokenizer.chat_template:
            with suppress(BadRow):  # it may want other roles than these
                self.renderer(None)([{"role": "user", "content": "Hello"}], True)

    def renderer(self, tools: list[dict] | None) -> Callable[..., str]:
        """render(messages, generation_prompt=False) for dialogues with these tools. Raises BadRow where there is no
        template."""
        if not self.tokenizer.chat_template:
            raise BadRow(
                "this tokenizer has no chat template: give it one with data.chat_template=plain (or instruction, "
                "chatml, a Jinja file)"
            )
        template = self._text(tools)

        def render(messages: list[Message], generation_prompt: bool = False) -> str:
            values = {"messages": [_with_thoughts(m) for m in messages], "tools": tools, "documents": None}
            values |= {"add_generation_prompt": generation_prompt, DAY: self.today, **self._special}
            try:
                return sandbox().render(template, values)
            except RanAway as error:
                raise self._error(
                    f"{self.what} was stopped: {error}. A template writes a dialogue's text and needs none of this: do "
                    "not trust it, or choose another with data.chat_template=."
                ) from None
            except BrokenTemplate as error:
                raise self._error(f"{self.what}{error}. Choose another with data.chat_template=.") from None
            except TemplateRefuses as error:
                roles = ", ".join(m["role"] for m in messages)
                raise BadRow(f"the chat template refuses the roles {roles}: {error}") from None

        return render

    def _text(self, tools: list[dict] | None) -> str:
        try:
            return self.tokenizer.get_chat_template(tools=tools)
        except ValueError as error:
            raise self._error(f"{self.what}: {error}. Choose another with data.chat_template=.") from None


def _with_thoughts(message: Message) -> Message:
    """Thoughts under both names that templates read, as transformers has it."""
    thoughts = next((message[name] for name in THOUGHTS if message.get(name) is not None), None)
    return message if thoughts is None else {"thinking": thoughts, **message, "reasoning_content": thoughts}
