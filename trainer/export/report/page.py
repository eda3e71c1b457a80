"""The page: what is known of a run, or of a sweep's trials, put into the template. All text is escaped there."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from jinja2 import Environment
from markupsafe import Markup

from trainer.atomic import write_atomically
from trainer.config.compose import recipe_differences
from trainer.config.saved import load_run
from trainer.errors import TrainerError, visible
from trainer.export.findings import findings
from trainer.export.report.charts import Chart, Histogram, Line, histogram, line_chart
from trainer.export.report.run_record import RunRecord, is_number
from trainer.tracking.flight_record import read_flight
from trainer.tracking.sweep_folder import RECORD, SweepFolder

REPORT = "report.html"
SMOOTHED = 60
"""Points of a line from which its running median is drawn too."""
Table = list[tuple[Any, ...]]


def write_report(folder: Path) -> Path:
    """Writes report.html into a run folder or a sweep's; returns its path."""
    page = sweep_page(folder) if (folder / RECORD).is_file() else run_page(folder)
    write_atomically(folder / REPORT, page)
    return folder / REPORT


def run_page(folder: Path) -> str:
    """The page of a run, from its folder alone."""
    record = RunRecord.read(folder)
    recipe = record.config.get("recipe") or "custom"
    title = f"{recipe}: {folder.absolute().name}"
    words, differs = _differences(folder)
    return _render(
        title=title,
        status=record.summary.get("status", "not finished"),
        facts=_facts(record),
        findings=findings(record.rows, record.summary, read_flight(folder).norms()),
        charts=[(chart.title, svg) for chart, svg in _charts(record) if svg is not None],
        tables=[
            ("Data", None, _data(record.data)),
            ("Different from the recipe", ("setting", "recipe", "this run"), differs),
            ("What was typed", None, words),
            ("Memory by stage", ("after", "allocated GiB", "at most GiB"), _stages(record.summary)),
            ("Environment", None, _environment(record.manifest)),
        ],
        answers=_answers(record),
        trials=[],
    )


def sweep_page(folder: Path) -> str:
    """The page of a sweep: its trials side by side."""
    trials = sorted(SweepFolder(folder).trials().items())
    records = {number: RunRecord.read(folder / Path(trial.folder).name) for number, trial in trials}
    metrics = {number: trial.metric for number, trial in trials if is_number(trial.metric)}
    best = min(metrics, key=metrics.get) if metrics else None
    charts = []
    for title, event, name in (("Training loss", "train", "loss"), ("Held-out loss", "eval", "eval_loss")):
        lines = [Line(f"trial {number}", *record.series(event, name)) for number, record in records.items()]
        charts.append((title, line_chart(Chart(title, lines), f"sweep-{event}")))
    rows = []
    for number, trial in trials:
        report = f"./{Path(trial.folder).name}/{REPORT}"
        rows.append(
            {
                "number": number,
                "link": report if (folder / report).is_file() else None,
                "words": " ".join(map(str, trial.overrides)),
                "status": trial.status,
                "metric": trial.metric,
                "best": number == best,
                "memory": records[number].summary.get("peak_memory_gib"),
            }
        )
    return _render(
        title=f"sweep: {folder.absolute().name}",
        status=f"{len(trials)} trials",
        facts=[("best trial", "-" if best is None else best), ("its loss", metrics.get(best))],
        findings=[],
        charts=[(title, svg) for title, svg in charts if svg is not None],
        tables=[],
        answers=[],
        trials=rows,
    )


def _render(**values: Any) -> str:
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True, finalize=_shown)
    template = Path(__file__).with_name("page.html.jinja").read_text(encoding="utf-8")
    return environment.from_string(template).render(**values)


def _shown(value: Any) -> Any:
    """A value as the page shows it: numbers in short, and of text nothing that a terminal or a reader obeys."""
    if isinstance(value, Markup):
        return value
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else visible(str(value))


def _facts(record: RunRecord) -> Table:
    summary = record.summary
    names = {
        "steps": "steps",
        "num_tokens": "tokens",
        "final_loss": "training loss",
        "first_eval_loss": "held-out loss before",
        "eval_loss": "held-out loss after",
        "tokens_per_second": "tokens a second",
        "tensor_peak_gib": "peak of tensors, GiB",
        "predicted_peak_memory_gib": "planned, GiB",
        "trainable_parameters": "trained parameters",
        "wall_seconds": "seconds",
    }
    peak, libraries = summary.get("peak_memory_gib"), summary.get("library_workspace_gib")
    if is_number(peak) and is_number(libraries):  # a plan predicts tensors alone
        summary = {**summary, "tensor_peak_gib": max(0.0, peak - libraries)}
    return [(words, summary.get(name)) for name, words in names.items()]


