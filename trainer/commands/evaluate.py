"""evaluate: loss and perplexity of a finished run on its held-out rows or any others, its base's beside them."""

from __future__ import annotations

import json
from pathlib import Path

from trainer.atomic import write_atomically
from trainer.commands.arguments import run_argument, whole_number
from trainer.config.saved import with_settings
from trainer.errors import StorageError
from trainer.libraries import loading

ROWS = ("data.path=", "data.sources=")
WHOLE = "data.path=null data.sources=null data.eval_path=null data.eval_fraction=0 data.split=null".split()
WHOLE += "data.format=auto data.streaming=false".split()
"""Rows that are named here are all taken, in whatever form they have; what is said after it wins."""
ARGUMENTS = ("to", "tasks", "tasks_path", "tasks_limit")

HELP = """trainer evaluate run=DIR [data.path=FILE] [data.KEY=VALUE ...] [to=FILE] [tasks=NAME,NAME] [device=cpu]

Token-weighted loss and perplexity of the run's adapter and of its base, source by source, each with a 95 % interval
(bootstrap over samples), and what the adapter gained. Without data.path on the rows that the run held out.

  data.path=FILE   any rows, all of them; data.sources=[{path: a.jsonl}, {path: b.jsonl}] for several. Their form is
                   looked for anew, or data.format= says it; the run's other data settings hold
  to=FILE          instead of DIR/evaluation.json
  tasks=NAME,NAME  benchmarks through lm-evaluation-harness (pip install 'trainer[tasks]'); tasks_path=DIR holds your
                   own, tasks_limit=N takes the first N of each
"""


def run(words: list[str]) -> int:
    settings = [word for word in words if word.startswith("data.")]
    rest = [word for word in words if word not in settings]
    folder, saved, arguments = run_argument(rest, ARGUMENTS)
    limit = whole_number(arguments, "tasks_limit", 1, 0) if "tasks_limit" in arguments else None
    named = any(word.startswith(ROWS) for word in settings)
    saved = with_settings(saved, [*(WHOLE if named else ()), *settings])
    with loading():
        from trainer.export.evaluation import HEADER, evaluate_sources, rows_of
        from trainer.export.reload import load_trained
        from trainer.export.rows import asked_rows
        from trainer.export.tasks import check_harness, run_tasks
        from trainer.tracking.console import Screen, quiet_libraries

    if "tasks" in arguments:
        check_harness(arguments["tasks"])
    screen = Screen()
    quiet_libraries(screen)
    tokens, which = asked_rows(saved.config, folder, named)
    trained = load_trained(saved, folder)
    found = {"sources": evaluate_sources(trained, tokens, which, saved.config.train.micro_batch_tokens, screen)}
    screen.columns(f"loss on {which} rows", HEADER, rows_of(found["sources"]))
    if "tasks" in arguments:
        own = Path(arguments["tasks_path"]) if "tasks_path" in arguments else None
        found["tasks"] = run_tasks(trained, arguments["tasks"].split(","), own, limit)
        rows = [(task, *(f"{one}" for one in who.values())) for task, who in found["tasks"].items()]
        screen.columns("tasks", ("task", "trained", "base")[: len(rows[0])], rows)
    target = Path(arguments.get("to") or folder / "evaluation.json")
    try:
        write_atomically(target, json.dumps({"run": str(folder), "rows": which, **found}, indent=1))
    except OSError as error:
        raise StorageError(f"to={target}: cannot be written: {error.strerror}.") from None
    screen.say(f"written: {target}")
    return 0
