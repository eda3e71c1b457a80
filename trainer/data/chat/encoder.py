"""The one path from messages to tokens, for training, evaluation and generation.

Which characters the assistant wrote is found from the template itself, never from marker strings (spans.py). Text
that looks like a control token but stands in a message stays text: it is put aside while the template renders, and
tokenised as ordinary characters.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from trainer.data.chat.messages import THOUGHTS, BadRow, Dialogue, Message, PlainText, Sample
from trainer.data.chat.rendering import ChatTemplate
from trainer.data.chat.spans import RESERVED, Rendered, find_spans
from trainer.data.data_settings import TrainOn

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Encoded = tuple[list[int], list[bool]]
"""Token ids, and for each whether it is a target."""

OPEN, CLOSE = RESERVED[1:]
"""Around the number of a control token that is meant as text."""

SHORT = 80
"""Characters of a piece of text whose tokens are kept: a template's headers come again in every sample."""


class Encoder:
    """Samples to tokens with one tokenizer and its chat template."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, train_on: TrainOn, chosen: str | None = None):
        """`chosen`: data.chat_template where that is where the tokenizer has its template from."""
        self.tokenizer = tokenizer
        self.template = ChatTemplate(tokenizer, chosen)
        self.train_on = train_on
        special = {index: token for index, token in tokenizer.added_tokens_decoder.items() if token.special}
        self.special_ids = frozenset(set(special) | set(tokenizer.all_special_ids))
        self._special = {token.content: (index, token) for index, token in special.items()}
        self._names = sorted(self._special, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, self._names)) or r"(?!)")
        with_special = tokenizer("").input_ids
        bos = tokenizer.bos_token_id
        self.adds_bos = bos is not None and with_special[:1] == [bos]
        self._short_tokens = lru_cache(maxsize=4096)(self._tokens)

    def encode(self, sample: Sample) -> Encoded:
        """Tokens and targets of one sample, with exactly one begin and one end token. Raises BadRow."""
        (encoded,) = self.encode_many([sample])
        if isinstance(encoded, BadRow):
            raise encoded
        return encoded

    def encode_many(self, samples: Iterable[Sample]) -> list[Encoded | BadRow]:
        """The same for each sample, with the tokenizer called once; a BadRow where a sample has none."""
        drafts = [self._draft(sample) for sample in samples]
        texts = [text for draft in drafts if not isinstance(draft, BadRow) for text in draft.texts]
        tokens = iter(self._batch(texts))
        encoded: list[Encoded | BadRow] = []
        for draft in drafts:
            if isinstance(draft, BadRow):
                encoded.append(draft)
                continue
            ids = [next(tokens) for _ in draft.texts]
            try:
                encoded.append(draft.finish(*ids))
            except BadRow as error:
                encoded.append(error)
        return encoded

    def prompt(self, messages: list[Message]) -> list[int]:
        """Tokens up to where the assistant starts to answer."""
        return self._begin(self._tokens(self.template.renderer(None)(self._set_aside(messages), True)))

    def render(self, messages: list[Message], generation_prompt: bool = False, tools: list[dict] | None = None) -> str:
        """The template's text. Raises BadRow with the template's own words."""
        return self.template.renderer(tools)(messages, generation_prompt)

    def _draft(self, sample: Sample) -> _Draft | BadRow:
        try:
            if isinstance(sample, PlainText):
                texts = [self._escape(sample.prompt), self._escape(sample.text)]
                return _Draft(texts, self._plain)
            messages, tools = self._set_aside(sample.messages), self._set_aside(sample.tools)
            render = self.template.renderer(tools)
            text = render(messages)
            _check_nothing_left_out(messages, tools, text, self.template.renderer(None))
            if self.train_on is TrainOn.all:
                return _Draft([text], self._whole)
            turns = [i for i, trained in enumerate(sample.trained) if trained]
            if self.train_on is TrainOn.last:
                turns = [i for i in turns if i == max(_assistant_turns(sample))]
            rendered = find_spans(messages, turns, text, render, self._pattern)
            last = bool(turns) and turns[-1] == len(messages) - 1
            return _Draft([text], lambda ids: self._masked(ids, rendered, last))
        except BadRow as error:
            return error

    def _plain(self, prompt: list[int], text: list[int]) -> Encoded:
        before = self._begin(prompt)
        in_prompt = self.train_on is TrainOn.all and bool(prompt)
        return self._end(before + text, [in_prompt] * len(before) + [True] * len(text))

    def _whole(self, ids: list[int]) -> Encoded:
        ids = self._begin(ids)
        closed = self._through_control_token(ids, 0, len(ids))
        if closed < len(ids) or (ids[-1:] and ids[-1] in self.special_ids):
            return ids, [True] * len(ids)
        return self._end(ids, [True] * len(ids))

    def _masked(self, ids: list[int], rendered: Rendered, last: bool) -> Encoded:
        """Tokens with the spans as targets, each through its end token.

        A border is where the tokens of the text before it are a prefix of the whole text's tokens. Where the
        tokenizer merges across a border, the parts are tokenised on their own: so will generation see the prompt.
        """
        text, spans = rendered
        borders = self._borders(text, [p for span in spans for p in span], ids)
        if borders is None:
            ids, is_target = self._parts(text, spans)
        else:
            is_target = [False] * len(ids)
            for start, stop in zip(borders[::2], borders[1::2], strict=True):
                stop = self._through_control_token(ids, start, stop)
                is_target[start:stop] = [True] * (stop - start)
        ids, is_target = self._with_begin(ids, is_target)
        return self._end(ids, is_target) if last else (ids, is_target)

    def _borders(self, text: str, positions: list[int], ids: list[int]) -> list[int] | None:
        """The index in `ids` of each character position; None where a token crosses one of them.

        The tokenizer cuts the text at control tokens first, so only the text since the last one needs a second look.
        """
        control = [match.span() for match in self._pattern.finditer(text)]
        places = [k for k, index in enumerate(ids) if index in self.special_ids]
        if len(places) != len(control):
            control, places = [], []
        borders = []
        for position in positions:
            before = [n for n, (_, stop) in enumerate(control) if stop <= position]
            start, base = (control[before[-1]][0], places[before[-1]]) if before else (0, 0)
            piece = text[start:position]
            tokens = self._short_tokens(piece) if len(piece) <= SHORT else self._tokens(piece)
            if ids[base : base + len(tokens)] != tokens:
                return None
            borders.append(base + len(tokens))
        return borders

    def _parts(self, text: str, spans: list[tuple[int, int]]) -> Encoded:
        ids: list[int] = []
        is_target: list[bool] = []
        position = 0
        for start, stop in spans:
            before, answer = self._tokens(text[position:start]), self._tokens(text[start:stop])
            end = self._through_control_token(answer, 0, len(answer))
            ids += before + answer
            is_target += [False] * len(before) + [True] * end + [False] * (len(answer) - end)
            position = stop
        rest = self._tokens(text[position:])
        ids, is_target = ids + rest, is_target + [False] * len(rest)
        if self.tokenizer.decode(ids) != self.tokenizer.decode(self._tokens(text)):
            raise BadRow("the tokenizer merges text across the border of an answer and cannot be split there")
        return ids, is_target

    def _through_control_token(self, ids: list[int], start: int, stop: int) -> int:
        """The end of an answer: after its end token, so that a template's newline behind it is no target."""
        for i in range(stop - 1, start - 1, -1):
            if ids[i] in self.special_ids:
                behind = self.tokenizer.decode(ids[i + 1 : stop]) if i + 1 < stop else ""
                return stop if behind.strip() else i + 1
        return stop

    def _escape(self, text: str) -> str:
        """The text with control tokens put aside. Raises BadRow for the characters that this needs for itself."""
        if any(mark in text for mark in RESERVED):
            raise BadRow("the text holds one of the noncharacters U+FDD0, U+FDD1, U+FDD2, which are no text")
        if self._pattern.search(text) is None:
            return text
        return self._pattern.sub(lambda match: f"{OPEN}{self._names.index(match[0])}{CLOSE}", text)

    def _set_aside(self, value: Any) -> Any:
        """Every string in messages or tools, escaped; the keys of objects too, which templates write as JSON."""
        if isinstance(value, str):
            return self._escape(value)
        if isinstance(value, list):
            return [self._set_aside(item) for item in value]
        if isinstance(value, dict):
            return {self._set_aside(key): self._set_aside(item) for key, item in value.items()}
        return value

    def _batch(self, texts: list[str]) -> list[list[int]]:
        plain = [text for text in texts if text and OPEN not in text]
        tokens = iter(self.tokenizer(plain, add_special_tokens=False).input_ids if plain else [])
        return [self._escaped_tokens(text) if OPEN in text else next(tokens) if text else [] for text in texts]

    def _tokens(self, text: str) -> list[int]:
        if OPEN in text:
            return self._escaped_tokens(text)
        return self.tokenizer(text, add_special_tokens=False).input_ids

    def _escaped_tokens(self, text: str) -> list[int]:
        """Tokens where the text's own control tokens are tokens and those put aside are characters."""
        ids: list[int] = []
        position, strip_left = 0, False

        def add(piece: str) -> None:
            piece = re.sub(f"{OPEN}(\\d+){CLOSE}", lambda match: self._names[int(match[1])], piece)
            if piece:
                ids.extend(self.tokenizer(piece, add_special_tokens=False, split_special_tokens=True).input_ids)

        for match in self._pattern.finditer(text):
            index, token = self._special[match[0]]
            piece = text[position : match.start()]
            piece = piece.lstrip() if strip_left else piece
            add(piece.rstrip() if token.lstrip else piece)
            ids.append(index)
            position, strip_left = match.end(), token.rstrip
        piece = text[position:]
        add(piece.lstrip() if strip_left else piece)
        return ids

    def _begin(self, ids: list[int]) -> list[int]:
        return self._with_begin(ids, [False] * len(ids))[0]

    def _with_begin(self, ids: list[int], is_target: list[bool]) -> Encoded:
        """One begin token, where this tokenizer wants one and the template has not written it."""
        bos = self.tokenizer.bos_token_id
        if self.adds_bos and ids[:1] != [bos]:
            return [bos, *ids], [False, *is_target]
        return ids, is_target

    def _end(self, ids: list[int], is_target: list[bool]) -> Encoded:
        """One end token after the last answer, where the template has not written one."""
        eos = self.tokenizer.eos_token_id
        last_target = next((i for i in range(len(ids) - 1, -1, -1) if is_target[i]), None)
        if eos is None or last_target is None or ids[last_target] in self.special_ids:
            return ids, is_target
        return [*ids[: last_target + 1], eos], [*is_target[: last_target + 1], True]


