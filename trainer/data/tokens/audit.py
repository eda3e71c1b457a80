"""The audit: what a run would train on, before it does. One report, for a screen and as JSON."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from trainer.data.chat.encoder import CONTROL_TOKENS, EARLIER_THOUGHTS, EMPTY_ANSWER, LAST_THOUGHTS, OTHER_PROMPT
from trainer.data.data_settings import Data, training_sources
from trainer.data.tokens.counts import BAD_ROW, LISTED, Counts, over_thresholds
from trainer.data.tokens.gather import Loaded
from trainer.data.tokens.token_sets import Tokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from trainer.data.batches.loader import TrainingSteps
    from trainer.data.batches.streamed_steps import StreamedSteps

VERSION = 1
"""Of the JSON report: a key keeps its name and meaning while this stays."""

NOTABLE = {"dropped_share": 0.05, "truncated_share": 0.05, "duplicate_share": 0.05}
"""Shares above which the audit warns; data.max_*_share decide what stops a run."""

REMARKS = {
    CONTROL_TOKENS: "hold the model's control tokens in their text, which are taken for control tokens",
    EMPTY_ANSWER: "have an empty answer, of which the end token alone is trained on: data.empty_answers=bad_row "
    "leaves them to data.on_bad_row",
    EARLIER_THOUGHTS: "have thoughts in earlier answers that the chat template leaves out, so they are not trained on: "
    "data.train_on=last, one sample a turn, trains each answer with its thoughts",
    LAST_THOUGHTS: "have thoughts that the chat template leaves out of the last answer, so they are not trained on: "
    "choose a template that writes them with data.chat_template",
    OTHER_PROMPT: "have answers that follow another prompt than generation makes, which opens a thought: "
    "data.train_on=last, one sample a turn, with thoughts in each (<think>...</think>)",
}
"""What is remarked of rows, in a user's words, and the way out."""

FEW_TARGETS = 0.05
"""Share of target tokens below which most of the arithmetic is spent on prompts."""

BARS = 40
"""Of the histogram of lengths, at most."""

OPEN, CLOSE = "⟦", "⟧"
"""Around trained text in a shown sample."""


@dataclass(frozen=True)
class Audit:
    """A report and what to say about it."""

    report: dict[str, Any]
    warnings: list[str] = field(default_factory=list)
    stops: list[str] = field(default_factory=list)
    """thresholds that are crossed: a run with these settings would not start"""


def audit(data: Data, loaded: Loaded, steps: TrainingSteps | StreamedSteps, row_tokens: int | None) -> Audit:
    """The audit of loaded data; `row_tokens` is the size of a packed row, None for padded micro-batches.

    Of a stream it is that of the first window: what comes later is not known before it is read.
    """
    sources = training_sources(data)
    counted = loaded.counts[: len(sources)]
    train_set, rows = steps.first_rows()
    tokens = sum(int(train_set.lengths[row].sum()) for row in rows)
    first = {
        "samples": sum(len(row) for row in rows),
        "tokens": tokens,
        "micro_batches": len(rows),
        "fill": tokens / (len(rows) * row_tokens) if row_tokens is not None else None,
    }
    held_out = loaded.held_out
    warnings = [text for counts in loaded.counts for text in _warnings(counts)]
    stops = over_thresholds(data, loaded.counts)
    report = {
        "version": VERSION,
        "settings": {
            "max_length": data.max_length,
            "over_length": data.over_length.value,
            "train_on": data.train_on.value,
            "train_part": data.train_part.value,
            "empty_answers": data.empty_answers.value,
            "on_bad_row": data.on_bad_row.value,
        },
        "sources": [
            {"name": source.name, "weight": source.weight, **_source(counts)}
            for source, counts in zip(sources, counted, strict=True)
        ],
        "evaluation_file": _source(loaded.counts[-1]) if len(loaded.counts) > len(sources) else None,
        "train": _totals(train_set) if not data.streaming else None,
        "held_out": _totals(held_out) if held_out is not None else None,
        "first_epoch": {**first, "steps": steps.steps_in_epoch(0)} if not data.streaming else None,
        "first_window": {**first, "targets": train_set.num_targets} if data.streaming else None,
        "length_histogram": _histogram(train_set.lengths),
        "warnings": warnings,
        "stops": stops,
    }
    return Audit(report, warnings, stops)


