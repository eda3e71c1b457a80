"""The README's page on memory: which line is the largest, which lever it has, what that brings. Numbers are the plan's.

python -m tests.bench memory tree [--write]
"""

from __future__ import annotations

from pathlib import Path

from trainer.config.compose import compose
from trainer.config.shelf import all_options
from trainer.memory.advice import whatif
from trainer.memory.predict.planner import Planner
from trainer.memory.predict.speed import work
from trainer.model.checkpointing import NoCheckpointing
from trainer.units import GIB

README = Path(__file__).parents[2] / "README.md"
BEGIN, END = "<!-- memory tree: begin (python -m tests.bench memory tree --write) -->", "<!-- memory tree: end -->"
RECIPE = "qlora_llama3_8b"


def tree() -> list[str]:
    """The page's lines."""
    planner = Planner(compose([f"recipe={RECIPE}", "model.weights=random"]).config)
    prediction = planner.predict()
    now = planner.needed(prediction)
    needed = {row.change: row.needed for row in whatif.rows(planner, all_options())}
    again = work(planner, planner.policy) / work(planner, NoCheckpointing()) - 1
    words = ["adapter=none", "quant=none", "optim=adamw"]
    every = Planner(compose([f"recipe={RECIPE}", "model.weights=random", *words]).config)
    half = next(change for change in needed if change.startswith("train.micro_batch_tokens=2048"))
    levers = [
        ("gradients, optimizer state", "`adapter=lora` with `quant=nf4`", every.needed(every.predict()), now,
         "a low-rank update instead of every weight"),
        ("linear weights", "`quant=nf4`", needed["quant=none"], now, "a dequantisation of each weight in each pass"),
        ("kept for backward", "`checkpointing=full`", needed["checkpointing=none"], now, f"{again:.0%} more work"),
        ("kept for backward", "`checkpointing=auto`: only what the budget asks for", needed["checkpointing=none"], None,
         f"0 to {again:.0%} more work"),
        ("loss", "`loss=chunked`", needed["loss=full"], now, "nothing"),
        ("optimizer state", "`optim=paged_adamw_8bit`", needed["optim=adamw"], now, "8-bit moments"),
        ("kept for backward, after full checkpointing", "`offload=activations`", now, needed["offload=activations"],
         "copies to host memory beside the work"),
        ("quantised weights", "`offload=base_cpu`", now, needed["offload=base_cpu"], "the base travels in every pass"),
        ("backward of a block", "half the tokens a micro-batch, twice the accumulation", now, needed[half],
         "shorter samples, more dequantisation"),
    ]  # fmt: skip
    rows = [
        f"| {line} | {lever} | {before / GIB:.1f} | {'budget' if after is None else f'{after / GIB:.1f}'} | {cost} |"
        for line, lever, before, after, cost in levers
    ]
    lines = prediction.lines()
    largest = max(lines, key=lines.get)
    return [
        f"1. `trainer plan recipe=...` names the largest line of the peak. For `{RECIPE}` it is {largest}, "
        f"{lines[largest] / GIB:.2f} of {prediction.peak / GIB:.2f} GiB; {now / GIB:.1f} are needed with CUDA's own.",
        "2. It fits, with room: take back what is not needed, the dearest first. `checkpointing=auto` does so for "
        "recomputation; the plan names the rest. Do not use all at once.",
        "3. It does not fit: pull the lever of the largest line, plan again.",
        "",
        "| largest line | lever | GiB without | GiB with | it costs |",
        "|---|---|---|---|---|",
        *rows,
        "",
        f"GiB that a card needs for `{RECIPE}` (rows of 4,096 tokens), each lever by itself.",
    ]


def main(words: list[str]) -> None:
    text = "\n".join([BEGIN, *tree(), END])
    print(text)
    if "--write" in words:
        old = README.read_text(encoding="utf-8")
        README.write_text(old[: old.index(BEGIN)] + text + old[old.index(END) + len(END) :], encoding="utf-8")
