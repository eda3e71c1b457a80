"""What an assistant thought before it answered: in a message, and in the text that a template makes of it."""

from __future__ import annotations

import re
from typing import NamedTuple

from trainer.data.chat.messages import THOUGHTS, BadRow, Message
from trainer.data.data_settings import TrainPart

OPEN, CLOSE = "<think>", "</think>"
"""Around thoughts in a message's content; templates of thinking models write them too."""

_BLOCK = re.compile(rf"(\s*{OPEN})?(.*?)({CLOSE})(.*)", re.DOTALL)
_EMPTY_BLOCK = re.compile(rf"(?:\s*{OPEN})?\s*{CLOSE}\s*")
_END = re.compile(rf"\s*{CLOSE}\s*")


class Parts(NamedTuple):
    """A message's content: what opens its thoughts, they, what closes them, and the answer."""

    opening: str
    thoughts: str
    closing: str
    answer: str


def parts(content: str, prompt_opens: bool) -> Parts:
    """The content taken apart. Without an opening there are thoughts only where the generation prompt opens them:
    elsewhere </think> is a word of the answer, as it is behind the first one."""
    match = _BLOCK.match(content)
    if match is None or not (match[1] or prompt_opens):
        return Parts("", "", "", content)
    return Parts(match[1] or "", *match.groups()[1:])


def thoughts_of(message: Message, prompt_opens: bool) -> str:
    """Under whichever name they stand."""
    return (message.get(THOUGHTS[0]) or parts(message["content"], prompt_opens).thoughts).strip()


def trained_part(block: str, thoughts: str, part: TrainPart) -> tuple[int, int]:
    """The characters [start, stop) of an assistant's words that are targets by data.train_part; equal for none.

    Raises BadRow where the template does not write where thoughts end.
    """
    if part is TrainPart.all:
        return 0, len(block)
    found = block.find(thoughts) if thoughts else -1
    if found < 0:
        empty = _EMPTY_BLOCK.match(block)
        return (0, 0) if part is TrainPart.thoughts else (empty.end() if empty else 0, len(block))
    end = _END.match(block, found + len(thoughts))
    if end is None:
        raise BadRow(f"data.train_part={part.value}: the chat template does not write {CLOSE} behind the thoughts")
    return {
        TrainPart.filled: (0, len(block)),
        TrainPart.answer: (end.end(), len(block)),
        TrainPart.thoughts: (0, end.start() + len(end[0].rstrip())),
    }[part]
