"""Text that looks like a control token but is none: put aside while a template renders, tokenised as characters."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from trainer.data.chat.messages import THOUGHTS, BadRow, Message
from trainer.data.chat.spans import RESERVED
from trainer.data.chat.thoughts import CLOSE as THOUGHTS_CLOSE
from trainer.data.chat.thoughts import OPEN as THOUGHTS_OPEN
from trainer.data.chat.thoughts import parts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

OPEN, CLOSE = RESERVED[1:]
"""Around the number of a control token that is meant as text."""

_THOUGHT_WORDS = re.compile(f"{THOUGHTS_OPEN}|{THOUGHTS_CLOSE}")


class Aside:
    """One tokenizer's control tokens, out of the way of what templates write."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self.tokenizer = tokenizer
        special = {index: token for index, token in tokenizer.added_tokens_decoder.items() if token.special}
        self.special_ids = frozenset(set(special) | set(tokenizer.all_special_ids))
        self.special = {token.content: (index, token) for index, token in special.items()}
        names = sorted(self.special, key=len, reverse=True)
        self.control = re.compile("|".join(map(re.escape, names)) or r"(?!)")
        """matches a control token in a text"""
        self._names = [*names, *(word for word in (THOUGHTS_OPEN, THOUGHTS_CLOSE) if word not in names)]

    def value(self, value: Any) -> Any:
        """Tools, or a message, with every string in it escaped, keys too. Raises BadRow."""
        if isinstance(value, str):
            return self._escape(value)
        if isinstance(value, list):
            return [self.value(item) for item in value]
        if isinstance(value, dict):
            return {self.value(key): self.value(item) for key, item in value.items()}
        return value

    def messages(self, messages: list[Message], prompt_opens: bool) -> list[Message]:
        """The messages, escaped; an assistant's thoughts keep what opens and closes them, and where these words are
        quoted they are escaped too: a template would cut there. `prompt_opens`: see thoughts.parts."""
        aside = []
        for message in messages:
            if message["role"] != "assistant":
                aside.append(self.value(message))
                continue
            opening, thoughts, closing, answer = parts(message["content"], prompt_opens)
            named = {key: self._quotes(message[key]) for key in THOUGHTS if message.get(key) is not None}
            content = f"{opening}{self._quotes(thoughts)}{closing}{self._quotes(answer)}"
            aside.append({**self.value({**message, "content": ""}), **named, "content": content})
        return aside

    def batch(self, texts: list[str]) -> list[list[int]]:
        """The tokens of each text, with the tokenizer called once for those in which nothing is put aside."""
        plain = [text for text in texts if text and OPEN not in text]
        tokens = iter(self.tokenizer(plain, add_special_tokens=False).input_ids if plain else [])
        return [self._escaped_tokens(text) if OPEN in text else next(tokens) if text else [] for text in texts]

    def tokens(self, text: str) -> list[int]:
        """The tokens of one text."""
        return self.batch([text])[0]

    def _escape(self, text: str) -> str:
        text = without_reserved(text)
        return text if self.control.search(text) is None else self.control.sub(self._number, text)

    def _quotes(self, text: str) -> str:
        return _THOUGHT_WORDS.sub(self._number, self._escape(text))

    def _number(self, match: re.Match) -> str:
        return f"{OPEN}{self._names.index(match[0])}{CLOSE}"

    def _escaped_tokens(self, text: str) -> list[int]:
        """Tokens where the text's own control tokens are tokens and those put aside are characters."""
        ids: list[int] = []
        position, strip_left = 0, False

        def add(piece: str) -> None:
            piece = re.sub(f"{OPEN}(\\d+){CLOSE}", lambda match: self._names[int(match[1])], piece)
            if piece:
                ids.extend(self.tokenizer(piece, add_special_tokens=False, split_special_tokens=True).input_ids)

        for match in self.control.finditer(text):
            index, token = self.special[match[0]]
            piece = text[position : match.start()]
            piece = piece.lstrip() if strip_left else piece
            add(piece.rstrip() if token.lstrip else piece)
            ids.append(index)
            position, strip_left = match.end(), token.rstrip
        piece = text[position:]
        add(piece.lstrip() if strip_left else piece)
        return ids


def without_reserved(text: str) -> str:
    """The text. Raises BadRow for the characters that this needs for itself."""
    if any(mark in text for mark in RESERVED):
        raise BadRow("the text holds one of the noncharacters U+FDD0, U+FDD1, U+FDD2, which are no text")
    return text
