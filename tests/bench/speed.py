"""Whole runs as a user starts them: this trainer against Trainer + PEFT, TRL and LLaMA-Factory.

    python -m tests.bench speed

TRAINER_SMOLLM2: folder of SmolLM2-135M; without it a random 4-layer model runs. TRAINER_BENCH_DATA: an alpaca-like
json file; without it the embedded orders, whose samples hardly differ in length. TRAINER_PEERS: an interpreter that
has TRL; without it TRL is left out. TRAINER_LLAMAFACTORY: one that has LLaMA-Factory (it pins other versions; beside a
CPU build of torch uninstall torchvision and torchaudio there). TRAINER_BENCH_SAMPLES, _ROW_TOKENS, _STEPS, _ROUNDS:
samples a step (16), tokens of a row (1,280), steps of a run, of which the first does not count (2), rounds (3).
TRAINER_BENCH_THREADS: 1,2. TRAINER_BENCH_POLICIES: full,none. TRAINER_BENCH_CONTESTANTS: which of them, ours first.

Ours is `python -m trainer` with nothing switched off; a peer is a script as its documentation writes one. Rounds are
interleaved, A B C A B C; a ratio is taken within a round, and the median of the rounds' ratios counts. Wall seconds are
worth something on an idle machine only; CPU seconds of all threads stand beside them.
"""

from __future__ import annotations

import itertools
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.bench._memory_step import machine, write_section
from tests.support import REPO

LEARNING_RATE = 1e-4
GIB = 1024**3

CONTESTANTS = {
    "ours": ("this trainer", []),
    "ours_eager": ("this trainer, adapter.fused=false", ["adapter.fused=false"]),
    "trainer_flat": ("Trainer + PEFT, flattened rows", None),
    "trl_fp32": ("TRL SFTTrainer packed, adapters fp32", None),
    "trl": ("TRL SFTTrainer packed, its defaults", None),
    "llamafactory": ("LLaMA-Factory, neat packing", None),
    "trainer_padded": ("Trainer + PEFT, padded 4", None),
    "ours_auto": ("this trainer, checkpointing=auto in the padded peer's memory", ["checkpointing=auto"]),
}
"""Name -> (as printed, our overrides or None for a peer's process)."""
DEFAULT = "ours,trainer_flat,trl_fp32,llamafactory,trainer_padded,ours_auto"
INTERPRETERS = {"trl": "TRAINER_PEERS", "trl_fp32": "TRAINER_PEERS", "llamafactory": "TRAINER_LLAMAFACTORY"}


def setting(name: str, default: str) -> str:
    return os.environ.get(f"TRAINER_BENCH_{name}", default)


def bench_rows(samples: int) -> list[dict]:
    """The first rows of the bench's data."""
    source = os.environ.get("TRAINER_BENCH_DATA")
    if source is not None:
        return json.loads(Path(source).read_text(encoding="utf-8"))[:samples]
    embedded = REPO / "trainer" / "assets" / "data" / "orders.jsonl"
    return [json.loads(line) for line in embedded.read_text(encoding="utf-8").splitlines()[:samples]]


