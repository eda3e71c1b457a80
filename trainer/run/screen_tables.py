"""The table at a run's start (what will run, what it will cost) and the one at its end (what came out)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trainer.config.saved import Run
from trainer.data.data_settings import Data
from trainer.data.tokens.audit import short
from trainer.data.tokens.counts import ASKED_AS
from trainer.device.measure import Memory
from trainer.device.stages import fragmentation, sentence
from trainer.model.fused import modules as fused
from trainer.model.loading import base as load
from trainer.model.loading.hub import other_hub
from trainer.run.build import Ready
from trainer.run.clock import Clock
from trainer.run.prepare import Prepared
from trainer.tracking.console import Screen
from trainer.tracking.trackers import Track
from trainer.units import GIB


def start_table(screen: Screen, run: Run, ready: Ready, run_dir: Path, memory: Memory, tracking: str) -> None:
    """What is about to run."""
    config, prepared, choice = run.config, ready.prepared, run.choices
    steps, train = prepared.steps, prepared.steps.train
    tokens, rows = steps.first_rows()
    if steps.packing.packed:
        fill = sum(int(tokens.lengths[row].sum()) for row in rows) / (len(rows) * train.micro_batch_tokens)
        shape = f"{len(rows)} rows of up to {train.micro_batch_tokens:,} tokens, {fill:.1%} full"
    else:
        shape = f"{len(rows)} padded micro-batches of up to {train.micro_batch_size} samples"
    if config.data.streaming:
        shape, epochs = f"in this window {shape}", "epochs as they come"
    else:
        epochs = f"{steps.position(steps.num_steps).epochs_done:.2f} epochs"
    source = "random weights" if config.model.weights.value == "random" else config.model.path
    dtype = str(prepared.dtypes.compute).removeprefix("torch.")
    paged = " (not paged on a CPU)" if "paged" in choice["optim"] and prepared.device.type == "cpu" else ""
    screen.table(
        f"trainer: {run.config.recipe}",
        [
            ("model", f"{source}, {_count(ready.total_parameters)} parameters, {choice['quant']}"),
            *([("", other)] if (other := load.differences(config.model, prepared.config)) else []),
            (
                "trains",
                f"{choice['adapter']}, {_count(ready.trainable_parameters)} parameters "
                f"({ready.trainable_parameters / ready.total_parameters:.2%})",
            ),
            *[("forward", parts) for parts in (fused.describe(ready.adapted), config.kernels.describe()) if parts],
            (
                "dtypes",
                f"base {dtype}, compute {dtype}, trainable float32, optimizer {choice['optim']}{paged}, loss float32",
            ),
            (
                "device",
                f"{_device_name(prepared.device)}, attention {ready.attention}, checkpointing "
                f"{choice['checkpointing']}",
            ),
            *_data(config.data, prepared),
            ("packing", f"{choice['packing']}: {shape}"),
            (
                "steps",
                f"{steps.num_steps} of {train.accumulation_steps} micro-batches, {epochs}, learning rate "
                f"{config.optim.learning_rate:g} {choice['schedule']}",
            ),
            ("memory", f"{memory.read().allocated / GIB:.2f} GiB held before the first step"),
            ("tracking", tracking),
            *_other_hosts(config.track),
            ("folder", str(run_dir)),
        ],
    )


def _other_hosts(track: Track) -> list[tuple[str, str]]:
    """Who gets tokens and keys, where the environment or a login says another than everybody's."""
    found = {"the hub": other_hub(), "tracking": track.other_host()}
    hosts = [f"{name} at {host}" for name, host in found.items() if host is not None]
    return [("not default", ", ".join(hosts))] if hosts else []


def _data(data: Data, prepared: Prepared) -> list[tuple[str, str]]:
    """The audit in short, source by source, and what is trained on altogether."""
    lines = []
    for i, counts in enumerate(prepared.counts):
        held_out = data.eval_path is not None and i == len(prepared.counts) - 1
        lines += short("held out" if held_out else "data", counts, data.max_length)
    tokens, _ = prepared.steps.first_rows()
    sizes = f"{tokens.num_tokens:,} tokens, {tokens.num_targets:,} targets"
    total = f"{len(tokens):,} samples to train on, {sizes}"
    if data.streaming:
        total = (
            f"streamed: this is the window that it begins with, {len(tokens):,} samples, {sizes}; how much is to come "
            "is not known"
        )
    kept = prepared.held_out
    label = "" if data.eval_path is None else "in all"  # the line before is of the held-out file then
    return [*lines, (label, f"{total}; " + (f"{len(kept):,} held out" if kept is not None else "none held out"))]


