"""The plan on the screen."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainer.memory.advice import explain as explanation
from trainer.memory.advice.stack import TOKENS, stack

if TYPE_CHECKING:
    from trainer.memory.advice.report import PlanReport
    from trainer.memory.advice.whatif import Options
    from trainer.memory.predict.moved import OffloadPlan
    from trainer.memory.predict.planner import Planner
    from trainer.tracking.console import Screen


def show(screen: Screen, plan: PlanReport, recipe: str) -> None:
    """All tables."""
    found = plan.prediction
    device, tokens = found.device, sum(found.micro_batch.lengths)
    rows = [(name, f"{size:8.3f} GiB") for name, size in found.lines_gib.items()]
    rows.append(("peak", f"{found.peak_gib:8.3f} GiB, in {found.peak_at}"))
    if device == "cuda":
        rows.append(("needed", f"{found.needed_gib:8.3f} GiB with CUDA's context (0.5) and allocator slack (2 %)"))
    if found.host_gib:
        rows.append(("host memory", f"{found.host_gib:8.3f} GiB beside the device's"))
    screen.table(f"plan: {recipe}, {device}, a micro-batch of {tokens:,} tokens", rows)
    screen.columns(
        "cards",
        ("GiB", "fits", "longest micro-batch, tokens", "limited by"),
        [
            (
                str(c.gib),
                "yes" if c.fits else "no",
                f"{c.longest_micro_batch_tokens:,}" if c.longest_micro_batch_tokens else "none",
                c.limited_by,
            )
            for c in plan.cards
        ],
    )
    screen.columns(
        f"speed by arithmetic, {plan.assumed_efficiency:.0%} of the device's peak assumed",
        ("device", "tokens/s", "at peak"),
        [(name, f"{s.expected:,.0f}", f"{s.roof:,.0f}") for name, s in plan.tokens_per_second.items()],
    )
    if plan.offload is not None:
        _show_offload(screen, plan.offload)
    two_pools = any(row.host_gib for row in plan.changes)
    screen.columns(
        "what if",
        ("change", "needs GiB", "saves GiB", *["host GiB"] * two_pools, "cost"),
        [
            (
                row.change,
                f"{row.needed_gib:.2f}",
                f"{row.saves_gib:+.2f}",
                *[f"{row.host_gib:.2f}" if row.host_gib else "-"] * two_pools,
                row.cost,
            )
            for row in plan.changes
        ],
    )
    for sentence in plan.advice:
        screen.say(sentence)
    if plan.fits is True:
        screen.say(f"yes: {found.needed_gib:.2f} GiB fit a budget of {plan.budget_gib:g} GiB", style="green")
    if plan.fits is False:
        screen.say(f"no: {found.needed_gib:.2f} GiB do not fit a budget of {plan.budget_gib:g} GiB", style="red")
        screen.say(
            f"  the least that works with this model, adapter and data.max_length is {plan.least_gib:.2f} GiB: "
            "every block recomputed, one sample a micro-batch"
        )
        for way in plan.ways_to_fit:
            screen.say(f"  {way.change}: {way.needed_gib:.2f} GiB, {way.cost}")
        together = plan.together
        if together:
            screen.say(f"  together, about {together.needed_gib:.2f} GiB: {' '.join(together.changes)}")
        elif not plan.ways_to_fit:
            screen.say("  no change known here is enough: a smaller model or a larger card")


def _show_offload(screen: Screen, offload: OffloadPlan) -> None:
    """What is moved, and whether the computation hides it."""
    place = "on disk" if offload.on_disk else "in host memory"
    screen.columns(
        f"{offload.elsewhere_gib:.2f} GiB {place}, {offload.moved_gib_a_micro_batch:.2f} GiB moved a micro-batch,"
        f" {offload.moved_gib_a_step:.2f} a step",
        ("device", "link GiB/s, assumed", "moving s", "computing s", "hidden from tokens a micro-batch"),
        [
            (
                name,
                f"{d.gib_per_second:.1f}",
                f"{d.moving_seconds:.2f}",
                f"{d.computing_seconds:.2f}",
                "never" if d.hidden_from_tokens is None else f"{d.hidden_from_tokens:,}",
            )
            for name, d in offload.devices.items()
        ],
    )


def show_explanation(screen: Screen, planner: Planner, options: Options) -> None:
    """The textbook beside this plan, and beside a 70B."""
    screen.columns("textbook and this plan, GiB", ("line", "textbook", "here"), explanation.comparison(planner))
    screen.columns(
        f"a 70B at B=1, T={TOKENS:,}, one technique upon the other, GiB: textbook | here",
        ("technique", "states", "activations", "states", "in the step", "peak"),
        [
            (
                rung.technique,
                f"{rung.book_static:.1f}",
                f"{rung.book_activations:.2f}",
                f"{rung.static:.1f}",
                f"{rung.activations:.2f}",
                f"{rung.peak:.1f}",
            )
            for rung in stack(planner.config, options)
        ],
    )
    for sentence in explanation.CORRECTIONS:
        screen.say(f"- {sentence}")