def _charts(record: RunRecord) -> Iterable[tuple[Chart | Histogram, Markup | None]]:
    steps, losses = record.series("train", "loss")
    raw = Line("training", steps, losses, pale=len(losses) > SMOOTHED)
    smooth = [Line("median of 15", steps, _running_median(losses))] if raw.pale else []
    held_out = Line("held out", *record.series("eval", "eval_loss"), dots=True)
    plan, budget = record.plan.get("peak_gib"), record.setting("memory", "budget_gib")
    levels = [
        (f"{name} {size:.3g}", float(size)) for name, size in (("planned", plan), ("budget", budget)) if is_number(size)
    ]
    charts = [
        Chart("Loss a token", [raw, held_out, *smooth]),
        Chart("Learning rate", [_line(record, "learning_rate")]),
        Chart("Gradient norm", [_line(record, "grad_norm")]),
        Chart("Speed, tokens a second", [_line(record, "tokens_per_second")], zero=True),
        Chart("Share of the device's rate", [_line(record, "mfu", "useful arithmetic (MFU)"),
                                             _line(record, "roof_share", "with recomputation")], zero=True),
        Chart("Memory, GiB", [_line(record, "memory_peak_gib", "highest so far"),
                              _line(record, "memory_allocated_gib", "between steps")], levels, zero=True),
    ]  # fmt: skip
    for number, chart in enumerate(charts):
        yield chart, line_chart(chart, f"c{number}")
    lengths = record.data.get("length_histogram")
    limit = record.setting("data", "max_length")
    if isinstance(lengths, dict):
        edges, counts = (
            [value for value in lengths.get(name, []) if is_number(value)] for name in ("edges", "samples")
        )
        bars = Histogram("Lengths of samples", "tokens", edges, counts, limit if is_number(limit) else None)
        yield bars, histogram(bars, "lengths")


def _line(record: RunRecord, name: str, label: str = "") -> Line:
    return Line(label or name, *record.series("train", name))


def _running_median(values: list[float]) -> list[float]:
    ordered = [sorted(values[max(0, i - 7) : i + 8]) for i in range(len(values))]
    return [window[len(window) // 2] for window in ordered]


def _data(data: dict[str, Any]) -> Table:
    """The audit in a few rows."""
    rows: Table = []
    sources = [*(data.get("sources") or []), data.get("evaluation_file")]
    for source in filter(lambda found: isinstance(found, dict), sources):
        rows += [
            ("source", f"{source.get('path')} ({source.get('format')})"),
            ("rows", f"{_shown(source.get('rows'))}, used {_shown(source.get('used'))}"),
            ("samples", f"{_shown(source.get('samples'))}, {_shown(source.get('tokens'))} tokens, "
                        f"{_percent(source.get('target_share'))} trained on"),
            ("truncated, repeated", f"{_percent(source.get('truncated_share'))}, "
                                    f"{_percent(source.get('duplicate_share'))}"),
        ]  # fmt: skip
        for reason, dropped in _pairs(source.get("dropped")):
            if isinstance(dropped, dict):
                first = ", ".join(map(str, (dropped.get("first") or [])[:3]))
                rows.append((f"dropped: {reason}", f"{_shown(dropped.get('rows'))}; {first}"))
    held_out = data.get("held_out")
    if isinstance(held_out, dict):
        rows.append(("held out", f"{_shown(held_out.get('samples'))} samples"))
    return rows + [("warning", text) for text in data.get("warnings") or []]


def _percent(share: Any) -> str:
    return f"{share:.1%}" if is_number(share) else "–"


def _pairs(values: Any) -> list[tuple[str, Any]]:
    return list(values.items()) if isinstance(values, dict) else []


def _differences(folder: Path) -> tuple[Table, Table]:
    """What was typed, and what the configuration has otherwise than its recipe: that, where the recipe is here."""
    try:
        run = load_run(folder)
        if run is None:
            return [], []
        typed: Table = [(key, value) for key, _, value in (word.partition("=") for word in run.overrides)]
        differs = recipe_differences(run)
    except TrainerError as error:
        return [("unknown", str(error))], []
    return typed, [(key, str(old), str(new)) for key, old, new in differs]


def _stages(summary: dict[str, Any]) -> Table:
    stages = _pairs(summary.get("memory_stages_gib"))
    return [(name, stage.get("allocated"), stage.get("peak")) for name, stage in stages if isinstance(stage, dict)]


def _environment(manifest: dict[str, Any]) -> Table:
    names = ("run_id", "model", "model_revision", "weights", "seed", "git_commit", "data_hash", "today")
    rows: Table = [(name.replace("_", " "), str(manifest[name])) for name in names if manifest.get(name) is not None]
    return rows + [(name, str(value)) for key in ("hardware", "versions") for name, value in _pairs(manifest.get(key))]


def _answers(record: RunRecord) -> list[tuple[str, list[tuple[str, Any]]]]:
    """Prompts, each with who answered what: held-out ones at the end, train.samples at each evaluation."""
    found = []
    for answer in record.summary.get("answers") or []:
        if isinstance(answer, dict):
            names = ("expected", "base", "trained")
            found.append((answer.get("prompt"), [(name, answer[name]) for name in names if name in answer]))
    by_prompt: dict[str, list[tuple[str, Any]]] = {}
    for row in record.rows.get("samples", []):
        for answer in filter(lambda found: isinstance(found, dict), row.get("answers") or []):
            by_prompt.setdefault(str(answer.get("prompt")), []).append((f"step {row['step']}", answer.get("answer")))
    return found + [(prompt, _spread(answers)) for prompt, answers in by_prompt.items()]


def _spread(answers: list[tuple[str, Any]], count: int = 4) -> list[tuple[str, Any]]:
    """The first, the last and some between."""
    places = sorted({round(i * (len(answers) - 1) / (count - 1)) for i in range(count)})
    return [answers[place] for place in places]