def _source(counts: Counts) -> dict[str, Any]:
    return {
        "path": counts.path,
        "format": counts.format,
        "rows": counts.rows,
        "used": counts.used,
        "dropped": {
            reason: {"rows": number, "share": number / counts.rows, "first": _places(counts, reason)}
            for reason, number in counts.dropped.items()
        },
        "dropped_share": counts.dropped_share,
        "passed_over": counts.passed_over,
        "remarks": {what: {"rows": number, "first": counts.examples[what]} for what, number in counts.remarks.items()},
        "overlap": counts.overlap,
        "samples": counts.samples,
        "tokens": counts.tokens,
        "targets": counts.targets,
        "target_share": _part(counts.targets, counts.tokens),
        "lengths": counts.lengths,
        "truncated": counts.truncated,
        "truncated_share": counts.truncated_share,
        "split": counts.split,
        "duplicates": counts.duplicates,
        "duplicate_share": counts.duplicate_share,
        "ended": counts.ended,
        "ended_share": _part(counts.ended, counts.samples),
        "cache": counts.cache,
    }


def _places(counts: Counts, reason: str) -> list[str]:
    return counts.problems() if reason == BAD_ROW else counts.examples.get(reason, [])


def _part(some: int, of_all: int) -> float | None:
    """A share; None of nothing, as a window of a stream may hold of a source."""
    return some / of_all if of_all else None


def _histogram(lengths: np.ndarray) -> dict[str, list[int]]:
    """How many samples are how long, as they are trained on."""
    low, high = int(lengths.min()), int(lengths.max()) + 1
    edges = np.unique(np.linspace(low, high, BARS + 1).astype(int))
    return {"edges": edges.tolist(), "samples": np.histogram(lengths, edges)[0].tolist()}


def _totals(tokens: Tokens) -> dict[str, int]:
    return {"samples": len(tokens), "tokens": tokens.num_tokens, "targets": tokens.num_targets}


def _warnings(counts: Counts) -> list[str]:
    """What a person should look at before training."""
    found = []
    for name, limit in NOTABLE.items():
        share = getattr(counts, name)
        if share > limit:
            found.append(f"{counts.path}: {share:.1%} {name.removesuffix('_share')} (data.max_{name} can stop a run)")
    without_end = counts.samples - counts.ended
    if without_end:
        found.append(
            f"{counts.path}: {without_end:,} samples do not end in an end token ({without_end / counts.samples:.1%}): "
            "they teach the model not to stop there"
        )
    for what, number in counts.remarks.items():
        places = counts.examples[what]
        places = ", ".join(places[:3]) + (", ..." if number > 3 else "")
        found.append(f"{counts.path}: {number:,} rows {REMARKS[what]} ({places})")
    if counts.overlap:
        found.append(
            f"{counts.path}: {counts.overlap:,} of the {counts.samples:,} held-out samples are trained on too: their "
            "loss tells nothing"
        )
    if counts.samples and counts.targets < FEW_TARGETS * counts.tokens:
        found.append(f"{counts.path}: only {counts.targets / counts.tokens:.1%} of the tokens are trained on")
    return found


def short(name: str, counts: Counts, max_length: int) -> list[tuple[str, str]]:
    """The audit of one source in a few rows of a run's first table."""
    if not counts.samples:  # a window of a stream may hold none that was read for it
        return [(name, f"{counts.path}: no rows of it so far")]
    without = counts.dropped["no targets"] + counts.dropped["no targets left after the cut"]
    return [
        (name, f"{counts.path} ({counts.format}): {counts.sentence(max_length)}"),
        (
            "",
            f"{counts.targets / counts.tokens:.1%} of the tokens trained on; {counts.truncated_share:.1%} truncated, "
            f"{counts.duplicate_share:.1%} repeated, {without:,} without targets, {counts.samples - counts.ended:,} "
            "without an end token",
        ),
        *(("passed over", text) for text in _first(counts.passed_over)),
        *(("warning", text) for text in _warnings(counts)),
    ]


