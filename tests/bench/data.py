"""The data path against bare `datasets.map`, and at a million rows. Run: python -m tests.bench data MODEL_FOLDER

Three measurements, each in a process of its own where memory counts:
- packing: a million log-normal lengths, CPU seconds and fill;
- tokenising: rows a CPU second, ours (parse, template, exact mask, tokens, cache) against a bare `datasets.map` that
  does the same template and mask work with the same fast tokenizer and one process;
- memory: a file of a million lines of text through load_tokens, peak resident memory above the libraries;
- streaming: the same file through a stream's steps, one epoch of micro-batches, in the same terms.
"""

from __future__ import annotations

import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from tests.data.batches.test_packing import log_normal
from trainer.data.batches.packing import BestFit

ROWS, REPEATS = 4000, 5
WORDS = "the quick brown fox jumps over a lazy dog while seven wizards quietly mix potent liquid in vast jars".split()


def write_rows(file: Path, count: int, words: int) -> None:
    """`count` chat rows of about `words` words."""
    rng = np.random.default_rng(0)
    with file.open("w") as out:
        for start in range(0, count, 1000):
            lengths = rng.integers(words // 2, 3 * words // 2, size=(min(1000, count - start), 2))
            for i, (asked, answered) in enumerate(lengths.tolist()):
                texts = [" ".join(WORDS[(start + i + k) % len(WORDS)] for k in range(n)) for n in (asked, answered)]
                roles = ("user", "assistant")
                messages = [{"role": r, "content": f"{start + i} {t}"} for r, t in zip(roles, texts, strict=True)]
                out.write(json.dumps({"messages": messages}) + "\n")


def write_text(file: Path, count: int, words: int) -> None:
    """`count` rows of plain text of about `words` words."""
    rng = np.random.default_rng(0)
    with file.open("w") as out:
        for start in range(0, count, 1000):
            for i, n in enumerate(rng.integers(words // 2, 3 * words // 2, size=min(1000, count - start)).tolist()):
                text = " ".join(WORDS[(start + i + k) % len(WORDS)] for k in range(n))
                out.write(json.dumps({"text": f"{start + i} {text}"}) + "\n")


def packing() -> dict[str, float]:
    """A million lengths into rows of 4,096."""
    lengths = log_normal(1_000_000)
    started = time.process_time()
    rows = BestFit(100_000).micro_batches(lengths, SimpleNamespace(micro_batch_tokens=4096), np.random.default_rng(0))
    seconds = time.process_time() - started
    return {"cpu_seconds": seconds, "rows": len(rows), "fill": float(lengths.sum() / (len(rows) * 4096))}


def bare_map(file: Path, tokenizer) -> float:
    """CPU seconds of `datasets.map` from file to tokens and mask: two renders, two tokenisations a row."""
    import datasets

    def encode(row):
        messages = row["messages"]
        text = tokenizer.apply_chat_template(messages, tokenize=False)
        before = tokenizer.apply_chat_template(messages[:-1], tokenize=False, add_generation_prompt=True)
        ids = tokenizer(text, add_special_tokens=False).input_ids
        start = len(tokenizer(before, add_special_tokens=False).input_ids)
        return {"input_ids": ids, "is_target": [False] * start + [True] * (len(ids) - start)}

    with tempfile.TemporaryDirectory() as cache:
        started = time.process_time()
        rows = datasets.load_dataset("json", data_files=str(file), split="train", cache_dir=cache)
        rows.map(encode, remove_columns=rows.column_names)
        return time.process_time() - started


def ours(file: Path, tokenizer) -> float:
    """CPU seconds of load_tokens from file to mapped tokens, with an empty cache."""
    from trainer.config.compose import compose
    from trainer.data.tokens.tokenize import load_tokens

    with tempfile.TemporaryDirectory() as cache:
        words = ["data=file", f"data.path={file}", f"data.cache_dir={cache}", "data.workers=1"]
        data = compose(words).config.data
        started = time.process_time()
        load_tokens(data, data.path, "data.path", tokenizer)
        return time.process_time() - started


def tokenising(model: str) -> dict[str, float]:
    import datasets
    from transformers import AutoTokenizer

    datasets.disable_progress_bars()
    tokenizer = AutoTokenizer.from_pretrained(model)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rows.jsonl"
        write_rows(file, ROWS, 60)
        ours(file, tokenizer), bare_map(file, tokenizer)
        pairs = [(ours(file, tokenizer), bare_map(file, tokenizer)) for _ in range(REPEATS)]
    ratios = sorted(bare / own for own, bare in pairs)
    return {
        "rows_a_cpu_second": ROWS / float(np.median([own for own, _ in pairs])),
        "bare_rows_a_cpu_second": ROWS / float(np.median([bare for _, bare in pairs])),
        "ratio": ratios[REPEATS // 2],
        "ratio_low": ratios[0],
        "ratio_high": ratios[-1],
    }


def resident_peak() -> int:
    """Highest resident memory of this process so far, bytes; pages of mapped files count."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def memory(model: str, file: str) -> dict[str, float]:
    """Peak resident memory of tokenising the file above that of the libraries, GiB; mapped pages count."""
    from transformers import AutoTokenizer

    import trainer.run.train  # noqa: F401  what a run has loaded by then
    from trainer.config.compose import compose
    from trainer.data.tokens.tokenize import load_tokens

    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer("warm up")
    with tempfile.TemporaryDirectory() as cache:
        data = compose(["data=file", f"data.path={file}", f"data.cache_dir={cache}", "data.workers=1"]).config.data
        before = resident_peak()
        started = time.process_time()
        tokens, counts = load_tokens(data, data.path, "data.path", tokenizer)
        seconds = time.process_time() - started
        peak = resident_peak()
        tokens.content_hash()
        return {
            "rows": counts.rows,
            "tokens": counts.tokens,
            "cpu_seconds": seconds,
            "peak_gib_above_libraries": (peak - before) / 2**30,
            "after_reading_all_gib": (resident_peak() - before) / 2**30,
        }


def streaming(model: str, file: str) -> dict[str, float]:
    """Peak resident memory of a streamed epoch above that of the libraries, GiB; it tokenises in this process."""
    from transformers import AutoTokenizer

    import trainer.run.train  # noqa: F401  what a run has loaded by then
    from trainer.config.compose import compose
    from trainer.data.batches.streamed_steps import StreamedSteps
    from trainer.data.tokens.row_stream import RowStream

    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer("warm up")
    words = ["data=file", f"data.path={file}", "data.workers=1", "data.streaming=true", "data.eval_fraction=0"]
    config = compose([*words, "train.max_steps=1000000000"]).config
    before = resident_peak()
    started = time.process_time()
    steps = StreamedSteps(RowStream(config.data, tokenizer, lambda w: None), config.packing, config.train, 0, pin=False)
    tokens, samples, rows, step, opened = 0, 0, 0, 1, time.process_time() - started
    while steps.position(step).epoch == 0:
        batches = steps.step(step)
        rows += len(batches)
        tokens += sum(batch.num_tokens for batch in batches)
        samples += sum(batch.num_samples for batch in batches)
        step += 1
    steps.close()
    return {
        "samples": samples,
        "tokens": tokens,
        "fill": tokens / (rows * config.train.micro_batch_tokens),
        "cpu_seconds_to_the_first_window": opened,
        "cpu_seconds": time.process_time() - started,
        "peak_gib_above_libraries": (resident_peak() - before) / 2**30,
    }


def versions() -> dict[str, str]:
    from importlib import metadata

    names = ("datasets", "pyarrow", "tokenizers", "transformers", "numpy")
    return {"machine": f"{platform.machine()}, {os.cpu_count()} cores", **{n: metadata.version(n) for n in names}}


def main() -> None:
    """Prints the measurements; with one's name and a file, that one alone."""
    model, *alone = sys.argv[1:]
    if alone:
        print(json.dumps({"memory": memory, "streaming": streaming}[alone[0]](model, alone[1])))
        return
    print(json.dumps({"versions": versions(), "packing": packing(), "tokenising": tokenising(model)}, indent=1))
    with tempfile.TemporaryDirectory() as folder:
        million = Path(folder) / "million.jsonl"
        write_text(million, 1_000_000, 8)
        for name in ("memory", "streaming"):
            again = [sys.executable, "-m", "tests.bench", "data", model, name, str(million)]
            done = subprocess.run(again, capture_output=True, text=True, check=True)
            print(json.dumps({name: json.loads(done.stdout)}, indent=1))
