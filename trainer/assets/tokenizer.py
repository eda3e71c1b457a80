"""The embedded tokenizer: byte-level BPE over the pretraining set, and the chat template.

Shaped like Llama 3's: plain text is encoded with a leading begin token, the template writes that token
itself, and each turn ends in the token that also ends generation. Padding has its own token, so that
masking it never hides a real end.
"""

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

VOCAB_SIZE = 1152
PAD, BEGIN, END = "<|pad|>", "<|begin|>", "<|end|>"
ROLES = ("system", "user", "assistant")
SPECIAL_TOKENS = [PAD, BEGIN, END, *(f"<|{role}|>" for role in ROLES)]

CHAT_TEMPLATE = """\
{{- bos_token -}}
{%- for message in messages -%}
    {%- if message['role'] not in ['system', 'user', 'assistant'] -%}
        {{- raise_exception("unknown role '" ~ message['role'] ~ "': known are system, user and assistant") -}}
    {%- endif -%}
    {{- '<|' ~ message['role'] ~ '|>' ~ message['content'] ~ eos_token -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|assistant|>' -}}
{%- endif -%}
"""


def texts(corpus_files: list[Path]) -> list[str]:
    """Everything said in the corpus, one string a message."""
    lines = [line for file in corpus_files for line in file.read_text(encoding="utf-8").splitlines()]
    rows = [json.loads(line) for line in lines]
    return [
        said for row in rows for said in ([row["text"]] if "text" in row else [m["content"] for m in row["messages"]])
    ]


def train(corpus_files: list[Path], max_length: int) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    # One token a digit, so that numbers are read and written place by place.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts(corpus_files), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BEGIN} $A", pair=f"{BEGIN} $A {BEGIN} $B", special_tokens=[(BEGIN, tokenizer.token_to_id(BEGIN))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BEGIN,
        eos_token=END,
        pad_token=PAD,
        extra_special_tokens=[f"<|{role}|>" for role in ROLES],
        chat_template=CHAT_TEMPLATE,
        model_max_length=max_length,
        model_input_names=["input_ids", "attention_mask"],
    )
