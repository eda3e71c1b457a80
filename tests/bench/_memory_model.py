"""A real model on a CPU: predicted and real peak, kept bytes and time of every policy, and auto's budgets."""

from __future__ import annotations

import gc
import statistics
import sys
import time
from dataclasses import dataclass, field, replace

from transformers.utils.logging import disable_progress_bar

from tests.bench._memory_step import Training, live_bytes, machine, peak_of, training, write_section
from trainer.config.compose import compose
from trainer.config.schema import Config
from trainer.device.measure import Memory
from trainer.memory.fit import fit
from trainer.memory.predict.moments import Prediction
from trainer.memory.predict.planner import Planner
from trainer.memory.predict.profile import Shape
from trainer.model.checkpointing import FullCheckpointing, NoCheckpointing
from trainer.units import GIB

MIB = 2**20
SHAPE = Shape((180, 140, 120, 72), 508, packed=True)
"""A row of 512 tokens of four samples."""
ROUNDS = 5
SETTINGS: dict[str, list[str]] = {
    "full": [],
    "none": ["checkpointing=none"],
    "selective": ["checkpointing=selective"],
    "attention": ["checkpointing=attention"],
    "sqrt": ["checkpointing=sqrt"],
    "full, loss=full": ["loss=full"],
    "full, adapter.r=64": ["adapter.r=64"],
}
BUDGETS = {"auto, tight": 0.02, "auto, middle": 0.5, "auto, loose": 1.02}
"""Share of the way from the least to the most that the policies need."""


@dataclass
class Case:
    """One setting and what was seen of it. Bytes and CPU seconds."""

    name: str
    config: Config
    predicted: Prediction
    kept: int
    """predicted to be kept between forward and backward"""
    budget: int | None = None
    real: int = 0
    real_kept: int = 0
    seconds: list[float] = field(default_factory=list)
    made: Training | None = None

    @property
    def timed(self) -> bool:
        """Policies and budgets are; what else differs has another speed for its own reasons."""
        return "," not in self.name or self.budget is not None


def cases(folder: str) -> list[Case]:
    """Every setting, and the three budgets."""
    base = [f"model.path={folder}", "model=smollm2_135m", "data=quickstart", "device=cpu", "precision=fp32",
            "optim=adamw_8bit", "train.accumulation_steps=1"]  # fmt: skip
    found = []
    for name, words in SETTINGS.items():
        config = compose([*base, *words]).config
        planner = Planner(config, shape=SHAPE)
        found.append(Case(name, config, planner.predict(), _kept(planner)))
    config = compose([*base, "checkpointing=auto"]).config
    planner = Planner(config, shape=SHAPE)
    least, most = (planner.predict(policy).peak for policy in (FullCheckpointing(), NoCheckpointing()))
    for name, share in BUDGETS.items():
        budget = round(least + share * (most - least))
        chosen = fit(planner, budget / GIB)
        changed = replace(config, checkpointing=chosen.policy)
        made = Planner(changed, planner.model_config, SHAPE)
        found.append(Case(f"{name}: {chosen.sentence()}", changed, made.predict(), _kept(made), budget))
    return found


def _kept(planner: Planner) -> int:
    """Bytes alive after the forward pass, less those before: what backward needs, and the loss's own."""
    loss = next(m for m in planner.predict().moments if m.name == "loss backward")
    return loss.kept


def measure(case: Case) -> None:
    """Peak of the second step, and bytes that the C allocator holds after a forward pass more than before."""
    gc.collect()
    others = live_bytes()
    case.made = training(case.config, SHAPE)
    case.made.step()
    case.real = peak_of(case.made.step)[0] - others
    memory = Memory(case.made.parts[0].device)
    gc.collect()
    before = memory.read().allocated
    loss = case.made.forward()
    case.real_kept = memory.read().allocated - before
    del loss


def main(words: list[str]) -> None:
    folders = [word for word in words if not word.startswith("--")]
    if len(folders) != 1:
        sys.exit("python -m tests.bench memory model FOLDER [--write]: the folder of a Llama-like model")
    disable_progress_bar()
    found = cases(folders[0])
    for case in found:
        measure(case)
        print(f"{case.name}: predicted {case.predicted.peak / MIB:.0f}, real {case.real / MIB:.0f} MiB", flush=True)
        if not case.timed:
            case.made = None
    timed = [case for case in found if case.timed]
    for number in range(ROUNDS):
        for case in timed if number % 2 == 0 else reversed(timed):
            began = time.process_time()
            case.made.step()
            case.seconds.append(time.process_time() - began)
    lines = report(found)
    print("\n".join(lines))
    if "--write" in words:
        write_section("memory model", lines)


def report(found: list[Case]) -> list[str]:
    """The section's lines."""
    full = found[0]
    rows = []
    for case in found:
        ratios = [mine / theirs for mine, theirs in zip(case.seconds, full.seconds, strict=False)]
        time_words = "| |"
        if ratios:
            time_words = (
                f"{statistics.median(case.seconds):.2f} | {statistics.median(ratios):.2f} "
                f"({min(ratios):.2f} to {max(ratios):.2f}) |"
            )
        budget = "" if case.budget is None else f"{case.budget / MIB:.0f}"
        rows.append(
            f"| {case.name} | {budget} | {case.predicted.peak / MIB:.0f} | {case.real / MIB:.0f} | "
            f"{case.predicted.peak / case.real - 1:+.1%} | {case.kept / MIB:.0f} | {case.real_kept / MIB:.0f} | "
            f"{time_words}"
        )
    errors = [abs(case.predicted.peak / case.real - 1) for case in found]
    return [
        "## Memory of a real model: SmolLM2-135M",
        "",
        f"`python -m tests.bench memory model FOLDER --write`. {machine()}. NF4, LoRA r=16, fp32, 8-bit AdamW, "
        f"a row of {SHAPE.num_tokens} tokens in {len(SHAPE.lengths)} samples. MiB. CPU seconds of a step: median of "
        f"{ROUNDS} interleaved rounds, and to full checkpointing, with the range. Kept: between forward and backward; "
        "real: what the C allocator holds more after a forward pass.",
        "",
        f"{len(found)} settings: error of the peak mean {statistics.mean(errors):.2%}, max {max(errors):.2%}.",
        "",
        "| checkpointing | budget | predicted peak | real peak | error | kept | kept, real | CPU s | to full |",
        "|---|---|---|---|---|---|---|---|---|",
        *rows,
    ]
