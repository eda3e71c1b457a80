"""Each format against the messages it stands for, and the words for what it cannot stand for."""

from __future__ import annotations

import json

import pytest

from trainer.data.chat.formats import RowReader
from trainer.data.chat.messages import BadRow, Dialogue, PlainText
from trainer.data.data_settings import Format
from trainer.data.sources.row import Row


def sample(fields: dict, format: Format = Format.auto, **reader):
    return RowReader(format, **reader).sample(Row("f:1", fields))[0]


def refused(fields: dict, format: Format = Format.auto, **reader) -> str:
    with pytest.raises(BadRow) as error:
        sample(fields, format, **reader)
    return str(error.value)


def turn(role: str, content: str, **more) -> dict:
    return {"role": role, "content": content, **more}


ASKED = [turn("user", "Hi"), turn("assistant", "Hello")]
DIALOGUE = Dialogue(ASKED, [False, True])
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": ASKED},
        {"messages": json.dumps(ASKED)},  # a csv column
        {"messages": [turn("user", [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}]), ASKED[1]]},
        {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]},
        {"conversations": ASKED},
        {"instruction": "Hi", "output": "Hello"},
        {"instruction": "Hi", "input": "", "output": "Hello"},
        {"prompt": ASKED[:1], "completion": ASKED[1:]},
    ],
)
def test_many_ways_to_say_the_same(fields):
    assert sample(fields) == DIALOGUE


def test_alpaca_puts_system_and_history_before_the_question_with_its_input():
    fields = {"instruction": "Sum", "input": "1 2", "output": "3", "system": "Be exact", "history": [["a", "b"]]}
    roles = ["system", "user", "assistant", "user", "assistant"]
    texts = ["Be exact", "a", "b", "Sum\n\n1 2", "3"]
    assert sample(fields).messages == [turn(r, t) for r, t in zip(roles, texts, strict=True)]


def test_text_and_prompt_completion_strings():
    assert sample({"text": "once"}) == PlainText("", "once")
    assert sample({"prompt": "a", "completion": "b"}) == PlainText("a", "b")


def test_completions_alone_are_trained():
    fields = {"prompt": [*ASKED, turn("user", "Again")], "completion": [turn("assistant", "Hello again")]}
    assert sample(fields).trained == [False, False, False, True]


@pytest.mark.parametrize(
    "flags, trained",
    [
        ({"train": False}, False),
        ({"loss": False}, False),
        ({"weight": 0}, False),
        ({"weight": 1.0}, True),
        ({"loss_weight": 0.0}, False),
        ({"loss_weight": 1.0}, True),
        ({"constraint": "a word that only holds train"}, True),
    ],
)
def test_flags_of_a_message(flags, trained):
    assert sample({"messages": [ASKED[0], {**ASKED[1], **flags}]}).trained == [False, trained]


def test_tool_calls_with_arguments_as_text_or_object():
    as_text = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    tools = [{"name": "add", "parameters": {}}]
    got = sample(
        {
            "messages": [
                turn("user", "1+1"),
                {"role": "assistant", "content": None, "tool_calls": [as_text]},
                turn("tool", "2", tool_call_id="1"),
                turn("assistant", "2"),
            ],
            "tools": json.dumps(tools),
        }
    )
    assert got.messages[1] == turn("assistant", "", tool_calls=[{"id": "1", **CALL}])
    assert got.messages[2] == turn("tool", "2", tool_call_id="1")
    assert got.trained == [False, True, False, True]
    assert got.tools == [{"type": "function", "function": tools[0]}]


def test_sharegpt_calls_observations_system_and_tools():
    got = sample(
        {
            "system": "Be brief",
            "conversations": [
                {"from": "human", "value": "1+1"},
                {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 1}}'},
                {"from": "observation", "value": "2"},
                {"from": "gpt", "value": "2", "weight": 0},
            ],
        }
    )
    assert [m["role"] for m in got.messages] == ["system", "user", "assistant", "tool", "assistant"]
    assert got.messages[2] == turn("assistant", "", tool_calls=[CALL])
    assert got.trained == [False, False, True, False, False]


def test_columns_and_roles_map_other_names():
    assert sample({"q": "Hi", "a": "Hello"}, columns={"instruction": "q", "output": "a"}) == DIALOGUE
    fields = {"messages": [turn("asker", "Hi"), turn("oracle", "Hello")]}
    assert sample(fields, roles={"asker": "user", "oracle": "assistant"}) == DIALOGUE
    assert "data.columns names the column p (did you mean prmpt?)" not in refused({"q": 1}, columns={"prompt": "p"})
    assert "the column answr (did you mean answer?)" in refused({"answer": 1}, columns={"output": "answr"})


def test_a_mapped_column_is_not_read_under_its_old_name_too():
    """text is the answer here, not a plain text beside the question."""
    assert sample({"q": "Hi", "text": "Hello"}, columns={"instruction": "q", "output": "text"}) == DIALOGUE