def _first(items: list[str]) -> list[str]:
    """A line with the first items and how many more there are, or none."""
    if not items:
        return []
    more = len(items) - LISTED
    return [", ".join(items[:LISTED]) + (f" and {more:,} more" if more > 0 else "")]


def lines(audit: Audit) -> list[tuple[str, str]]:
    """The report as rows of a table."""
    report = audit.report
    rows: list[tuple[str, str]] = []
    held_out = report["held_out"]
    for source in [*report["sources"], *([report["evaluation_file"]] if report["evaluation_file"] else [])]:
        weight = f", weight {source['weight']:g}" if "weight" in source and len(report["sources"]) > 1 else ""
        rows.append(("source", f"{source.get('name', source['path'])} ({source['format']}{weight})"))
        rows.append(("  rows", f"{source['rows']:,} read, {source['used']:,} used"))
        rows += [("  passed over", text) for text in _first(source["passed_over"])]
        if not source["samples"]:
            continue
        for reason, dropped in source["dropped"].items():
            rows.append(("  dropped", f"{dropped['rows']:,} ({dropped['share']:.1%}) {reason}:"))
            rows += [("", f"  {place}") for place in dropped["first"]]
        rows.append(("  samples", f"{source['samples']:,}, of which {source['duplicates']:,} repeat an earlier one"))
        rows.append(
            ("  tokens", f"{source['tokens']:,}, {source['targets']:,} trained on ({source['target_share']:.1%})")
        )
        spread = ", ".join(f"{_quantile(int(q))} {value:,}" for q, value in source["lengths"].items())
        rows.append(("  lengths", f"{spread} (limit {report['settings']['max_length']:,})"))
        rows.append(("  truncated", f"{source['truncated']:,} ({source['truncated_share']:.1%})"))
        rows.append(("  end token", f"{source['ended']:,} samples ({source['ended_share']:.1%})"))
        if source["cache"]:
            rows.append(("  cache", source["cache"]))
    train, first = report["train"], report["first_epoch"] or report["first_window"]
    total = "streamed: not known before it is read; data.streaming=false audits the whole"
    if train is not None:
        total = f"{train['samples']:,} samples, {train['tokens']:,} tokens, {train['targets']:,} targets"
    rows.append(("training", total))
    rows.append(
        ("held out", f"{held_out['samples']:,} samples, {held_out['targets']:,} targets" if held_out else "none")
    )
    fill = f", {first['fill']:.1%} full" if first["fill"] is not None else ""
    packed = (
        f"{first['samples']:,} samples, {first['tokens']:,} tokens in {first['micro_batches']:,} micro-batches{fill}"
    )
    if train is None:
        rows.append(("first window", f"{packed}; {first['targets']:,} targets"))
    else:
        rows.append(("an epoch", f"{packed}; {first['steps']:,} steps"))
    rows += [("warning", text) for text in audit.warnings]
    return rows + [("stops", text) for text in audit.stops]


def _quantile(percent: int) -> str:
    return {0: "shortest", 50: "median", 100: "longest"}.get(percent, f"{percent} %")


@dataclass(frozen=True)
class Shown:
    """A sample to look at: its runs of text, and which of them are trained on."""

    place: str
    tokens: int
    runs: list[tuple[str, bool]]


def shown(tokens: Tokens, count: int, tokenizer: PreTrainedTokenizerBase) -> list[Shown]:
    """Up to `count` samples, spread over the set."""
    picked = np.unique(np.linspace(0, len(tokens) - 1, min(count, len(tokens))).astype(int))
    found = []
    for index in picked.tolist():
        ids, is_target = tokens.sample(index)
        cuts = np.flatnonzero(np.diff(is_target)) + 1
        runs = [
            (tokenizer.decode(part), bool(is_target[start]))
            for start, part in zip([0, *cuts.tolist()], np.split(ids, cuts), strict=True)
        ]
        found.append(Shown(tokens.place(index), len(ids), runs))
    return found


def to_json(audit: Audit, samples: list[Shown]) -> str:
    """data_report.json."""
    examples = [
        {"place": s.place, "tokens": s.tokens, "runs": [{"text": text, "trained": trained} for text, trained in s.runs]}
        for s in samples
    ]
    return json.dumps({**audit.report, "shown": examples}, indent=1, ensure_ascii=False)