class _Draft:
    """Texts to tokenise, and what makes a sample of their tokens."""

    def __init__(self, texts: list[str], finish: Callable[..., Encoded]):
        self.texts, self.finish = texts, finish


def _assistant_turns(sample: Dialogue) -> list[int]:
    return [i for i, message in enumerate(sample.messages) if message["role"] == "assistant"] or [-1]


def _check_nothing_left_out(
    messages: list[Message], tools: list[dict] | None, text: str, without_tools: Callable[[list[Message]], str]
) -> None:
    """Raises BadRow where the template silently drops a message, a call or the tools: it would not be trained on."""
    for i, message in enumerate(messages):
        content = message["content"]
        if content.strip() not in text and content.rpartition("</think>")[2].strip() not in text:
            raise BadRow(f"the chat template leaves out or rewrites the text of messages[{i}] ({message['role']})")
        for call in message.get("tool_calls", ()):
            if call["function"]["name"] not in text:
                raise BadRow(f"the chat template leaves out the tool_calls of messages[{i}]")
    # Templates of thinking models drop earlier turns' thoughts on purpose.
    if (thoughts := messages[-1].get(THOUGHTS[0])) and thoughts.strip() not in text:
        raise BadRow(
            f"the chat template leaves out the thoughts ({THOUGHTS[0]}) of messages[{len(messages) - 1}]: choose one "
            "that writes them with data.chat_template, or take them out of the rows"
        )
    if tools is not None and without_tools(messages) == text:
        raise BadRow("the chat template leaves out the tools")
