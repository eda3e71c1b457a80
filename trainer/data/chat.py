"""The one path from messages to tokens, for training, evaluation and generation.

Which characters the assistant wrote is found from the template itself, never from marker strings: the text rendered
up to an assistant's turn, and through it, are prefixes of the whole. Where a template rewrites earlier turns (Qwen3
drops old thoughts, Mistral moves the system text) the contents are replaced by sentinels in one render, and the
result is checked against the real one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainer.data.formats import BadRow, Dialogue, PlainText, Sample
from trainer.data.options import TrainOn

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Span = tuple[int, int]
"""Characters [start, stop) of a rendered dialogue."""

Encoded = tuple[list[int], list[bool]]
"""Token ids, and for each whether it is a target."""


class Encoder:
    """Samples to tokens with one tokenizer and its chat template."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, train_on: TrainOn):
        self.tokenizer = tokenizer
        self.train_on = train_on
        self.special_ids = frozenset(
            {index for index, token in tokenizer.added_tokens_decoder.items() if token.special}
            | set(tokenizer.all_special_ids)
        )
        with_special = tokenizer("").input_ids
        bos = tokenizer.bos_token_id
        self.adds_bos = bos is not None and with_special[:1] == [bos]

    def encode(self, sample: Sample) -> Encoded:
        """Tokens and targets of one sample, with exactly one begin and one end token. Raises BadRow."""
        if isinstance(sample, PlainText):
            return self._plain(sample)
        return self._dialogue(sample)

    def prompt(self, messages: list[dict[str, str]]) -> list[int]:
        """Tokens up to where the assistant starts to answer."""
        return self._begin(self._tokens(self.render(messages, generation_prompt=True)))

    def render(self, messages: list[dict[str, str]], generation_prompt: bool = False) -> str:
        """The template's text. Raises BadRow with the template's own words."""
        import jinja2

        try:
            return self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=generation_prompt)
        except (jinja2.TemplateError, TypeError) as error:
            roles = ", ".join(m["role"] for m in messages)
            raise BadRow(f"the chat template refuses the roles {roles}: {error}") from None

    def _plain(self, sample: PlainText) -> Encoded:
        prompt = self._begin(self._tokens(sample.prompt)) if sample.prompt else self._begin([])
        ids = self._tokens(sample.text)
        is_target = [self.train_on is TrainOn.all and bool(sample.prompt)] * len(prompt) + [True] * len(ids)
        return self._end(prompt + ids, is_target)

    def _dialogue(self, sample: Dialogue) -> Encoded:
        if self.train_on is TrainOn.all:
            ids = self._begin(self._tokens(self.render(sample.messages)))
            return self._end(ids, [True] * len(ids))
        turns = [i for i, trained in enumerate(sample.trained) if trained]
        if self.train_on is TrainOn.last:
            turns = turns[-1:]
        text = self.render(sample.messages)
        if not turns:
            return self._begin(self._tokens(text)), [False] * len(self._begin(self._tokens(text)))
        spans = self._prefix_spans(sample.messages, turns, text) or self._sentinel_spans(sample.messages, turns, text)
        ids, is_target = self._encode_spans(text, spans)
        if turns[-1] == len(sample.messages) - 1:
            return self._end(ids, is_target)
        return ids, is_target

    def _prefix_spans(self, messages: list[dict], turns: list[int], text: str) -> list[Span] | None:
        """Spans where what comes before and through a turn are prefixes of the whole; None where they are not."""
        spans = []
        for turn in turns:
            before = self.render(messages[:turn], generation_prompt=True)
            through = self.render(messages[: turn + 1])
            if not (text.startswith(through) and through.startswith(before)):
                return None
            spans.append((len(before), len(through)))
        return spans

    def _sentinel_spans(self, messages: list[dict], turns: list[int], text: str) -> list[Span]:
        """Spans from one render with each content replaced by a sentinel; checked against the real render."""
        sentinels = [f"\ue000{i}\ue001" for i in range(len(messages))]
        marked = self.render([{**m, "content": s} for m, s in zip(messages, sentinels, strict=True)])
        for contents in ([m["content"] for m in messages], [m["content"].strip() for m in messages]):
            spans, built, rest = [], "", marked
            for i in sorted(range(len(messages)), key=lambda i: marked.find(sentinels[i])):
                scaffold, found, rest = rest.partition(sentinels[i])
                if not found:
                    break
                built += scaffold
                start = len(built)
                built += contents[i]
                if i in turns:
                    following = rest.split("\ue000", 1)[0]
                    spans.append((start, len(built) + len(following)))
            if built + rest == text and len(spans) == len(turns):
                return spans
        raise BadRow("the chat template rewrites the assistant's text: what it wrote cannot be told apart")

    def _encode_spans(self, text: str, spans: list[Span]) -> Encoded:
        """Tokens of the text; targets are each span's, through its last control token.

        A border is where tokens of the text before it are a prefix of the whole text's tokens. Where the tokenizer
        merges across a border, the parts are tokenised on their own: so will generation see the prompt.
        """
        ids = self._tokens(text)
        borders = []
        for span in spans:
            for position in span:
                before = self._tokens(text[:position])
                if ids[: len(before)] != before:
                    return self._encode_parts(text, spans)
                borders.append(len(before))
        is_target = [False] * len(ids)
        for start, stop in zip(borders[::2], borders[1::2], strict=True):
            stop = self._through_control_token(ids, start, stop)
            is_target[start:stop] = [True] * (stop - start)
        return self._with_begin(ids, is_target)

    def _encode_parts(self, text: str, spans: list[Span]) -> Encoded:
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
        return self._with_begin(ids, is_target)

    def _through_control_token(self, ids: list[int], start: int, stop: int) -> int:
        """The end of an answer: after its last control token, so that a template's newline behind it is no target."""
        for i in range(stop - 1, start - 1, -1):
            if ids[i] in self.special_ids:
                return i + 1
        return stop

    def _tokens(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False).input_ids

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
        last_target = max((i for i, target in enumerate(is_target) if target), default=None)
        if eos is None or last_target is None or ids[last_target] in self.special_ids:
            return ids, is_target
        return [*ids[: last_target + 1], eos], [*is_target[: last_target + 1], True]
