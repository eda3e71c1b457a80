"""Where in a rendered dialogue the assistant's own words stand.

The text rendered up to an assistant's turn, and through it, are prefixes of the whole: the turn lies between. Where
a template rewrites earlier turns (Qwen3 drops old thoughts, Mistral moves the system text) they are not; then the
turn is replaced by a mark in a full render, and what is equal before and behind the mark is not the turn. A second
mark verifies it.

A span begins where a generation prompt would end, so that training and generation meet the same text, and it ends
with whatever ends the turn.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

from trainer.data.chat.messages import BadRow, Message

RESERVED = ("\ufdd0", "\ufdd1", "\ufdd2")
"""Noncharacters (Unicode 23.7): no text holds them, so they can stand for something while a template renders."""

MARK = RESERVED[0]

THOUGHTS_END = "</think>"

Render = Callable[..., str]
"""render(messages, generation_prompt=False); raises BadRow"""


class Rendered(NamedTuple):
    """A dialogue's text and the characters [start, stop) of the turns that are targets."""

    text: str
    spans: list[tuple[int, int]]


def find_spans(messages: list[Message], turns: list[int], text: str, render: Render, control: re.Pattern) -> Rendered:
    """The spans of these turns of the assistant in `text`, the whole dialogue's render. Raises BadRow."""
    spans = []
    for turn in turns:
        span = _by_prefix(messages, turn, text, render) or _by_mark(messages, turn, text, render, control)
        words = messages[turn]["content"].rpartition(THOUGHTS_END)[2].strip()
        if words not in text[slice(*span)]:
            raise BadRow(f"the chat template rewrites messages[{turn}]: what the assistant wrote cannot be told apart")
        spans.append(span)
    return Rendered(text, spans)


def _by_prefix(messages: list[Message], turn: int, text: str, render: Render) -> tuple[int, int] | None:
    """The span where the prefix property holds for this turn, else None."""
    if turn == 0:
        return None  # most templates refuse a dialogue without messages
    try:
        before = render(messages[:turn], True)
        through = text if turn == len(messages) - 1 else render(messages[: turn + 1])
    except BadRow:
        return None
    if text.startswith(through) and through.startswith(before):
        return len(before), len(through)
    return None


def _by_mark(messages: list[Message], turn: int, text: str, render: Render, control: re.Pattern) -> tuple[int, int]:
    """The span from what changes when the turn's words do."""
    (before, behind), (again_before, again_behind) = (
        _around(render([*messages[:turn], _marked(messages[turn], mark), *messages[turn + 1 :]]), mark)
        for mark in (MARK, MARK * 2)
    )
    fits = text.startswith(before) and text.endswith(behind) and len(before) + len(behind) <= len(text)
    if (before, behind) != (again_before, again_behind) or not fits:
        raise BadRow(f"the chat template rewrites messages[{turn}]: what the assistant wrote cannot be told apart")
    start = len(before)
    prompt = _end_of_prompt(messages[:turn], render, control)
    if prompt and (found := before.rfind(prompt)) >= 0:
        written_by_template = before[found + len(prompt) :]
        if control.search(written_by_template) is None:
            start = found + len(prompt)
    ending = behind
    if turn < len(messages) - 1:
        alone = _around(render([*messages[:turn], _marked(messages[turn], MARK)]), MARK)[1]
        ending = behind[: _shared(behind, alone)]
    return start, len(text) - len(behind) + len(ending)


def _shared(one: str, other: str) -> int:
    """How many characters two texts begin with alike."""
    pairs = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def _marked(message: Message, mark: str) -> Message:
    """The turn with its words replaced; thoughts before them stay, since templates treat them on their own."""
    thoughts, end, _ = message["content"].rpartition(THOUGHTS_END)
    marked = {**message, "content": f"{thoughts}{end}{mark}"}
    marked.pop("tool_calls", None)
    return marked


def _around(marked: str, mark: str) -> tuple[str, str]:
    before, found, behind = marked.partition(mark)
    if not found or MARK in behind:
        raise BadRow("the chat template leaves out or repeats what the assistant wrote")
    return before, behind


def _end_of_prompt(messages: list[Message], render: Render, control: re.Pattern) -> str:
    """How the text ends that makes the assistant answer, from its last control token; empty where that fails."""
    if not messages:
        return ""
    try:
        ended, asking = render(messages), render(messages, True)
    except BadRow:
        return ""
    last = max((match.start() for match in control.finditer(asking)), default=None)
    if last is not None:
        return asking[last:]
    return asking[len(ended) :] if asking.startswith(ended) else ""
