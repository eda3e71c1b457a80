"""Chat template styles, each with its control tokens and an independent renderer in plain Python.

A renderer returns (text, is_target) segments: what the template must write, and which of it the assistant says.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

Segments = list[tuple[str, bool]]


@dataclass(frozen=True)
class Style:
    name: str
    template: str
    special: tuple[str, ...]
    """control tokens; the first is the begin token, the second the end token of the tokenizer"""
    segments: Callable[[list[dict]], Segments]
    system: bool = True
    """whether the template takes a system message"""
    thoughts: bool = False
    """whether answers may begin with <think>"""
    writes_bos: bool = False


def chatml(messages: list[dict]) -> Segments:
    out: Segments = []
    for m in messages:
        out.append((f"<|im_start|>{m['role']}\n", False))
        out.append((m["content"], m["role"] == "assistant"))
        out.append(("<|im_end|>", m["role"] == "assistant"))
        out.append(("\n", False))
    return out


CHATML = """{%- for message in messages %}
{{- '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"""


def llama3(messages: list[dict]) -> Segments:
    out: Segments = [("<|begin_of_text|>", False)]
    for m in messages:
        out.append((f"<|start_header_id|>{m['role']}<|end_header_id|>\n\n", False))
        out.append((m["content"].strip() + "<|eot_id|>", m["role"] == "assistant"))
    return out


LLAMA3 = """{% set loop_messages = messages %}{% for message in loop_messages %}\
{% set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'\
+ message['content'] | trim + '<|eot_id|>' %}{% if loop.index0 == 0 %}{% set content = bos_token + content %}\
{% endif %}{{ content }}{% endfor %}\
{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"""


def mistral(messages: list[dict]) -> Segments:
    system = messages[0]["content"] + "\n\n" if messages[0]["role"] == "system" else ""
    turns = [m for m in messages if m["role"] != "system"]
    last_user = max(i for i, m in enumerate(turns) if m["role"] == "user")
    out: Segments = [("<s>", False)]
    for i, m in enumerate(turns):
        if m["role"] == "user":
            out.append((f"[INST] {system if i == last_user else ''}{m['content']}[/INST]", False))
        else:
            out.append((f" {m['content']}</s>", True))
    return out


MISTRAL = """{%- if messages[0]['role'] == 'system' %}
{%- set system_message = messages[0]['content'] %}{%- set loop_messages = messages[1:] %}
{%- else %}{%- set loop_messages = messages %}{%- endif %}
{{- bos_token }}
{%- for message in loop_messages %}
{%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('roles must alternate user/assistant/user/assistant/...') }}{%- endif %}
{%- if message['role'] == 'user' %}
{%- if loop.index0 == ((loop_messages | length - 1) // 2) * 2 and system_message is defined %}
{{- '[INST] ' + system_message + '\n\n' + message['content'] + '[/INST]' }}
{%- else %}{{- '[INST] ' + message['content'] + '[/INST]' }}{%- endif %}
{%- elif message['role'] == 'assistant' %}{{- ' ' + message['content'] + eos_token }}
{%- else %}{{- raise_exception('only user and assistant roles are supported') }}{%- endif %}
{%- endfor %}"""


def gemma(messages: list[dict]) -> Segments:
    out: Segments = [("<bos>", False)]
    for m in messages:
        answer = m["role"] == "assistant"
        out.append((f"<start_of_turn>{'model' if answer else m['role']}\n", False))
        out.append((m["content"].strip() + "<end_of_turn>", answer))
        out.append(("\n", False))
    return out


GEMMA = """{{ bos_token }}{% if messages[0]['role'] == 'system' %}\
{{ raise_exception('System role not supported') }}{% endif %}{% for message in messages %}\
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}\
{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}\
{% if (message['role'] == 'assistant') %}{% set role = 'model' %}{% else %}{% set role = message['role'] %}{% endif %}\
{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}\
{% if add_generation_prompt %}{{'<start_of_turn>model\n'}}{% endif %}"""


def phi(messages: list[dict]) -> Segments:
    out: Segments = []
    for m in messages:
        out.append((f"<|{m['role']}|>\n", False))
        out.append((m["content"] + "<|end|>", m["role"] == "assistant"))
        out.append(("\n", False))
    return out


PHI = """{% for message in messages %}{% if message['role'] == 'system' %}\
{{'<|system|>\n' + message['content'] + '<|end|>\n'}}{% elif message['role'] == 'user' %}\
{{'<|user|>\n' + message['content'] + '<|end|>\n'}}{% elif message['role'] == 'assistant' %}\
{{'<|assistant|>\n' + message['content'] + '<|end|>\n'}}{% endif %}{% endfor %}\
{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"""


def deepseek(messages: list[dict]) -> Segments:
    out: Segments = [("<｜begin▁of▁sentence｜>", False)]
    out += [(m["content"], False) for m in messages if m["role"] == "system"]
    for m in messages:
        if m["role"] == "user":
            out.append(("<｜User｜>" + m["content"], False))
        elif m["role"] == "assistant":
            out.append(("<｜Assistant｜>", False))
            out.append((m["content"].split("</think>")[-1] + "<｜end▁of▁sentence｜>", True))
    return out


DEEPSEEK = """{% set ns = namespace(system='') %}{%- for message in messages %}\
{%- if message['role'] == 'system' %}{% set ns.system = message['content'] %}{%- endif %}{%- endfor %}\
{{ bos_token }}{{ ns.system }}{%- for message in messages %}\
{%- if message['role'] == 'user' %}{{'<｜User｜>' + message['content']}}{%- endif %}\
{%- if message['role'] == 'assistant' %}{% set content = message['content'] %}\
{% if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}\
{{'<｜Assistant｜>' + content + '<｜end▁of▁sentence｜>'}}{%- endif %}{%- endfor %}\
{% if add_generation_prompt %}{{'<｜Assistant｜><think>\\n'}}{% endif %}"""


def qwen3(messages: list[dict]) -> Segments:
    """Thoughts stay only after the last question; there an answer without thoughts gets empty ones."""
    last_user = max(i for i, m in enumerate(messages) if m["role"] == "user")
    out: Segments = []
    for i, m in enumerate(messages):
        out.append((f"<|im_start|>{m['role']}\n", False))
        answer = m["role"] == "assistant"
        content, thoughts = m["content"], ""
        if answer and "</think>" in content:
            thoughts = content.split("</think>")[0].split("<think>")[-1].strip("\n")
            content = content.split("</think>")[-1].lstrip("\n")
        if answer and i > last_user:
            content = f"<think>\n{thoughts}\n</think>\n\n" + content.lstrip("\n")
        out.append((content + "<|im_end|>", answer))
        out.append(("\n", False))
    return out


QWEN3 = """{%- set ns = namespace(last_query_index=messages|length - 1, searching=true) %}
{%- for message in messages[::-1] %}{%- set index = (messages|length - 1) - loop.index0 %}
{%- if ns.searching and message.role == "user" %}{%- set ns.searching = false %}
{%- set ns.last_query_index = index %}{%- endif %}{%- endfor %}
{%- for message in messages %}{%- set content = message.content %}
{%- if message.role == "assistant" %}{%- set reasoning_content = '' %}
{%- if '</think>' in content %}
{%- set reasoning_content = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}
{%- set content = content.split('</think>')[-1].lstrip('\n') %}{%- endif %}
{%- if loop.index0 > ns.last_query_index %}
{{- '<|im_start|>assistant\n<think>\n' + reasoning_content.strip('\n') + '\n</think>\n\n' + content.lstrip('\n') }}
{%- else %}{{- '<|im_start|>assistant\n' + content }}{%- endif %}{{- '<|im_end|>\n' }}
{%- else %}{{- '<|im_start|>' + message.role + '\n' + content + '<|im_end|>\n' }}{%- endif %}
{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"""

STYLES = {
    style.name: style
    for style in (
        Style("chatml", CHATML, ("<|endoftext|>", "<|im_end|>", "<|im_start|>"), chatml),
        Style(
            "llama3",
            LLAMA3,
            ("<|begin_of_text|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>", "<|end_of_text|>"),
            llama3,
            writes_bos=True,
        ),
        Style("mistral", MISTRAL, ("<s>", "</s>", "[INST]", "[/INST]"), mistral, writes_bos=True),
        Style("gemma", GEMMA, ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"), gemma, False, writes_bos=True),
        Style("phi", PHI, ("<s>", "<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"), phi),
        Style(
            "deepseek",
            DEEPSEEK,
            ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"),
            deepseek,
            thoughts=True,
            writes_bos=True,
        ),
        Style("qwen3", QWEN3, ("<|endoftext|>", "<|im_end|>", "<|im_start|>"), qwen3, thoughts=True),
    )
}

TRAINED_ON = [
    "The quick brown fox jumps over the lazy dog. user assistant system model answer question",
    "\n\n \n  Hello there, how are you today?\n\nI am fine, thank you.",
]


@cache
def tokenizer_of(name: str, adds_bos: bool = False):
    """A byte-level BPE of 400 tokens with the style's control tokens, merges of newlines and spaces among them."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    style = STYLES[name]
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(
                Regex(r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"), "isolated"
            ),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    inner.decoder = decoders.ByteLevel()
    special = ["<|pad|>", *style.special]
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=special,
        show_progress=False,
    )
    inner.train_from_iterator(TRAINED_ON * 8, trainer)
    if style.thoughts:
        inner.add_tokens([AddedToken("<think>", special=False), AddedToken("</think>", special=False)])
    bos, eos = style.special[:2]
    if adds_bos:
        inner.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, inner.token_to_id(bos))]
        )
    fast = PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<|pad|>", bos_token=bos, eos_token=eos)
    fast.add_special_tokens({"extra_special_tokens": list(style.special[2:])})
    fast.chat_template = style.template
    return fast
