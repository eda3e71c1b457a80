"""The one path from messages to tokens, for training, evaluation and generation.

Which characters the assistant wrote is found from the template itself, never from marker strings (spans.py). Text
that looks like a control token but stands in a message stays text (aside.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cached_property, lru_cache, partial
from typing import TYPE_CHECKING

from trainer.data.chat.aside import Aside, without_reserved
from trainer.data.chat.messages import THOUGHTS, BadRow, Dialogue, Message, PlainText, Sample
from trainer.data.chat.rendering import ChatTemplate
from trainer.data.chat.spans import Rendered, find_spans
from trainer.data.chat.thoughts import OPEN, parts, thoughts_of, trained_part
from trainer.data.data_settings import EmptyAnswers, TrainOn, TrainPart

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Encoded = tuple[list[int], list[bool]]
"""Token ids, and for each whether it is a target."""

Asked = list[Message] | str
"""What a model is asked: messages through the chat template, or a text that it goes on from."""

CONTROL_TOKENS = "control tokens in the text"
EMPTY_ANSWER = "empty answers"
LAST_THOUGHTS = "thoughts of the last answer left out"
EARLIER_THOUGHTS = "thoughts of earlier answers left out"
OTHER_PROMPT = "answers behind another prompt than generation's"
"""What is remarked of a sample that is trained on all the same; the audit says what it means."""

Remark = Callable[[int, str], None]
"""Takes the number of a sample, and what is remarked of it."""

SHORT = 80
"""Characters of a piece of text whose tokens are kept: a template's headers come again in every sample."""


