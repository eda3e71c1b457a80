"""Tokens a CPU second and memory of an optimizer step: this trainer against Trainer + PEFT, TRL and LLaMA-Factory.

    python -m tests.bench speed

TRAINER_SMOLLM2: folder of SmolLM2-135M; without it only a random 4-layer model runs. TRAINER_BENCH_DATA: an alpaca-like
json file; without it the embedded orders, whose samples hardly differ in length. TRAINER_PEERS: an interpreter that
has TRL; without it TRL is left out. TRAINER_LLAMAFACTORY: one that has LLaMA-Factory (it pins other versions; beside a
CPU build of torch uninstall torchvision and torchaudio there). TRAINER_BENCH_SAMPLES, TRAINER_BENCH_ROUNDS: samples a
step (8), rounds (5). TRAINER_BENCH_POLICIES: full,none. TRAINER_BENCH_CONTESTANTS: which of them, ours first (all).

Every contestant is a process that takes the same samples through one optimizer step when told to. Rounds are
interleaved, A B C A B C, so that a busy machine hits all alike; a ratio is taken within a round, and the median of
the rounds' ratios counts.
"""

from __future__ import annotations

import itertools
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tests.support import REPO

RESULTS = Path(__file__).with_name("RESULTS.md")
BEGIN, END = "<!-- speed: begin -->", "<!-- speed: end -->"
ROW_TOKENS = 1024
LEARNING_RATE = 1e-4
GIB = 1024**3

CONTESTANTS = {
    "ours": ("this trainer", "ours", []),
    "ours_eager": ("this trainer, adapter.fused=false", "ours", ["adapter.fused=false"]),
    "trainer_flat": ("Trainer + PEFT, flattened rows", "trainer_flat", []),
    "trainer_padded": ("Trainer + PEFT, padded 4", "trainer_padded", []),
    "ours_auto": ("this trainer, checkpointing=auto in the padded peer's memory", "ours", ["checkpointing=auto"]),
    "trl_fp32": ("TRL SFTTrainer packed, adapters fp32", "trl_fp32", []),
    "trl": ("TRL SFTTrainer packed, its defaults", "trl", []),
    "llamafactory": ("LLaMA-Factory, neat packing", "llamafactory", []),
}
"""Name -> (as printed, kind of process, our overrides)."""


@dataclass
class Contestant:
    """A process that takes steps."""

    name: str
    process: subprocess.Popen
    steps: list[dict[str, float]] = field(default_factory=list)

    def read(self) -> dict[str, Any]:
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.name} died: {self.process.stderr_file.read_text()[-2000:]}")
        return json.loads(line)

    def step(self) -> None:
        self.process.stdin.write("go\n")
        self.process.stdin.flush()
        self.steps.append(self.read())
        self.read()  # ready again


def compare(model: Path, scratch: Path, policy: str, names: list[str], samples: int, rounds: int) -> dict[str, Any]:
    """One table's numbers: every contestant's steps under one checkpointing policy."""
    settings = prepare(model, scratch, policy, samples)
    with ExitStack() as stack:
        contestants: list[Contestant] = []
        for name in names:
            if name == "ours_auto":  # what the padded peer took above its loaded model, on top of our loaded model
                padded = next(c for c in contestants if c.name == "trainer_padded")
                budget = (settings["loaded_bytes"] + padded.steps[0]["peak"]) / GIB
                contestants.append(start(stack, name, settings, scratch, [f"memory.budget_gib={budget}"]))
            else:
                contestants.append(start(stack, name, settings, scratch))
            contestants[-1].read()
            contestants[-1].step()  # warms up, makes the optimizer's state, and measures memory
        for _ in range(rounds):
            for contestant in contestants:
                contestant.step()
    tokens = sum(len(s["input_ids"]) for s in settings["samples"])
    reference = contestants[0].steps[1:]
    rows: dict[str, Any] = {}
    for contestant in contestants:
        timed = contestant.steps[1:]
        ratios = [other["cpu_seconds"] / own["cpu_seconds"] for own, other in zip(reference, timed, strict=True)]
        rows[contestant.name] = {
            "tokens_per_cpu_second": tokens / statistics.median(step["cpu_seconds"] for step in timed),
            "ours_times_faster": statistics.median(ratios),
            "ours_times_faster_range": [min(ratios), max(ratios)],
            "peak_gib": contestant.steps[0]["peak"] / GIB,
            "first_loss": contestant.steps[0]["loss"],
            "last_loss": contestant.steps[-1]["loss"],
        }
    if "ours_auto" in rows:
        auto, padded = (next(c for c in contestants if c.name == n) for n in ("ours_auto", "trainer_padded"))
        pairs = zip(auto.steps[1:], padded.steps[1:], strict=True)
        ratios = [other["cpu_seconds"] / own["cpu_seconds"] for own, other in pairs]
        rows["ours_auto"]["times_padded"] = [statistics.median(ratios), min(ratios), max(ratios)]
    fill = tokens / (len(settings["rows"]) * ROW_TOKENS)
    return {"policy": policy, "samples": samples, "tokens": tokens, "fill": fill, "rounds": rounds, "rows": rows}


