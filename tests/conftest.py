"""Fixtures: a tiny random Llama with its own byte-level tokenizer, and eight chat lines.

Everything is made here, from a seed; nothing is downloaded. Arithmetic is fp32 unless a test says otherwise, so that
results do not depend on which instructions the machine has.
"""

from __future__ import annotations

import gc
import os
import signal
import tempfile
from pathlib import Path

# A shell without job control starts what runs in its background with SIGINT ignored, and a child inherits that.
signal.signal(signal.SIGINT, signal.default_int_handler)
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("OMP_NUM_THREADS", "1")
for name in ("WANDB_API_KEY", "HF_TOKEN", "COLUMNS"):  # xdist sets the last in its workers
    os.environ.pop(name, None)
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["WANDB_MODE"] = "offline"
# Token caches of this process and of those it starts go with it.
_CACHE = tempfile.TemporaryDirectory(prefix="trainer-test-cache-")
os.environ["TRAINER_CACHE"] = _CACHE.name

import pytest  # noqa: E402

from tests.support import TinyModel, chat_rows, make_model, make_tokenizer, write_jsonl  # noqa: E402


@pytest.fixture(scope="session")
def tokenizer():
    return make_tokenizer()


@pytest.fixture(scope="session")
def tiny(tmp_path_factory) -> TinyModel:
    """The untied tiny model."""
    return make_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def tiny_tied(tmp_path_factory) -> TinyModel:
    """The same with tied embeddings."""
    return make_model(tmp_path_factory.mktemp("tied"), tied=True)


@pytest.fixture(scope="session")
def chats(tmp_path_factory) -> Path:
    """Eight chat lines."""
    return write_jsonl(tmp_path_factory.mktemp("data") / "chats.jsonl", chat_rows())


@pytest.fixture
def base_overrides(tiny, chats) -> list[str]:
    """A small, exact run on the tiny model: fp32, unquantised, constant learning rate, nothing held out."""
    return [
        *tiny.overrides(),
        "data=file",
        f"data.path={chats}",
        "data.max_length=128",
        "data.eval_fraction=0",
        "quant=none",
        "precision=fp32",
        "optim=adamw",
        "optim.learning_rate=1e-2",
        "schedule=constant",
        "schedule.warmup_ratio=0",
        "device=cpu",
        "train.micro_batch_tokens=128",
        "train.accumulation_steps=2",
        "train.epochs=2",
        "train.save_every=0",
        "train.report=false",  # half a second that only the tests of the page are about
    ]


def pytest_collection_finish():
    """What the imports made stays to the end: a collection, and every run makes some, need not look at it again."""
    gc.collect()
    gc.freeze()
