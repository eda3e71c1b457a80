"""Our rendering of chat templates against transformers' own, byte for byte; hostile ones end a run early."""

from __future__ import annotations

import json
import shutil

import pytest

from tests.data.chat.test_sandbox import HOSTILE
from tests.data.styles import STYLES, tokenizer_of
from tests.program import here
from tests.support import chat_rows, make_tokenizer, write_jsonl
from trainer.assets.tokenizer import CHAT_TEMPLATE
from trainer.data.chat.messages import BadRow
from trainer.data.chat.rendering import ChatTemplate
from trainer.data.chat.templates import SHIPPED, shipped_templates
from trainer.errors import ModelError

CHATS = [
    [{"role": "user", "content": "2 + 3?"}],
    [
        {"role": "user", "content": "Grüße\n\t 'x' \"y\" <&> {{ 1 }} 日本"},
        {"role": "assistant", "content": "<think>\nwell\n</think>\n\n5 "},
        {"role": "user", "content": " Sure?\n"},
        {"role": "assistant", "content": "Yes."},
    ],
    [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": ""},
        {"role": "assistant", "content": "  Hi  ", "reasoning_content": "short"},
    ],
]
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
CALLS = [
    {"role": "user", "content": "2 + 3?"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": [1, "ü"]}}}],
    },
    {"role": "tool", "content": "5", "name": "add"},
    {"role": "assistant", "content": "It is 5.", "thinking": "x"},
]
TOOL_STYLE = """{%- macro shown(tool) -%}{{ tool.function.name ~ ': ' }}{{- tool | tojson(indent=2) }}{%- endmacro -%}
{%- set ns = namespace(last=0, parts=[]) -%}
{%- if tools %}{{- '<|start|>tools\n' }}{% for tool in tools %}{{ shown(tool) }}{% endfor %}
{{- '<|eot|>\n' }}{% endif -%}
{%- for m in messages[::-1] %}{% if m.role == 'user' %}{% set ns.last = loop.revindex0 %}{% break %}
{%- endif %}{% endfor %}
{%- for m in messages -%}
{{- '<|start|>' + m.role + (' last' if loop.index0 == ns.last else '') + '\n' -}}
{%- if m.reasoning_content is defined %}{{ '<think>' + m.reasoning_content + m.thinking + '</think>' }}{% endif -%}
{%- generation -%}{{ m.content | trim }}
{%- for call in m.tool_calls or [] %}{{ '%s(%s)' % (call.function.name, call.function.arguments | tojson) }}
{%- for key, value in call.function.arguments | dictsort %}{{ key }}={{ value }},{% endfor %}{% endfor -%}
{%- endgeneration -%}{{- '<|eot|>\n' -}}
{%- set ns.parts = ns.parts + [m.role] -%}
{%- endfor -%}{{ ns.parts | join('/') }}{{ strftime_now('%Y') }}{{ dict(a=1).get('a') }}{{ bos_token }}
{%- if add_generation_prompt %}{{- '<|start|>assistant\n' }}{% endif %}"""

APPENDING_STYLE = """{% set ns = namespace(l=[]) %}{% for m in messages %}
{% if m.get('tools') %}{% set _ = ns.l.append(m) %}
{% endif %}{{ m.role | upper }}: {{ m.content.replace('x', 'y') ~ ns.l }}{% endfor %}"""


TOKENIZERS = {
    **{style: lambda style=style: tokenizer_of(style) for style in STYLES},
    **{
        name: lambda name=name: make_tokenizer((SHIPPED / f"{name}.jinja").read_text().removesuffix("\n"))
        for name in shipped_templates()
    },
    "embedded": lambda: make_tokenizer(CHAT_TEMPLATE),
    "tools": lambda: make_tokenizer(TOOL_STYLE),
    "appends to its tools": lambda: make_tokenizer(APPENDING_STYLE),
}


@pytest.mark.parametrize("name", TOKENIZERS)
def test_the_text_is_transformers_own(name):
    tokenizer = TOKENIZERS[name]()
    ours, compared = ChatTemplate(tokenizer, None), 0
    for chat, tools in [*((chat, None) for chat in CHATS), (CALLS, TOOLS), (CHATS[1], TOOLS)]:
        for asking in (False, True):
            try:
                expected = tokenizer.apply_chat_template(chat, tools, tokenize=False, add_generation_prompt=asking)
            except Exception as error:
                with pytest.raises(BadRow) as refused:
                    ours.renderer(tools)(chat, asking)
                assert str(error) in str(refused.value)
                continue
            assert ours.renderer(tools)(chat, asking) == expected
            compared += 1
    assert compared >= 4