def prepare(model: Path, scratch: Path, policy: str, num_samples: int) -> dict[str, Any]:
    """What all contestants are told; the samples are tokenised by our own pipeline, once."""
    import torch

    from trainer.config.compose import compose
    from trainer.run.beginning import Beginning
    from trainer.run.clock import Clock
    from trainer.run.prepare import prepare

    torch.set_num_threads(1)
    overrides = [f"model.path={model}", "device=cpu", "precision=fp32", "quant=nf4", "adapter=lora", "adapter.r=16",
                 "adapter.alpha=32", "optim=adamw", f"optim.learning_rate={LEARNING_RATE}", "optim.weight_decay=0",
                 "schedule=constant", "schedule.warmup_ratio=0", f"checkpointing={policy}", "data.eval_fraction=0",
                 f"data.max_length={ROW_TOKENS}", f"train.micro_batch_tokens={ROW_TOKENS}", "train.max_steps=10000",
                 "train.accumulation_steps=1000", f"output_dir={scratch / 'run'}"]  # fmt: skip
    source = os.environ.get("TRAINER_BENCH_DATA")
    if source is not None:
        rows = json.loads(Path(source).read_text(encoding="utf-8"))[:num_samples]
    else:
        embedded = REPO / "trainer" / "assets" / "data" / "orders.jsonl"
        rows = [json.loads(line) for line in embedded.read_text(encoding="utf-8").splitlines()[:num_samples]]
    data = scratch / "data.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    overrides += ["data=file", f"data.path={data}"]
    prepared = prepare(compose(overrides), Beginning(scratch), Clock())
    batches = prepared.steps.step(1)
    samples, packed = [], []
    for batch in batches:
        ends = batch.cu_seqlens.tolist()
        packed.append(list(range(len(samples), len(samples) + len(ends) - 1)))
        for begin, end in itertools.pairwise(ends):
            ids, labels = batch.input_ids[0, begin:end].tolist(), batch.labels[0, begin:end].tolist()
            samples.append({"input_ids": ids, "labels": [-100, *labels[:-1]]})  # the peers shift by themselves
    return {
        "model": str(model),
        "samples": samples,
        "rows": packed,
        "row_tokens": ROW_TOKENS,
        "checkpointing": policy,
        "learning_rate": LEARNING_RATE,
        "scratch": str(scratch / "peer"),
        "overrides": overrides,
        "loaded_bytes": prepared.plan.prediction.static.before_first_step,
    }


def start(
    stack: ExitStack, name: str, settings: dict[str, Any], scratch: Path, more_overrides: Sequence[str] = ()
) -> Contestant:
    """A contestant's process; it is ended with the stack."""
    _, kind, overrides = CONTESTANTS[name]
    overrides = [*overrides, *more_overrides]
    file, errors = scratch / f"{name}.json", scratch / f"{name}.log"
    file.write_text(json.dumps({**settings, "overrides": [*settings["overrides"], *overrides]}), encoding="utf-8")
    interpreter = os.environ[needs(name)] if needs(name) else sys.executable
    process = subprocess.Popen(
        [interpreter, "-m", "tests.bench.peers", kind, str(file)],
        cwd=REPO,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPO), "HF_HUB_OFFLINE": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=stack.enter_context(errors.open("w")),
        text=True,
    )
    process.stderr_file = errors
    stack.callback(process.wait)
    stack.callback(process.stdin.close)
    return Contestant(name, process)


