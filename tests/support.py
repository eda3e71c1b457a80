"""What the tests share: makers of models and data, and ways to run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent

LLAMA3_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m.role not in ['system', 'user', 'assistant'] %}{{ raise_exception('unknown role') }}{% endif %}"
    "{{ '<|start|>' + m.role + '<|end|>\n\n' + m.content | trim + '<|eot|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant<|end|>\n\n' }}{% endif %}"
)
CHATML_TEMPLATE = (
    "{% for m in messages %}{{ '<|start|>' + m.role + '\n' + m.content + '<|eot|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant\n' }}{% endif %}"
)

CHATS = [
    ("What is red?", "A ball is red."),
    ("Count to five.", "One, two, three, four, five."),
    ("Say hi", "Hi!"),
    ("Name a day of the week, please.", "Monday"),
    ("Which animal says moo, and which says woof?", "A cow says moo. A dog says woof."),
    ("2 + 3?", "5"),
    ("Who lives in the sea?", "Fish do, and whales, and crabs."),
    ("Good night.", "Sleep well, see you tomorrow."),
]


@dataclass(frozen=True)
class TinyModel:
    """A model folder made for the tests."""

    path: Path

    def overrides(self) -> list[str]:
        return [f"model.path={self.path}"]


def make_tokenizer(template: str = LLAMA3_TEMPLATE):
    """Byte-level, about 300 tokens, with separate pad, bos and end-of-turn tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|pad|>", "<|bos|>", "<|eot|>", "<|start|>", "<|end|>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator([text for chat in CHATS for text in chat], trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<|pad|>", bos_token="<|bos|>", eos_token="<|eot|>"
    )
    fast.add_special_tokens({"extra_special_tokens": ["<|start|>", "<|end|>"]})
    fast.chat_template = template
    return fast


def make_model(folder: Path, tied: bool = False, seed: int = 0, **architecture) -> TinyModel:
    """A random 2-layer Llama (hidden 64, 4 heads, 2 KV heads) saved as an ordinary Hugging Face folder."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = make_tokenizer()
    fields = {
        "vocab_size": len(tokenizer),
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "tie_word_embeddings": tied,
        "initializer_range": 0.1,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        **architecture,
    }
    torch.manual_seed(seed)
    LlamaForCausalLM(LlamaConfig(**fields)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return TinyModel(folder)


def write_jsonl(file: Path, rows: list) -> Path:
    file.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return file


def chat_rows(chats=CHATS) -> list[dict]:
    return [{"messages": [{"role": "user", "content": q}, {"role": "assistant", "content": a}]} for q, a in chats]


def train_here(overrides: list[str], run_dir: Path) -> dict:
    """Trains in this process; returns the summary. Raises TrainerError."""
    from trainer.config.compose import compose
    from trainer.run.train import run_training

    return run_training(compose([*overrides, f"output_dir={run_dir}"]), run_dir)


def slow_but(fast: Collection, values: Iterable) -> list:
    """Values to parametrise with, tuples for several names: a plain run of the tests takes the fast ones alone."""
    import pytest

    slow = [pytest.mark.slow]
    return [
        pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=[] if value in fast else slow)
        for value in values
    ]


def metrics(run_dir: Path, event: str = "train") -> list[dict]:
    """Rows of one event; of several for a step the last wins."""
    from trainer.tracking.metrics import read_metrics

    rows = {row["step"]: row for row in read_metrics(run_dir / "metrics.jsonl") if row["event"] == event}
    return [rows[step] for step in sorted(rows)]


def cli(*words: str, cwd: Path | None = None, timeout: float = 300, env: dict | None = None):
    """`python -m trainer WORDS` in a process of its own, standard input closed."""
    environment = {**os.environ, "PYTHONPATH": str(REPO), **(env or {})}
    return subprocess.run(
        [sys.executable, "-m", "trainer", *words],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout,
        stdin=subprocess.DEVNULL,
    )