class Encoder:
    """Samples to tokens with one tokenizer and its chat template."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        train_on: TrainOn,
        chosen: str | None = None,
        train_part: TrainPart = TrainPart.all,
        empty_answers: EmptyAnswers = EmptyAnswers.train,
        today: str | None = None,
    ):
        """`chosen`: data.chat_template where that is where the tokenizer has its template from; `today`: what the
        template's strftime_now tells, None for the real day."""
        self.tokenizer = tokenizer
        self.template = ChatTemplate(tokenizer, chosen, today)
        self.train_on, self.train_part, self.empty_answers = train_on, train_part, empty_answers
        self.aside = Aside(tokenizer)
        self.special_ids = self.aside.special_ids
        with_special = tokenizer("").input_ids
        bos = tokenizer.bos_token_id
        self.adds_bos = bos is not None and with_special[:1] == [bos]
        self._short_tokens = lru_cache(maxsize=4096)(self.aside.tokens)

    def encode(self, sample: Sample) -> Encoded:
        """Tokens and targets of one sample, with exactly one begin and one end token. Raises BadRow."""
        (encoded,) = self.encode_many([sample])
        if isinstance(encoded, BadRow):
            raise encoded
        return encoded

    def encode_many(
        self, samples: Iterable[Sample], remark: Remark = lambda number, what: None
    ) -> list[Encoded | BadRow]:
        """The same for each sample, with the tokenizer called once; a BadRow where a sample has none."""
        drafts = [self._draft(sample, partial(remark, number)) for number, sample in enumerate(samples)]
        texts = [text for draft in drafts if not isinstance(draft, BadRow) for text in draft.texts]
        tokens = iter(self.aside.batch(texts))
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

    def prompt(self, asked: Asked, tools: list[dict] | None = None) -> list[int]:
        """Tokens up to where the assistant starts to answer, or the text's own. Raises BadRow."""
        if isinstance(asked, str):
            return self._begin(self.aside.tokens(without_reserved(asked)))
        messages, tools = self.aside.messages(asked, self._prompt_opens_thoughts), self.aside.value(tools)
        return self._begin(self.aside.tokens(self.template.renderer(tools)(messages, True)))

    def is_ended(self, ids: Sequence[int]) -> bool:
        """Whether tokens end with an end token, but for a template's space behind it."""
        closed = self._through_control_token(ids, 0, len(ids))
        return closed > 0 and int(ids[closed - 1]) in self.special_ids

    def render(self, messages: list[Message], generation_prompt: bool = False, tools: list[dict] | None = None) -> str:
        """The template's text. Raises BadRow with the template's own words."""
        return self.template.renderer(tools)(messages, generation_prompt)

    def _draft(self, sample: Sample, remark: Callable[[str], None]) -> _Draft | BadRow:
        try:
            if isinstance(sample, PlainText):
                return self._text_draft(sample, remark)
            messages, tools = (
                self.aside.messages(sample.messages, self._prompt_opens_thoughts),
                self.aside.value(sample.tools),
            )
            render = self.template.renderer(tools)
            try:
                text = render(messages)
            except BadRow as error:
                with_tools = tools is not None or any(m["role"] == "tool" or "tool_calls" in m for m in messages)
                raise BadRow(f"{error}; {self._with_tools()}") from None if with_tools else error
            self._check_nothing_left_out(messages, tools, text)
            turns = [i for i, trained in enumerate(sample.trained) if trained]
            last_turn = max(_assistant_turns(sample))
            if self.train_on is TrainOn.last:
                turns = [i for i in turns if i == last_turn]
            for turn in turns:
                self._look_at_answer(messages, turn, remark)
            if self.train_on is TrainOn.all:
                self._look_at_thoughts(messages, turns, [text] * len(turns), remark)
                return _Draft([text], self._whole)
            rendered = find_spans(messages, turns, text, render, self.aside.control)
            words = [text[start:stop] for start, stop in rendered.spans]
            self._look_at_thoughts(messages, turns, words, remark)
            if not all(text[:start].endswith(self._prompt_end) for start, _ in rendered.spans):
                remark(OTHER_PROMPT)
            last = bool(turns) and turns[-1] == len(messages) - 1 and self.train_part is not TrainPart.thoughts
            rendered = Rendered(text, self._parts_of(messages, turns, rendered))
            return _Draft([text], lambda ids: self._masked(ids, rendered, last))
        except BadRow as error:
            return BadRow(sample.in_the_rows_words(str(error))) if isinstance(sample, Dialogue) else error

    def _text_draft(self, sample: PlainText, remark: Callable[[str], None]) -> _Draft:
        """Plain text: its control tokens are the model's, as the tokenizer has them; other tools write it so."""
        texts = [without_reserved(sample.prompt), without_reserved(sample.text)]
        if any(self.aside.control.search(text) for text in texts):
            remark(CONTROL_TOKENS)
        if not sample.text.strip():
            self._refuse_or_remark("the text to train on is empty", remark)
        return _Draft(texts, self._plain)

    def _look_at_answer(self, messages: list[Message], turn: int, remark: Callable[[str], None]) -> None:
        message = messages[turn]
        thought_of = thoughts_of(message, self._prompt_opens_thoughts) and self.train_part is not TrainPart.answer
        answer = parts(message["content"], self._prompt_opens_thoughts).answer
        if not answer.strip() and not message.get("tool_calls") and not thought_of:
            self._refuse_or_remark(f"messages[{turn}]: the answer is empty", remark)

    def _refuse_or_remark(self, problem: str, remark: Callable[[str], None]) -> None:
        if self.empty_answers is EmptyAnswers.bad_row:
            raise BadRow(problem)
        remark(EMPTY_ANSWER)

    def _look_at_thoughts(
        self, messages: list[Message], turns: list[int], words: list[str], remark: Callable[[str], None]
    ) -> None:
        """Remarks on thoughts that a template leaves out of the words that are trained on."""
        last = max((i for i, message in enumerate(messages) if message["role"] == "assistant"), default=-1)
        for turn, said in zip(turns, words, strict=True):
            if thoughts_of(messages[turn], self._prompt_opens_thoughts) not in said:
                remark(LAST_THOUGHTS if turn == last else EARLIER_THOUGHTS)

    def _parts_of(self, messages: list[Message], turns: list[int], rendered: Rendered) -> list[tuple[int, int]]:
        """The spans that data.train_part leaves of the answers'."""
        spans = []
        for turn, (start, stop) in zip(turns, rendered.spans, strict=True):
            thoughts = thoughts_of(messages[turn], self._prompt_opens_thoughts)
            first, end = trained_part(rendered.text[start:stop], thoughts, self.train_part)
            if first < end:
                spans.append((start + first, start + end))
        return spans

    def _check_nothing_left_out(self, messages: list[Message], tools: list[dict] | None, text: str) -> None:
        """Raises BadRow where the template silently drops a message, a call or the tools: they would not be trained
        on."""
        for i, message in enumerate(messages):
            content = message["content"]
            if message["role"] == "assistant":
                answer = parts(content, self._prompt_opens_thoughts).answer
            else:
                answer = content
            if content.strip() not in text and answer.strip() not in text:
                raise BadRow(f"the chat template leaves out or rewrites the text of messages[{i}] ({message['role']})")
            for call in message.get("tool_calls", ()):
                if call["function"]["name"] not in text:
                    raise BadRow(f"the chat template does not write tool calls: {self._with_tools()}")
        # Templates of thinking models drop earlier turns' thoughts on purpose.
        if (thoughts := messages[-1].get(THOUGHTS[0])) and thoughts.strip() not in text:
            raise BadRow(
                f"the chat template leaves out the thoughts ({THOUGHTS[0]}) of messages[{len(messages) - 1}]: choose "
                "one that writes them with data.chat_template, or take them out of the rows"
            )
        if tools is not None and self.template.renderer(None)(messages) == text:
            raise BadRow(f"the chat template does not write tools: {self._with_tools()}")

    def _with_tools(self) -> str:
        """The way out."""
        fits = "chatml_tools" if "<|im_start|>" in self.aside.special else "plain_tools"
        return f"choose one that does, such as data.chat_template={fits}"

    @cached_property
    def _prompt_end(self) -> str:
        """What the template writes to make the assistant answer; empty where it does not tell."""
        render, asked = self.template.renderer(None), [{"role": "user", "content": "Hello"}]
        try:
            ended, asking = render(asked), render(asked, True)
        except BadRow:
            return ""
        return asking[len(ended) :] if asking.startswith(ended) else ""

    @cached_property
    def _prompt_opens_thoughts(self) -> bool:
        return self._prompt_end.rstrip().endswith(OPEN)

    def _plain(self, prompt: list[int], text: list[int]) -> Encoded:
        """Targets are the text's tokens, and with train_on=all the prompt's; a begin token alone before it is none."""
        before = self._begin(prompt)
        if not prompt and self.adds_bos and text[:1] == before:
            before, text = text[:1], text[1:]
        in_prompt = self.train_on is TrainOn.all and bool(prompt)
        ids, is_target = before + text, [in_prompt] * len(before) + [True] * len(text)
        return (ids, is_target) if self.is_ended(text) else self._end(ids, is_target)

    def _whole(self, ids: list[int]) -> Encoded:
        ids = self._begin(ids)
        return (ids, [True] * len(ids)) if self.is_ended(ids) else self._end(ids, [True] * len(ids))

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
        control = [match.span() for match in self.aside.control.finditer(text)]
        places = [k for k, index in enumerate(ids) if index in self.special_ids]
        if len(places) != len(control):
            control, places = [], []
        borders = []
        for position in positions:
            before = [n for n, (_, stop) in enumerate(control) if stop <= position]
            start, base = (control[before[-1]][0], places[before[-1]]) if before else (0, 0)
            piece = text[start:position]
            tokens = self._short_tokens(piece) if len(piece) <= SHORT else self.aside.tokens(piece)
            if ids[base : base + len(tokens)] != tokens:
                return None
            borders.append(base + len(tokens))
        return borders

    def _parts(self, text: str, spans: list[tuple[int, int]]) -> Encoded:
        ids: list[int] = []
        is_target: list[bool] = []
        position = 0
        for start, stop in spans:
            before, answer = self.aside.tokens(text[position:start]), self.aside.tokens(text[start:stop])
            end = self._through_control_token(answer, 0, len(answer))
            ids += before + answer
            is_target += [False] * len(before) + [True] * end + [False] * (len(answer) - end)
            position = stop
        rest = self.aside.tokens(text[position:])
        ids, is_target = ids + rest, is_target + [False] * len(rest)
        if self.tokenizer.decode(ids) != self.tokenizer.decode(self.aside.tokens(text)):
            raise BadRow("the tokenizer merges text across the border of an answer and cannot be split there")
        return ids, is_target

    def _through_control_token(self, ids: list[int], start: int, stop: int) -> int:
        """The end of an answer: after its end token, so that a template's newline behind it is no target."""
        for i in range(stop - 1, start - 1, -1):
            if ids[i] in self.special_ids:
                behind = self.tokenizer.decode(ids[i + 1 : stop]) if i + 1 < stop else ""
                return stop if behind.strip() else i + 1
        return stop

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