def settings_of(
    model: Path, scratch: Path, policy: str, rows: list[dict], row_tokens: int, steps: int, more: Sequence[str] = ()
) -> dict[str, Any]:
    """What all contestants are told; the samples are tokenised and packed by our own pipeline, once."""
    from trainer.config.compose import compose
    from trainer.run.beginning import Beginning
    from trainer.run.clock import Clock
    from trainer.run.prepare import prepare

    data = scratch / "data.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    overrides = [f"model.path={model}", "data=file", f"data.path={data}", "device=cpu", "precision=fp32", "quant=nf4",
                 "adapter=lora", "adapter.r=16", "adapter.alpha=32", "optim=adamw", "optim.weight_decay=0",
                 f"optim.learning_rate={LEARNING_RATE}", "schedule=constant", "schedule.warmup_ratio=0",
                 "data.eval_fraction=0", f"data.max_length={row_tokens}", f"train.micro_batch_tokens={row_tokens}",
                 "train.accumulation_steps=1000", f"train.max_steps={steps}", "train.log_every=1",
                 f"checkpointing={policy}", *more]  # fmt: skip
    prepared = prepare(compose([*overrides, f"output_dir={scratch / 'plan'}"]), Beginning(scratch), Clock())
    found, packed = [], []
    for batch in prepared.steps.step(1):
        ends = batch.cu_seqlens.tolist()
        packed.append(list(range(len(found), len(found) + len(ends) - 1)))
        for begin, end in itertools.pairwise(ends):
            ids, labels = batch.input_ids[0, begin:end].tolist(), batch.labels[0, begin:end].tolist()
            found.append({"input_ids": ids, "labels": [-100, *labels[:-1]]})  # the peers shift by themselves
    prepared.steps.close()
    return {
        "model": str(model),
        "samples": found,
        "rows": packed,
        "row_tokens": row_tokens,
        "steps": steps,
        "checkpointing": policy,
        "learning_rate": LEARNING_RATE,
        "scratch": str(scratch / "peer"),
        "overrides": overrides,
        "loaded_bytes": sum(prepared.plan.prediction.static.weights.values()) + prepared.plan.prediction.static.adapter,
    }


def run(name: str, settings: dict[str, Any], scratch: Path, threads: int, budget: float | None) -> dict[str, float]:
    """One whole run: wall and CPU seconds of a step after the first, seconds of all else, peak in bytes, losses."""
    ours = CONTESTANTS[name][1]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "PYTHONPATH": str(REPO), "HF_HUB_OFFLINE": "1"}
    with tempfile.TemporaryDirectory(dir=scratch) as folder:
        if ours is None:
            file = Path(folder, "settings.json")
            file.write_text(json.dumps(settings), encoding="utf-8")
            interpreter = os.environ.get(INTERPRETERS.get(name, ""), sys.executable)
            command = [interpreter, "-m", "tests.bench.peers", name, str(file)]
        else:
            more = [] if budget is None else [f"memory.budget_gib={budget}"]
            command = [
                sys.executable,
                "-m",
                "trainer",
                *settings["overrides"],
                *ours,
                *more,
                f"output_dir={folder}/run",
            ]
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run(command, cwd=REPO, env=environment, capture_output=True, text=True)
        if done.returncode != 0:
            raise RuntimeError(f"{name}: code {done.returncode}\n{done.stderr[-2000:]}")
        now = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu = now.ru_utime + now.ru_stime - used.ru_utime - used.ru_stime
        if ours is None:
            rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
            walls, peak = [row["wall"] for row in rows], rows[0]["peak"]
        else:
            lines = Path(folder, "run", "metrics.jsonl").read_text(encoding="utf-8").splitlines()
            rows = [row for row in map(json.loads, lines) if row["event"] == "train"]
            ends = [0.0, *(row["seconds"] for row in rows)]
            walls = [end - begin for begin, end in itertools.pairwise(ends)]
            stages = json.loads(Path(folder, "run", "summary.json").read_text(encoding="utf-8"))["memory_stages_gib"]
            peak = (max(row["memory_peak_gib"] for row in rows) - stages["adapter attached"]["allocated"]) * GIB
    return {
        "wall": statistics.mean(walls[1:]),
        "cpu_all": cpu,
        "peak": peak,
        "first_loss": rows[0]["loss"],
        "last_loss": rows[-1]["loss"],
    }


def compare(settings: dict[str, Any], scratch: Path, names: list[str], rounds: int, threads: int) -> dict[str, Any]:
    """Every contestant's runs under one policy with so many threads."""
    results: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    for _ in range(rounds):
        for name in names:
            budget = None
            if name == "ours_auto":  # what the padded peer took above its loaded model, on top of our loaded model
                budget = (settings["loaded_bytes"] + results["trainer_padded"][-1]["peak"]) / GIB
            results[name].append(run(name, settings, scratch, threads, budget))
            print(threads, settings["checkpointing"], name, json.dumps(results[name][-1]), file=sys.stderr, flush=True)
    tokens = sum(len(sample["input_ids"]) for sample in settings["samples"])
    return {
        "policy": settings["checkpointing"],
        "threads": threads,
        "samples": len(settings["samples"]),
        "lengths": sorted(len(sample["input_ids"]) for sample in settings["samples"]),
        "tokens": tokens,
        "rows": len(settings["rows"]),
        "row_tokens": settings["row_tokens"],
        "fill": tokens / (len(settings["rows"]) * settings["row_tokens"]),
        "results": results,
    }