@pytest.mark.parametrize(
    "fields, said",
    [
        ({"messages": [turn("usr", "Hi")]}, "messages[0].role is 'usr' (did you mean user?)"),
        ({"messages": [turn("user", 7)]}, "messages[0].content must be a string or a list of text parts, not 7"),
        ({"messages": [turn("user", [{"type": "image_url"}])]}, "content[0] must be a text part, not 'image_url'"),
        (
            {"messages": [turn("user", [{"type": "text", "value": "Hi"}])]},
            'content[0] is a text part without "text": it has type, value',
        ),
        ({"messages": [turn("user", [{"text": 7}])]}, "content[0] is a text part whose text is 7, no string"),
        ({"messages": [turn("assistant", "Hi", loss_weight=0.5)]}, "loss_weight must be 0 or 1, not 0.5"),
        ({"messages": [turn("assistant", "Hi", is_masked=True)]}, "messages[0].is_masked could say what is trained on"),
        ({"messages": [turn("assistant", "Hi", lossweight=1)]}, "(did you mean loss_weight?)"),
        ({"conversations": [{"from": "gpt", "value": "Hi", "mask": 1}]}, "conversations[0].mask could say"),
        ({"conversations": [{"from": "bot", "value": "Hi"}]}, "conversations[0].from is 'bot'"),
        ({"conversations": [{"from": "gpt", "value": 7}]}, "conversations[0].value must be a string"),
        ({"messages": []}, "messages must be a list of messages, not []"),
        ({"messages": ["Hi"]}, "messages[0] must be an object with role and content, not 'Hi'"),
        ({"messages": "[{"}, "messages: not JSON: Expecting"),
        ({"messages": [turn("user", "Hi", train=True)]}, "only an assistant's message can be trained on"),
        ({"messages": [turn("assistant", "Hi", weight=0.5)]}, "weight must be 0 or 1, not 0.5"),
        ({"messages": [turn("assistant", "Hi", train="yes")]}, "train must be true or false, not 'yes'"),
        ({"messages": [turn("assistant", "Hi", train=True, weight=0)]}, "contradict each other"),
        ({"messages": [turn("user", "Hi", tool_calls=[CALL])]}, "only the assistant calls tools"),
        ({"messages": [turn("assistant", "", tool_calls=[{"id": "1"}])]}, "must name a function"),
        (
            {"messages": [turn("assistant", "", tool_calls=[{"name": "f", "arguments": "{"}])]},
            "tool_calls[0].arguments: not JSON: Expecting",
        ),
        ({"messages": ASKED, "tools": "add"}, "tools must be a list of function schemas, not 'add'"),
        ({"conversations": [{"from": "function_call", "value": "add"}]}, "value of a function_call: not JSON"),
        ({"instruction": "Hi", "output": 7}, "output must be a string, not 7"),
        ({"instruction": "Hi", "output": "x", "history": ["a"]}, "history must be a list of [question, answer] pairs"),
        ({"prompt": ASKED, "completion": "x"}, "prompt must be a string, not"),
        ({"text": "a", "messages": ASKED}, "the row fits messages and text: choose one with data.format="),
        ({"question": "Hi"}, "unknown format: the row has question"),
        ({}, "the row has no fields"),
    ],
)
def test_what_is_wrong_with_a_row(fields, said):
    assert said in refused(fields)


def test_a_named_format_settles_what_is_ambiguous():
    assert sample({"text": "a", "messages": ASKED}, Format.text) == PlainText("", "a")
    assert "format alpaca needs the field output (did you mean outptu?)" in refused(
        {"instruction": "a", "outptu": "b"}, Format.alpaca
    )


def test_a_row_that_could_not_be_read_says_why():
    with pytest.raises(BadRow, match="not JSON"):
        RowReader(Format.auto).sample(Row("f:1", None, "not JSON: cut"))


@pytest.mark.parametrize("name", ["reasoning_content", "thinking", "reasoning"])
def test_thoughts_reach_the_template_under_whichever_name(name):
    answer = {"role": "assistant", "content": "5", name: "2 and 3"}
    sample, _ = RowReader(Format.messages).sample(
        Row("f:1", {"messages": [{"role": "user", "content": "2 + 3?"}, answer]})
    )
    assert sample.messages[1] == {"role": "assistant", "content": "5", "reasoning_content": "2 and 3"}


@pytest.mark.parametrize(
    "fields, line",
    [
        ({"question": "Hi", "answer": "Hello"}, "data.columns={instruction: question, output: answer}"),
        ({"prompt": "Hi", "response": "Hello"}, "data.columns={instruction: prompt, output: response}"),
        (
            {"Query": "Hi", "context": "", "reply": "Hello"},
            "data.columns={instruction: Query, output: reply, input: context}",
        ),
        ({"chat": ASKED}, "data.columns={messages: chat}"),
    ],
)
def test_the_columns_to_type_are_told_and_work(fields, line):
    assert f"type '{line}'" in refused(fields)
    columns = dict(pair.split(": ") for pair in line.removeprefix("data.columns={").rstrip("}").split(", "))
    assert sample(fields, columns=columns) == DIALOGUE


def test_a_problem_names_the_message_as_the_row_does():
    from tests.data.styles import tokenizer_of
    from trainer.data.chat.encoder import Encoder
    from trainer.data.data_settings import EmptyAnswers, TrainOn

    encoder = Encoder(tokenizer_of("chatml"), TrainOn.assistant, empty_answers=EmptyAnswers.bad_row)
    turns = [{"from": "human", "value": "a"}, {"from": "gpt", "value": ""}]
    for fields, name in (
        ({"conversations": turns, "system": "s"}, "conversations[1]"),
        ({"messages": [ASKED[0], turn("assistant", "")]}, "messages[1]"),
        ({"instruction": "a", "output": "", "system": "s"}, "output"),
        ({"prompt": ASKED[:1], "completion": [turn("assistant", "")]}, "completion[0]"),
    ):
        with pytest.raises(BadRow) as error:
            encoder.encode(sample(fields))
        assert str(error.value) == f"{name}: the answer is empty"
