"""fitcheck-llm and soup-cli on the same configurations as ours, where they have a word for them.

    TRAINER_PEERS_PYTHON=/path/to/python python -m tests.bench memory peers [--write]

The variable names an interpreter of an own environment with fitcheck-llm and soup-cli; without it nothing is measured.
Logits of every token (loss=full), as both peers count them; checkpointing full or none; LoRA or all parameters.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.bench._memory_cases import BASE, CONFIGURATIONS
from tests.bench._memory_step import machine, real_step, worst_shape, write_section
from trainer.config.compose import compose
from trainer.config.schema import Config
from trainer.memory.predict.planner import Planner
from trainer.memory.predict.profile import Shape
from trainer.model.adapters import LoRA, find_targets
from trainer.model.checkpointing import FullCheckpointing, NoCheckpointing
from trainer.model.quant import FourBit, Int8

VARIABLE = "TRAINER_PEERS_PYTHON"
MIB = 2**20
LARGER = {
    "135 M, bf16, NF4": ["precision=bf16"],
    "135 M, bf16, NF4, none": ["precision=bf16", "checkpointing=none"],
    "135 M, bf16, no quantisation, none": ["precision=bf16", "checkpointing=none", "quant=none"],
}
"""A real model's shape with random weights, a row of 512 tokens."""
LARGE = ["model=smollm2_135m", "model.weights=random", "data=quickstart", "device=cpu", "optim=adamw",
         "train.accumulation_steps=2", "train.micro_batch_tokens=512", "data.max_length=256"]  # fmt: skip


def main(words: list[str]) -> None:
    python = os.environ.get(VARIABLE)
    if python is None:
        print(f"{VARIABLE} is not set: the peers are skipped. Install fitcheck-llm and soup-cli in an environment of "
              "their own and let it name that environment's python.")  # fmt: skip
        return
    named = {name: [*BASE, *changes] for name, changes in CONFIGURATIONS.items()}
    named |= {name: [*LARGE, *changes] for name, changes in LARGER.items()}
    names, cases, ours = [], [], []
    for name, overrides in named.items():
        config = compose([*overrides, "loss=full"]).config
        shape = worst_shape(config)
        planner = Planner(config, shape=shape)
        case = as_peers_say(config, planner, shape)
        if case is None:
            continue
        real, _ = real_step(config, shape)
        names.append(name)
        cases.append(case)
        ours.append((planner.predict().peak, real))
        print(f"{name}: ours {ours[-1][0] / MIB:.1f}, real {real / MIB:.1f} MiB", flush=True)
    child = Path(__file__).with_name("_memory_peers_child.py")
    done = subprocess.run([python, str(child)], input=json.dumps(cases), capture_output=True, text=True, check=True)
    answer = json.loads(done.stdout.splitlines()[-1])
    lines = report(names, ours, answer)
    print("\n".join(lines))
    if "--write" in words:
        write_section("memory peers", lines)


def as_peers_say(config: Config, planner: Planner, shape: Shape) -> dict[str, Any] | None:
    """A configuration in the peers' terms; None where they have no word for it."""
    quant = "nf4" if isinstance(config.quant, FourBit) else "int8" if isinstance(config.quant, Int8) else "none"
    plain = type(config.checkpointing) in (FullCheckpointing, NoCheckpointing)
    if not plain or getattr(config.quant, "code", "nf4") != "nf4" or (quant == "nf4" and not config.quant.double_quant):
        return None
    text = planner.model_config.get_text_config()
    rank, targets = None, []
    if isinstance(config.adapter, LoRA):
        rank = config.adapter.r
        found = find_targets(planner.skeleton, config.adapter.target_modules)
        targets = sorted({name.rpartition(".")[2] for name in found})
    return {
        "model": {
            "num_params": sum(p.numel() for p in planner.skeleton.parameters()),
            "hidden_size": text.hidden_size,
            "num_layers": text.num_hidden_layers,
            "num_attention_heads": text.num_attention_heads,
            "num_kv_heads": text.num_key_value_heads,
            "intermediate_size": text.intermediate_size,
            "vocab_size": text.vocab_size,
            "head_dim": getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads,
            "tie_word_embeddings": text.tie_word_embeddings,
        },
        "precision": "bf16" if planner.dtypes.compute.itemsize == 2 else "fp32",
        "quant": quant,
        "eight_bit": "8bit" in type(config.optim).__name__.lower(),
        "rank": rank,
        "targets": targets,
        "samples": len(shape.lengths),
        "length": max(shape.lengths),
        "checkpointing": isinstance(config.checkpointing, FullCheckpointing),
    }


def report(names: list[str], ours: list[tuple[int, int]], answer: dict[str, Any]) -> list[str]:
    """The section's lines."""
    peers = [name for name, version in answer["versions"].items() if version is not None]
    errors: dict[str, list[float]] = {"ours": [], **{peer: [] for peer in peers}}
    rows = []
    for name, (predicted, real), theirs in zip(names, ours, answer["rows"], strict=True):
        cells = [f"{real / MIB:.1f}"]
        for who, size in [("ours", predicted), *((peer, theirs[peer]) for peer in peers)]:
            errors[who].append(size / real - 1)
            cells.append(f"{size / MIB:.1f} ({size / real - 1:+.0%})")
        rows.append(f"| {name} | {' | '.join(cells)} |")
    summary = "; ".join(
        f"{who} mean {statistics.mean(map(abs, found)):.1%}, max {max(map(abs, found)):.1%}"
        for who, found in errors.items()
    )
    heads = " | ".join(f"{peer} {answer['versions'][peer]}" for peer in peers)
    return [
        "## Memory: other predictors",
        "",
        f"`python -m tests.bench memory peers --write`. {machine()}. The configurations above for which the peers have "
        "words, with logits of every token, as they count them, and three of a 135 M model; without the constants they "
        "add for CUDA. Real: allocator events. MiB. They were made for models of billions on a GPU, and soup-cli "
        "counts 2 bytes a number also in fp32.",
        "",
        f"Absolute error of the peak over {len(names)} configurations: {summary}.",
        "",
        f"| configuration | real | ours | {heads} |",
        f"|---|---|---|{'---|' * len(peers)}",
        *rows,
    ]


if __name__ == "__main__":
    main(sys.argv[1:])
