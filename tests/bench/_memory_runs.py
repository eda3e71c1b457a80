"""Whole runs as a user starts them: predicted, measured by the run itself, and seen from outside.

Every option of every group that memory depends on is in a run of its own, from the registry: a new option is in the
table without being named here.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.bench._memory_rss import ENVIRONMENT
from tests.bench._memory_step import machine, write_section
from trainer.config.shelf import all_options

MIB = 2**20
A = "model.architecture."
SMALL = [
    "model=tiny", "model.weights=random", "device=cpu", "precision=fp32", "optim=adamw", f"{A}vocab_size=4096",
    f"{A}hidden_size=384", f"{A}intermediate_size=1024", f"{A}num_hidden_layers=6", f"{A}num_attention_heads=6",
    f"{A}num_key_value_heads=2", f"{A}head_dim=64", "train.micro_batch_tokens=1024", "train.accumulation_steps=2",
    "train.max_steps=2", "data=quickstart", "data.eval_fraction=0.02",
]  # fmt: skip
LARGE = [*SMALL, f"{A}hidden_size=1024", f"{A}intermediate_size=2816", f"{A}num_attention_heads=16",
         f"{A}vocab_size=16384", "train.accumulation_steps=1"]  # fmt: skip
GROUPS = "quant adapter checkpointing precision optim loss packing offload kernels schedule track engine".split()
WITH = {
    ("adapter", "none"): ["quant=none"],
    ("adapter", "peft"): ["quant=none"],
    ("optim", "adamw_schedule_free"): ["schedule=constant"],
    ("optim", "galore_adamw"): ["adapter=none", "quant=none"],
    ("kernels", "compiled"): ["adapter.fused=false"],
    ("offload", "activations"): ["checkpointing=full"],
    ("checkpointing", "auto"): ["memory.budget_gib=1"],
}
"""What an option needs beside it."""
NEW_TOKENS = "model.new_tokens=['<aa>','<bb>']"
ELSEWHERE = {("loss", "liger"), ("loss", "cut_cross_entropy"), ("kernels", "liger")}
"""Need a GPU."""
MORE = {
    "evaluation longer than training": ["{long}", "loss=full", "packing=none", f"{A}vocab_size=16384"],
    "evaluation longer, chunked loss": ["{long}", "packing=none"],
    "answers at the end": ["train.compare_prompts=2"],
    "two new tokens": [NEW_TOKENS, "quant=none"],
    "two new tokens, untied": [NEW_TOKENS, f"{A}tie_word_embeddings=false"],
    "streamed data": ["data.streaming=true", "data.eval_fraction=0"],
    "no accumulation": ["train.accumulation_steps=1"],
    "padded, no checkpointing": ["packing=none", "checkpointing=none", "train.micro_batch_size=16"],
    "all parameters, no checkpointing": ["adapter=none", "quant=none", "checkpointing=none"],
}
LARGER = {
    "large: NF4": [],
    "large: LoRA, no checkpointing": ["quant=none", "checkpointing=none"],
    "large: all parameters": ["quant=none", "adapter=none"],
    "large: all parameters, full loss": ["quant=none", "adapter=none", "loss=full"],
    "large: full loss, no checkpointing": ["loss=full", "checkpointing=none"],
    "large: int8": ["quant=int8"],
    "large: two new tokens, untied": [NEW_TOKENS, f"{A}tie_word_embeddings=false"],
    "large: all parameters, Muon": ["quant=none", "adapter=none", "optim=muon"],
}


def cases() -> dict[str, list[str]]:
    """Every run by its name."""
    found = {}
    for group in GROUPS:
        for name in all_options()[group]:
            if (group, name) not in ELSEWHERE:
                found[f"{group}={name}"] = [*SMALL, f"{group}={name}", *WITH.get((group, name), [])]
    found |= {name: [*SMALL, *words] for name, words in MORE.items()}
    return found | {name: [*LARGE, *words] for name, words in LARGER.items()}


def anonymous(process: int) -> int:
    """RssAnon of a process, bytes; 0 when it has ended."""
    try:
        text = Path(f"/proc/{process}/status").read_text()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith("RssAnon:")), 0)


def whole_run(words: list[str], folder: Path) -> dict[str, float | str]:
    """Starts `python -m trainer`, watches it, and reads what it wrote. MiB.

    Outside: highest RssAnon less that of the moment when the run opened its metrics, before any weight.
    """
    command = [sys.executable, "-m", "trainer", *words, f"output_dir={folder}"]
    before = peak = 0
    with tempfile.TemporaryFile("w+") as screen:
        process = subprocess.Popen(command, env={**os.environ, **ENVIRONMENT}, stdout=screen, stderr=screen)
        while process.poll() is None:
            now = anonymous(process.pid)
            if not before and (folder / "metrics.jsonl").exists():
                before = now
            peak = max(peak, now)
            time.sleep(0.003)
        screen.seek(0)
        if process.returncode:
            return {"failed": screen.read()[-400:]}
    summary = json.loads((folder / "summary.json").read_text())
    predicted = summary["predicted_peak_memory_gib"]
    return {
        "predicted": float("nan") if predicted is None else predicted * 1024,
        "at": summary["predicted_peak_at"],
        "measured": summary["peak_memory_gib"] * 1024,
        "planned_libraries": (summary["predicted_library_workspace_gib"] or 0) * 1024,
        "libraries": summary["library_workspace_gib"] * 1024,
        "outside": (peak - before) / MIB,
    }


def held_out_rows(file: Path) -> Path:
    """Four dialogues several times as long as those that are trained on."""
    draw = random.Random(0)
    words = "red blue green ball tree house river cat dog sings runs finds sees the a small old".split()
    rows = [
        {"messages": [{"role": "user", "content": "Tell."}, {"role": "assistant", "content": " ".join(said)}]}
        for said in (draw.choices(words, k=220) for _ in range(4))
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def main(words: list[str]) -> None:
    """Runs what is not in the file of earlier rows (`rows=FILE`) yet; words pick runs by what is in their name."""
    kept = next((Path(word.removeprefix("rows=")) for word in words if word.startswith("rows=")), None)
    rows = json.loads(kept.read_text()) if kept is not None and kept.exists() else {}
    wanted = [word for word in words if not word.startswith(("--", "rows="))]
    with tempfile.TemporaryDirectory() as scratch:
        long = f"data.eval_path={held_out_rows(Path(scratch) / 'long.jsonl')}"
        for number, (name, overrides) in enumerate(cases().items()):
            if name in rows or (wanted and not any(word in name for word in wanted)):
                continue
            overrides = [long if word == "{long}" else word for word in overrides]
            rows[name] = whole_run(overrides, Path(scratch) / str(number))
            print(name, rows[name], flush=True)
            if kept is not None:
                kept.write_text(json.dumps(rows, indent=1))
    if "--write" in words:
        write_section("memory runs", table({name: row for name, row in rows.items() if name in cases()}))


def table(rows: dict[str, dict]) -> list[str]:
    """The section of RESULTS.md."""
    done = {name: row for name, row in rows.items() if "failed" not in row}
    errors = {name: row["predicted"] / row["measured"] - 1 for name, row in done.items()}
    sizes = [abs(error) for error in errors.values() if error == error]
    large = [abs(errors[name]) for name, row in done.items() if row["measured"] >= 512]
    lines = [
        "## Memory: whole runs as a user starts them",
        "",
        f"`python -m tests.bench memory runs --write`. {machine()}. `python -m trainer` in a process of its own, with "
        "evaluation, checkpoints and export. Measured: the highest of the run's allocator, with what libraries hold. "
        "Libraries: their share of both, planned by a trial of the model's products and measured as what no tensor "
        "holds at the end. Outside: the process' highest RssAnon less that when the run opens its metrics, before any "
        "weight. Libraries' buffers lie in the part before by then, for the plan has tried them: beside measured less "
        "planned libraries, outside has pages that are touched and free again, and what Python loads and keeps in the "
        "run, a few MiB of any run. MiB.",
        "",
        f"{len(sizes)} of {len(cases())} runs: predicted to measured error mean {statistics.mean(sizes):.1%}, max "
        f"{max(sizes):.1%}; {len(large)} of 512 MiB and more: mean {statistics.mean(large):.1%}, max {max(large):.1%}; "
        f"{len(rows) - len(done)} failed.",
        "",
        "| run | predicted | in | measured | error | libraries: planned | measured | outside |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, row in done.items():
        lines.append(
            f"| {name} | {row['predicted']:.1f} | {row['at']} | {row['measured']:.1f} | {errors[name]:+.1%} | "
            f"{row['planned_libraries']:.1f} | {row['libraries']:.1f} | {row['outside']:.1f} |"
        )
    return lines