def table(title: str, found: dict[str, Any]) -> list[str]:
    """The rounds of one policy as lines."""
    results, tokens = found["results"], found["tokens"]
    reference = results[next(iter(results))]
    lines = [
        f"{title}, checkpointing {found['policy']}, {found['threads']} thread(s): {found['samples']} samples of "
        f"{found['lengths'][0]} to {found['lengths'][-1]} tokens, {tokens:,} a step in {found['rows']} rows of "
        f"{found['row_tokens']:,} ({found['fill']:.0%} full), {len(reference)} round(s).",
        "",
        "| contestant | tokens / s, wall | ours is faster (range) | CPU s of the run | peak over model, GiB | losses |",
        "|---|---|---|---|---|---|",
    ]
    for name, runs in results.items():
        ratios = [peer["wall"] / own["wall"] for own, peer in zip(reference, runs, strict=True)]
        speed = tokens / statistics.median(r["wall"] for r in runs)
        cpu = statistics.median(r["cpu_all"] for r in runs)
        lines.append(
            f"| {CONTESTANTS[name][0]} | {speed:.0f} | {statistics.median(ratios):.2f}× ({min(ratios):.2f} to "
            f"{max(ratios):.2f}) | {cpu:.0f} | {max(r['peak'] for r in runs) / GIB:.2f} | "
            f"{runs[0]['first_loss']:.4f} to {runs[0]['last_loss']:.4f} |"
        )
    if "ours_auto" in results:
        pairs = zip(results["ours_auto"], results["trainer_padded"], strict=True)
        ratios = [padded["wall"] / auto["wall"] for auto, padded in pairs]
        lines += ["", f"checkpointing=auto against padded 4: {statistics.median(ratios):.2f} times as fast."]
    return [*lines, ""]


def random_model(folder: Path, **fields: int) -> Path:
    """SmolLM2's shape cut to four layers and a small vocabulary, random, with the embedded tokenizer."""
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    from trainer.resources import resolve

    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(resolve("embedded:tiny"))
    shape = {
        "vocab_size": 8192,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 4,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "max_position_embeddings": 16384,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
    }
    config = LlamaConfig(**{**shape, **fields})
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def main() -> None:
    """Runs all tables and prints them with their JSON; with --write they are kept in RESULTS.md."""
    samples, row_tokens = int(setting("SAMPLES", "16")), int(setting("ROW_TOKENS", "1280"))
    steps, rounds = int(setting("STEPS", "2")), int(setting("ROUNDS", "3"))
    names = [
        n
        for n in setting("CONTESTANTS", DEFAULT).split(",")
        if INTERPRETERS.get(n) is None or INTERPRETERS[n] in os.environ
    ]
    sections, results = [f"`python -m tests.bench speed --write`, {machine()}.", ""], []
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        own = os.environ.get("TRAINER_SMOLLM2")
        title = "Random 4-layer model, NF4, fp32" if own is None else "SmolLM2-135M, NF4, fp32"
        model = random_model(scratch / "model") if own is None else Path(own)
        for policy in setting("POLICIES", "full,none").split(","):
            settings = settings_of(model, scratch, policy, bench_rows(samples), row_tokens, steps)
            for threads in map(int, setting("THREADS", "1,2").split(",")):
                results.append(compare(settings, scratch, names, rounds, threads))
                lines = table(title, results[-1])
                sections += lines
                print("\n".join(lines), flush=True)
    print(json.dumps(results))
    if "--write" in sys.argv:
        write_section("speed", sections)
