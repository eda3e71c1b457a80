"""Templates that a user gives: for the chat, and for the rows."""

from __future__ import annotations

import itertools
import json

import pytest

from tests.data.styles import tokenizer_of
from tests.support import make_tokenizer
from trainer.data.chat.encoder import Encoder
from trainer.data.chat.formats import RowReader
from trainer.data.chat.messages import BadRow, Dialogue, PlainText
from trainer.data.chat.templates import dress, row_template, shipped_templates
from trainer.data.data_settings import Format, TrainOn
from trainer.data.sources.row import Row
from trainer.errors import DataError

CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "2 + 3?"},
    {"role": "assistant", "content": "5"},
    {"role": "user", "content": "Sure?"},
    {"role": "assistant", "content": "Yes."},
]
WRITTEN = {
    "plain": "System: Be brief.\nUser: 2 + 3?\nAssistant: 5<|eot|>\nUser: Sure?\nAssistant: Yes.<|eot|>",
    "instruction": "Be brief.\n\n### Task\n2 + 3?\n\n### Answer\n5<|eot|>"
    "\n\n### Task\nSure?\n\n### Answer\nYes.<|eot|>",
}


@pytest.mark.parametrize("name", WRITTEN)
def test_shipped_templates_for_base_models(name):
    tokenizer = make_tokenizer(None)
    dress(tokenizer, name, [])
    ids, is_target = Encoder(tokenizer, TrainOn.assistant).encode(
        Dialogue(CHAT, [m["role"] == "assistant" for m in CHAT])
    )
    assert tokenizer.decode(ids).rstrip("\n") == WRITTEN[name]
    said = tokenizer.decode([i for i, t in zip(ids, is_target, strict=True) if t])
    assert said.split("<|eot|>") == (["5", "Yes.", ""] if name == "instruction" else [" 5", " Yes.", ""])
    with pytest.raises(BadRow, match="has no role tool"):
        Encoder(tokenizer, TrainOn.assistant).render([{"role": "tool", "content": "x"}])


def test_chatml_by_name_equals_the_models_own():
    tokenizer, shipped = tokenizer_of("chatml"), tokenizer_of("qwen3")
    own = tokenizer.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
    before = shipped.chat_template
    try:
        dress(shipped, "chatml", [])
        assert shipped.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True) == own
    finally:
        shipped.chat_template = before


def test_chatml_needs_its_tokens():
    with pytest.raises(DataError) as error:
        dress(make_tokenizer(None), "chatml", [])
    assert "model.new_tokens=['<|im_end|>', '<|im_start|>']" in str(error.value)


def test_a_template_file(tmp_path):
    tokenizer = make_tokenizer(None)
    file = tmp_path / "mine.jinja"
    file.write_text("{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}")
    dress(tokenizer, str(file), [])
    assert tokenizer.apply_chat_template(CHAT[:2], tokenize=False) == "[system]Be brief.[user]2 + 3?"
    file.write_text("{% for m in messages %}\n{{ m.role ")
    with pytest.raises(DataError, match="line 2"):
        dress(tokenizer, str(file), [])
    with pytest.raises(DataError, match=r"no such template or file \(did you mean plain\?\)"):
        dress(tokenizer, "plane", [])
    assert set(WRITTEN) < set(shipped_templates())


def test_no_template_at_all_is_an_error_that_names_the_setting():
    with pytest.raises(BadRow, match=r"data\.chat_template"):
        Encoder(make_tokenizer(None), TrainOn.assistant).encode(Dialogue(CHAT, [False] * 5))


def test_row_templates_write_rows_or_text(tmp_path):
    file = tmp_path / "row.jinja"
    file.write_text('{"instruction": {{ q | tojson }}, "output": {{ row["a b"] | tojson }}}')
    row = Row("f:1", {"q": 'say "hi"', "a b": "hi\n"})
    sample, format = RowReader(Format.auto, row_template=row_template(str(file))).sample(row)
    assert format is Format.alpaca and [m["content"] for m in sample.messages] == ['say "hi"', "hi\n"]
    file.write_text("{{ q }}!")
    assert RowReader(Format.text, row_template=row_template(str(file))).sample(row)[0] == PlainText("", 'say "hi"!')
    with pytest.raises(BadRow, match="data.row_template: not JSON"):
        RowReader(Format.auto, row_template=row_template(str(file))).sample(row)


@pytest.mark.parametrize(
    "template, said",
    [
        ("{{ missing }}", "'missing' is undefined"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{% for i in range(10 ** 9) %}{% endfor %}", "Range too big"),
        ("{{ 1 // 0 }}", "division"),
    ],
)
def test_hostile_row_templates_are_bad_rows(tmp_path, template, said):
    file = tmp_path / "row.jinja"
    file.write_text(template)
    with pytest.raises(BadRow, match=said):
        RowReader(Format.text, row_template=row_template(str(file))).sample(Row("f:1", {"text": "x"}))


def test_a_row_template_with_what_templates_do_not_have_is_refused_before_any_row(tmp_path):
    file = tmp_path / "row.jinja"
    file.write_text("{{ text | random }}")
    with pytest.raises(DataError, match=f"data.row_template={file}, line 1: No filter named 'random'"):
        row_template(str(file))


def test_a_missing_row_template():
    with pytest.raises(DataError, match="there is no such file"):
        row_template("nowhere.jinja")


def test_shipped_templates_with_tools_write_calls_results_and_schemas():
    """What stands in each, told by plain Python from the messages; the assistant's own words are the targets."""
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
    call = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Ulm"}}}
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": "", "tool_calls": [call, call]},
        {"role": "tool", "content": "blue"},
        {"role": "assistant", "content": "Blue."},
    ]
    dialogue = Dialogue(messages, [m["role"] == "assistant" for m in messages], tools)
    written = '{"name": "weather", "arguments": {"city": "Ulm"}}'
    block = f"<tool_call>\n{written}\n</tool_call>"
    for name, end, calls, answer in (
        ("chatml_tools", "<|im_end|>", f"{block}\n{block}", "Blue."),
        ("plain_tools", "<|eot|>", f" Call: {written}\nCall: {written}", " Blue."),
    ):
        tokenizer = tokenizer_of("chatml") if name == "chatml_tools" else make_tokenizer()
        own = tokenizer.chat_template
        try:
            dress(tokenizer, name, [])
            ids, is_target = Encoder(tokenizer, TrainOn.assistant).encode(dialogue)
        finally:
            tokenizer.chat_template = own
        runs = itertools.groupby(zip(ids, is_target, strict=True), key=lambda pair: pair[1])
        said = [tokenizer.decode([i for i, _ in run]) for target, run in runs if target]
        assert said == [f"{calls}{end}", f"{answer}{end}"]
        text = tokenizer.decode(ids)
        assert json.dumps(tools[0]) in text and "Be brief." in text and text.count("blue") == 1