def needs(name: str) -> str | None:
    """The variable that names the interpreter of a contestant that needs one of its own."""
    if name.startswith("trl"):
        return "TRAINER_PEERS"
    return "TRAINER_LLAMAFACTORY" if name == "llamafactory" else None


def random_model(folder: Path) -> Path:
    """SmolLM2's shape cut to four layers and a small vocabulary, random, with the embedded tokenizer."""
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    from trainer.resources import resolve

    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(resolve("embedded:tiny"))
    config = LlamaConfig(
        vocab_size=8192,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=4,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=2048,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def table(title: str, result: dict[str, Any]) -> str:
    lines = [
        f"{title}, checkpointing {result['policy']}: {result['samples']} samples, {result['tokens']} tokens a step, "
        f"rows {result['fill']:.0%} full, {result['rounds']} rounds.",
        "",
        "| contestant | tokens / CPU s | ours is faster (range) | peak above model, GiB | loss, first to last step |",
        "|---|---|---|---|---|",
    ]
    for name, row in result["rows"].items():
        low, high = row["ours_times_faster_range"]
        lines.append(
            f"| {CONTESTANTS[name][0]} | {row['tokens_per_cpu_second']:.0f} | {row['ours_times_faster']:.2f}× "
            f"({low:.2f} to {high:.2f}) | {row['peak_gib']:.2f} | {row['first_loss']:.4f} to {row['last_loss']:.4f} |"
        )
    if "ours_auto" in result["rows"]:
        middle, low, high = result["rows"]["ours_auto"]["times_padded"]
        lines += ["", f"checkpointing=auto against padded 4: {middle:.2f} times as fast ({low:.2f} to {high:.2f})."]
    return "\n".join(lines)


def machine() -> str:
    names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    processor = names[0].split(":", 1)[1].strip() if names else platform.processor()
    packages = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "peft", "bitsandbytes"))
    cores = f"{os.cpu_count()} cores of {processor}, one thread a contestant"
    return f"{cores}; Python {platform.python_version()}, {packages}"


def keep(section: str) -> None:
    """Puts the section between its marks in RESULTS.md; the rest of the file is others'."""
    text = RESULTS.read_text(encoding="utf-8") if RESULTS.exists() else "# Benchmark results\n"
    block = f"{BEGIN}\n{section}\n{END}"
    if BEGIN in text:
        head, rest = text.split(BEGIN)
        text = head + block + rest.split(END)[1]
    else:
        text = text.rstrip() + f"\n\n## Speed\n\n{block}\n"
    RESULTS.write_text(text, encoding="utf-8")


def main() -> None:
    """Runs all tables, prints them with their JSON, and keeps them in RESULTS.md."""
    samples = int(os.environ.get("TRAINER_BENCH_SAMPLES", "8"))
    rounds = int(os.environ.get("TRAINER_BENCH_ROUNDS", "5"))
    policies = os.environ.get("TRAINER_BENCH_POLICIES", "full,none").split(",")
    names = os.environ.get("TRAINER_BENCH_CONTESTANTS", ",".join(CONTESTANTS)).split(",")
    names = [name for name in names if needs(name) is None or needs(name) in os.environ]
    sections, results = [machine() + "."], {}
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        models = {"Random 4-layer model, NF4, fp32": random_model(scratch / "model")}
        if "TRAINER_SMOLLM2" in os.environ:
            models["SmolLM2-135M, NF4, fp32"] = Path(os.environ["TRAINER_SMOLLM2"])
        for title, model in models.items():
            for policy in policies:
                result = compare(model, scratch, policy, names, samples, rounds)
                sections.append(table(title, result))
                results[f"{title}, {policy}"] = result
                print(sections[-1], "\n", flush=True)
    print(json.dumps(results))
    keep("\n\n".join(sections))
