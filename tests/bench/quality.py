"""Held-out loss of QLoRA, LoRA and full fine-tuning at equal tokens, with intervals over seeds.

    python -m tests.bench quality [--write]

The quickstart's task on the embedded base. A seed is another adapter, data order and held-out split, so methods are
compared seed by seed: the difference to LoRA on the same seed has an interval (Student's t, 95 %). Each method's
learning rate is the best of three on seed 0. What is quoted as "95 % of full fine-tuning" is here the share of full
fine-tuning's fall in held-out loss that a method reaches.
"""

from __future__ import annotations

import contextlib
import io
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev

from tests.bench._memory_step import machine, write_section

SEEDS = (0, 1, 2)
STUDENT = 4.303
"""Quantile 0.975 of Student's t with two degrees of freedom: three seeds."""
STEPS = 12
COMMON = f"""recipe=quickstart device=cpu precision=fp32 train.max_steps={STEPS} train.accumulation_steps=1
train.micro_batch_tokens=1024 train.save_every=0 train.compare_prompts=0 train.report=false train.log_every=100
memory.probe=never schedule=linear data.eval_fraction=0.2""".split()


@dataclass(frozen=True)
class Method:
    name: str
    words: tuple[str, ...]
    rates: tuple[float, ...]


LORA_RATES, FULL_RATES = (1e-3, 3e-3, 1e-2), (3e-4, 1e-3, 3e-3)
METHODS = [
    Method("LoRA, r=16", ("quant=none", "optim=adamw"), LORA_RATES),
    Method("QLoRA (NF4), r=16", ("quant=nf4", "optim=adamw"), LORA_RATES),
    Method("all parameters", ("quant=none", "adapter=none", "optim=adamw"), FULL_RATES),
    Method("LoRA, r=4", ("quant=none", "optim=adamw", "adapter.r=4", "adapter.alpha=8"), LORA_RATES),
    Method("LoRA, r=64", ("quant=none", "optim=adamw", "adapter.r=64", "adapter.alpha=128"), LORA_RATES),
    Method("all parameters, 8-bit state", ("quant=none", "adapter=none", "optim=adamw_8bit"), FULL_RATES),
]


@dataclass(frozen=True)
class Losses:
    before: float
    after: float


def train(method: Method, rate: float, seed: int) -> Losses:
    from trainer.config.compose import compose
    from trainer.run.train import run_training

    words = [*COMMON, *method.words, f"optim.learning_rate={rate}", f"seed={seed}"]
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        summary = run_training(compose([*words, f"output_dir={folder}/run"]), Path(folder) / "run")
    return Losses(summary["first_eval_loss"], summary["eval_loss"])


def measure(method: Method) -> tuple[float, list[Losses]]:
    """The best rate on the first seed, and the losses of all seeds at it."""
    tried = {rate: train(method, rate, SEEDS[0]) for rate in method.rates}
    best = min(tried, key=lambda rate: tried[rate].after)
    return best, [tried[best], *(train(method, best, seed) for seed in SEEDS[1:])]


def interval(values: list[float]) -> str:
    return f"{fmean(values):.4f} ± {STUDENT * stdev(values) / len(values) ** 0.5:.4f}"


def main() -> None:
    found = {}
    for method in METHODS:
        found[method.name] = measure(method)
        print(method.name, *found[method.name], file=sys.stderr, flush=True)
    reference = found[METHODS[0].name][1]
    full = found["all parameters"][1]
    lines = ["| method | learning rate | held-out loss | less LoRA's, same seed | share of full's fall |"]
    lines.append("|---|---|---|---|---|")
    for name, (rate, losses) in found.items():
        apart = [a.after - b.after for a, b in zip(losses, reference, strict=True)]
        share = fmean((a.before - a.after) / (b.before - b.after) for a, b in zip(losses, full, strict=True))
        cells = [name, f"{rate:g}", interval([a.after for a in losses]), interval(apart), f"{share:.1%}"]
        lines.append(f"| {' | '.join(cells)} |")
    text = f"""## Quality: held-out loss at equal tokens

`python -m tests.bench quality --write`. {machine()}. {STEPS} steps of rows of 1,024 tokens, {len(SEEDS)} seeds, 95 %
intervals; before training {fmean(a.before for a in full):.4f}.

{chr(10).join(lines)}

What this does not show: a large model, long training, or a task that needs what the base does not know. A base of 2 M
parameters on one short task is where small updates do well; three seeds and three rates find large differences only."""
    print(text)
    if "--write" in sys.argv:
        write_section("quality", text.split("\n"))
