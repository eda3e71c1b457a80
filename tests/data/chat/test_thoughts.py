"""What of a reasoning answer is trained on, what is remarked, and answers that quote the marks of thoughts."""

from __future__ import annotations

import itertools

import pytest

from tests.data.styles import STYLES, tokenizer_of
from tests.support import CHATML_TEMPLATE, make_tokenizer
from trainer.data.chat.encoder import EARLIER_THOUGHTS, LAST_THOUGHTS, OTHER_PROMPT, Encoder
from trainer.data.chat.messages import BadRow, Dialogue
from trainer.data.data_settings import TrainOn, TrainPart

ASKED = {"role": "user", "content": "2 + 3?"}
THOUGHT = "<think>\ntwo and three\n</think>\n\n"
FIVE = {"role": "assistant", "content": f"{THOUGHT}5"}
PLAIN = {"role": "assistant", "content": "5"}


def encoded(style: str, messages: list[dict], train_on=TrainOn.assistant, part=TrainPart.all):
    """Text of each run of targets, and the remarks."""
    tokenizer, remarks = tokenizer_of(style), []
    encoder = Encoder(tokenizer, train_on, train_part=part)
    dialogue = Dialogue(messages, [m["role"] == "assistant" for m in messages])
    (found,) = encoder.encode_many([dialogue], lambda number, what: remarks.append(what))
    if isinstance(found, BadRow):
        raise found
    grouped = itertools.groupby(zip(*found, strict=True), key=lambda pair: pair[1])
    return [tokenizer.decode([i for i, _ in group]) for target, group in grouped if target], remarks


@pytest.mark.parametrize(
    "part, with_thoughts, without",
    [
        (TrainPart.all, [f"{THOUGHT}5<|im_end|>"], ["<think>\n\n</think>\n\n5<|im_end|>"]),
        (TrainPart.filled, [f"{THOUGHT}5<|im_end|>"], ["5<|im_end|>"]),
        (TrainPart.answer, ["5<|im_end|>"], ["5<|im_end|>"]),
        (TrainPart.thoughts, [THOUGHT.rstrip()], []),
    ],
)
def test_the_part_that_is_trained_on(part, with_thoughts, without):
    assert encoded("qwen3", [ASKED, FIVE], part=part) == (with_thoughts, [])
    named = {**PLAIN, "reasoning_content": "two and three"}
    assert encoded("qwen3", [ASKED, PLAIN], part=part)[0] == without
    with pytest.raises(BadRow, match="leaves out the thoughts"):  # this template reads them from the content alone
        encoded("qwen3", [ASKED, named], part=part)


def test_a_part_needs_a_template_that_ends_thoughts():
    tokenizer = make_tokenizer(CHATML_TEMPLATE.replace("m.content", "(m.reasoning_content or '') + m.content"))
    thinking = Dialogue([ASKED, {**PLAIN, "reasoning_content": "two"}], [False, True])
    with pytest.raises(BadRow, match="data.train_part=answer: the chat template does not write </think>"):
        Encoder(tokenizer, TrainOn.assistant, train_part=TrainPart.answer).encode(thinking)


@pytest.mark.parametrize("style", ["qwen3", "deepseek", "chatml"])
@pytest.mark.parametrize("content", ["Write </think> to end it.", "Write <think> to begin.", "a</think>b</think>"])
def test_an_answer_that_quotes_the_marks_keeps_its_words(style, content):
    """Of a template whose prompt opens a thought the first </think> closes it: so its own model writes."""
    thought = THOUGHT if style != "chatml" else ""
    runs, _ = encoded(style, [ASKED, {**PLAIN, "content": f"{thought}{content}"}])
    end = STYLES[style].special[1]
    assert len(runs) == 1 and runs[0].endswith(f"{content}{end}")
    if style != "deepseek":
        assert encoded(style, [ASKED, {**PLAIN, "content": content}])[0][0].endswith(f"{content}{end}")


def test_earlier_thoughts_that_the_template_drops_are_remarked():
    assert encoded("qwen3", [ASKED, FIVE, ASKED, FIVE]) == (
        ["5<|im_end|>", f"{THOUGHT}5<|im_end|>"],
        [EARLIER_THOUGHTS],
    )
    last = encoded("qwen3", [ASKED, FIVE, ASKED, FIVE], TrainOn.last)  # the way out
    assert last == ([f"{THOUGHT}5<|im_end|>"], [])
    assert encoded("qwen3", [ASKED, PLAIN, ASKED, FIVE])[1] == []


def test_dropped_thoughts_and_a_prompt_that_no_generation_makes_are_remarked():
    """DeepSeek's distillations: the prompt opens a thought, and the render of an answer leaves it out."""
    runs, remarks = encoded("deepseek", [ASKED, FIVE])
    assert runs == ["\n\n5<｜end▁of▁sentence｜>"] and remarks == [LAST_THOUGHTS, OTHER_PROMPT]
    tokenizer = tokenizer_of("deepseek")
    encoder = Encoder(tokenizer, TrainOn.assistant)
    ids, is_target = encoder.encode(Dialogue([ASKED, FIVE], [False, True]))
    assert ids[: is_target.index(True)] != encoder.prompt([ASKED])  # oracle of the second remark


def test_thoughts_under_their_own_name_are_the_trained_ones():
    """A template that takes reasoning_content, as Qwen3's own does, with an answer that quotes the marks."""
    tokenizer = tokenizer_of("qwen3")
    template = tokenizer.chat_template
    read = "{%- if message.reasoning_content %}{%- set reasoning_content = message.reasoning_content %}"
    tokenizer.chat_template = template.replace(
        "{%- if '</think>' in content %}", read + "{%- elif '</think>' in content %}"
    )
    try:
        answer = {**PLAIN, "content": "</think> ends it", "reasoning_content": "I say </think>"}
        for part, said in (
            (TrainPart.answer, "</think> ends it<|im_end|>"),
            (TrainPart.thoughts, "<think>\nI say </think>\n</think>"),
        ):
            assert encoded("qwen3", [ASKED, answer], part=part)[0] == [said]
    finally:
        tokenizer.chat_template = template