def end_table(
    screen: Screen,
    summary: dict[str, Any],
    clock: Clock,
    memory: Memory,
    run_dir: Path,
    tracking: str,
    report: str | None,
) -> None:
    """What came out; `report`: name of the page, where there is one."""
    early = " (stopped early)" if summary["stopped_early"] else ""
    rows = [
        ("steps", f"{summary['steps']}{early}, {summary['num_tokens']:,} tokens"),
        ("training loss", _loss(summary["final_loss"])),
    ]
    if summary["eval_loss"] is not None:
        rows.append(
            (
                "held-out loss",
                f"{_loss(summary['first_eval_loss'])} before, {_loss(summary['eval_loss'])} after, best "
                f"{_loss(summary['best_eval_loss'])}",
            )
        )
    if summary["skipped_steps"]:
        rows.append(("skipped steps", str(summary["skipped_steps"])))
    if summary["outlier_steps"]:
        rows.append(("outliers skipped", f"{summary['outlier_steps']} steps"))
    rows += [
        ("speed", f"{summary['tokens_per_second']:,.0f} tokens/s"),
        (
            "memory",
            f"{summary['peak_memory_gib']:.2f} GiB peak, {_predicted(summary)}",
        ),
        ("", _beside(summary)),
        ("", f"allocated by stage: {sentence(memory.stages)} GiB"),
        ("fragmentation", fragmentation(memory.stages, memory.device.type)),
        ("time to first step", _stages(summary["stages_to_first_step"])),
        ("time", f"{summary['wall_seconds']:.1f} s: {clock.sentence()}"),
        ("result", str(run_dir / summary["adapter"])),
        *([("report", str(run_dir / report))] if report is not None else []),
        ("tracking", tracking),
    ]
    screen.table("done", rows)


def answers_table(screen: Screen, answers: list[dict[str, str]]) -> None:
    """Held-out prompts with what the data, the base and the trained model answer."""
    if not answers:
        return
    names = [name for name in ("prompt", "expected", "base", "trained") if name in answers[0]]
    rows = [tuple(answer[name] for name in names) for answer in answers]
    ways = {answer["asked_as"] for answer in answers}
    title = ", ".join(f"held-out prompts, {ASKED_AS[way]}" for way in sorted(ways))
    screen.columns(title, tuple(names), rows)


def _stages(seconds: dict[str, float] | None) -> str:
    """The sum, and the stages that took a tenth of a second or more."""
    if seconds is None:
        return "-"
    parts = ", ".join(f"{name} {value:.1f} s" for name, value in seconds.items() if value >= 0.1)
    return f"{sum(seconds.values()):.1f} s: {parts}"


def _count(number: int) -> str:
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
        if number >= size:
            return f"{number / size:.2f} {unit}"
    return str(number)


def _loss(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def _device_name(device: Any) -> str:
    import torch

    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU, {torch.get_num_threads()} threads"


def _beside(summary: dict[str, Any]) -> str:
    """What of the peak is no tensor, and what is in no peak."""
    planned, host = summary["predicted_library_workspace_gib"], summary["host_memory_gib"]
    parts = [f"of it {summary['library_workspace_gib']:.2f} GiB workspace of libraries"]
    if planned is not None:
        parts[0] += f", {planned:.2f} predicted"
    if host:
        predicted = summary["predicted_host_memory_gib"]
        parts.append(f"{host:.2f} GiB of host memory" + ("" if predicted is None else f", {predicted:.2f} predicted"))
    return "; ".join([*parts, f"the process as a whole {summary['rss_peak_gib']:.2f} GiB"])


def _predicted(summary: dict[str, Any]) -> str:
    size = summary["predicted_peak_memory_gib"]
    return "no prediction" if size is None else f"{size:.2f} predicted in {summary['predicted_peak_at']}"