def test_a_tokenizer_with_several_templates_uses_the_one_for_tools():
    tokenizer = make_tokenizer(None)
    tokenizer.chat_template = {"default": "plain", "tool_use": "with tools"}
    ours = ChatTemplate(tokenizer, None)
    assert [ours.renderer(tools)(CALLS) for tools in (None, TOOLS)] == ["plain", "with tools"]


def test_a_broken_template_of_a_model_is_the_models_error():
    with pytest.raises(ModelError, match="line 1: .*Choose another with data.chat_template"):
        ChatTemplate(make_tokenizer("{% for %}"), None).check()
    with pytest.raises(ModelError, match="No filter named 'random'.*Choose another with data.chat_template"):
        ChatTemplate(make_tokenizer("{{ messages | random }}"), None).check()


@pytest.fixture
def hostile(tiny, tmp_path):
    """A model folder whose template runs away."""
    folder = tmp_path / "model"
    shutil.copytree(tiny.path, folder)
    (folder / "chat_template.jinja").write_text(HOSTILE["loops in loops"])
    return folder


def job(model, chats, *more):
    words = [f"model.path={model}", "data=file", f"data.path={chats}", "data.max_length=128", "device=cpu"]
    return [*words, "train.micro_batch_tokens=128", *more]


@pytest.mark.parametrize("command", [["train"], ["data"]], ids=["train", "data"])
def test_a_hostile_model_ends_every_command_before_its_weights(command, hostile, chats, tmp_path, monkeypatch, capsys):
    out = tmp_path / "run"
    monkeypatch.setattr("trainer.run.build.load_base", lambda *_: pytest.fail("weights were read"))
    assert here(*command, *job(hostile, chats), f"output_dir={out}") == 4
    said = capsys.readouterr().err
    assert f"the chat template of {hostile} was stopped" in said and "data.chat_template=" in said
    assert not out.exists()


def test_hostile_templates_of_the_settings_are_data_errors(tiny, chats, tmp_path, capsys):
    file = tmp_path / "mine.jinja"
    for number, (key, name) in enumerate([("chat_template", "text times"), ("row_template", "lists of lists")]):
        file.write_text(HOSTILE[name])
        words = job(tiny.path, chats, f"data.{key}={file}", "data.on_bad_row=skip")
        assert here("data", *words, f"output_dir={tmp_path / str(number)}") == 3
        assert f"data.{key}={file}" in (said := capsys.readouterr().err) and "was stopped" in said


def test_a_template_that_runs_away_on_some_rows_only_ends_tokenising_in_its_processes(tiny, tmp_path, capsys):
    """The trial at the start cannot know; the worker that meets the row stops, and the run with it."""
    file = tmp_path / "mine.jinja"
    file.write_text(
        "{% for m in messages %}{{ m.role + ': ' + m.content }}{% if 'whales' in m.content %}"
        + HOSTILE["loops in loops"]
        + "{% endif %}{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    )
    rows = write_jsonl(tmp_path / "rows.jsonl", chat_rows())
    words = job(tiny.path, rows, f"data.chat_template={file}", "data.workers=2", "data.on_bad_row=skip")
    assert here("data", *words) == 3
    (at,) = [i for i, row in enumerate(chat_rows(), start=1) if "whales" in json.dumps(row)]
    assert f"{rows}:{at}: data.chat_template={file} was stopped" in capsys.readouterr().err


def test_generation_refuses_before_it_reads_weights(tiny, chats, tmp_path, monkeypatch, capsys):
    run = tmp_path / "run"
    words = job(tiny.path, chats, "quant=none", "precision=fp32", "train.max_steps=1", "data.eval_fraction=0")
    assert here(*words, f"output_dir={run}") == 0
    (run / "adapter" / "chat_template.jinja").write_text(HOSTILE["loops in loops"])
    config = json.loads((run / "adapter" / "tokenizer_config.json").read_text())
    assert "chat_template" not in config
    monkeypatch.setattr("trainer.export.reload.load_base", lambda *_: pytest.fail("weights were read"))
    capsys.readouterr()
    assert here("generate", f"run={run}", "prompt=Hello") == 4
    assert "was stopped" in capsys.readouterr().err
