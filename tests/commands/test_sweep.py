"""Sweeps: a process and a folder for each trial, one table at the end, and no trial that takes the others with it."""

import csv
import json
import math
import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest
import yaml
from hydra.core.utils import JobReturn, JobStatus
from hydra.experimental.callback import Callback

from tests.program import here
from tests.support import REPO, metrics
from trainer.commands import sweep
from trainer.commands.sweep import _settings, _status, _train, _trial_words, _varied
from trainer.config.compose import Planned, compose
from trainer.tracking.sweep_folder import SweepFolder

RETURNED: list[float] = []


class Returns(Callback):
    """Notes what each job returned to Hydra."""

    def on_job_end(self, config, job_return: JobReturn, **_) -> None:
        assert job_return.status is JobStatus.COMPLETED
        RETURNED.append(job_return.return_value)


@pytest.fixture
def trials(monkeypatch):
    """Stands in for the trials' processes: `trials[seed] = (exit code, summary)`; notes what each was asked to do."""
    outcomes: dict[int, tuple[int, dict]] = {}
    asked: list[list[str]] = []
    decides: list = []

    def train(words: list[str]) -> int:
        asked.append(words)
        config = compose(words).config
        given = outcomes.get(config.seed, (0, {"eval_loss": 1.0}))
        code, summary = decides[0](config) if decides else given
        folder = Path(config.output_dir)
        if summary:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "summary.json").write_text(json.dumps({"status": "completed", "final_loss": 9.0, **summary}))
        return code

    monkeypatch.setattr(sweep, "_train", train)
    return outcomes, asked, decides


def table(out: str) -> list[list[str]]:
    """The rows of the last table, a list of cells a row."""
    lines = out.splitlines()
    start = len(lines) - lines[::-1].index(next(line for line in lines[::-1] if line.startswith("trials")))
    rows = []
    for line in lines[start + 1 :]:
        if not line.startswith(" "):
            break
        rows.append([cell.strip() for cell in line.split("  ") if cell.strip()])
    return rows


def test_a_sweep_ends_with_one_table_and_the_best_marked(trials, tmp_path, capsys):
    outcomes, asked, _ = trials
    outcomes |= {1: (0, {"eval_loss": 2.5}), 2: (0, {"eval_loss": 1.25}), 3: (0, {"eval_loss": 2.0})}
    folder = tmp_path / "s"
    assert here("-m", "seed=1,2,3", "optim=adamw", f"output_dir={folder}") == 0
    out = capsys.readouterr().out
    assert f"sweep of 3 trials in {folder}" in out
    assert [line for line in out.splitlines() if line.startswith("trial ")] == [
        "trial 0: seed=1 (1 of 3)",
        "trial 1: seed=2 (2 of 3)",
        "trial 2: seed=3 (3 of 3)",
    ]
    assert table(out) == [
        ["0", "seed=1", "completed", "2.5000", "0"],
        ["1", "seed=2", "completed", "1.2500", "best", "1"],
        ["2", "seed=3", "completed", "2.0000", "2"],
    ]
    assert "held-out loss" in out and "did not complete" not in out
    fixed = ["optim=adamw", "recipe=quickstart", "memory.over_budget=refuse"]
    assert asked == [[f"seed={n + 1}", *fixed, f"output_dir='{folder}/{n}'"] for n in (0, 1, 2)]
    files = [".lock", "0", "1", "2", "multirun.yaml", "results.csv", "results.json", "sweep.jsonl"]
    assert sorted(p.name for p in folder.iterdir()) == files
    assert "best: trial 1, held-out loss 1.2500, in" in out
    results = json.loads((folder / "results.json").read_text())
    assert results["best"] == results["trials"][1] and results["best"]["metric"] == 1.25
    assert [trial["overrides"][0] for trial in results["trials"]] == ["seed=1", "seed=2", "seed=3"]
    with (folder / "results.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["trial"], row["status"], row["metric"], row["overrides"].split()[0]) for row in rows] == [
        ("0", "completed", "2.5", "seed=1"),
        ("1", "completed", "1.25", "seed=2"),
        ("2", "completed", "2.0", "seed=3"),
    ]


def test_the_metric_goes_to_hydra(trials, tmp_path, capsys):
    """So that any sweeper can use it: held-out loss, training loss without held-out data, NaN where there is none."""
    outcomes, _, _ = trials
    outcomes |= {1: (0, {"eval_loss": 2.5}), 2: (0, {"eval_loss": None}), 3: (3, {}), 4: (0, {"eval_loss": math.nan})}
    RETURNED.clear()
    callback = f"+hydra.callbacks.mine._target_={__name__}.Returns"
    sys.modules.setdefault(__name__, sys.modules[Returns.__module__])
    assert here("-m", "seed=1,2,3,4", f"output_dir={tmp_path / 's'}", callback) == 3
    assert RETURNED[:2] == [2.5, 9.0] and all(map(math.isnan, RETURNED[2:])) and len(RETURNED) == 4


def test_one_trial_does_not_take_the_others_with_it(trials, tmp_path, capsys):
    """C3: one raises, one returns NaN, one is killed, one has no memory: the others complete."""
    outcomes, asked, _ = trials
    outcomes |= {1: (3, {}), 2: (0, {"eval_loss": math.nan}), 3: (128 + signal.SIGKILL, {"eval_loss": 0.1})}
    outcomes[5] = (7, {"eval_loss": None})
    folder = tmp_path / "s"
    command = ["-m", "seed=1,2,3,4,5", f"output_dir={folder}"]
    assert here(*command) == 3, "the code of the first that failed"
    out = capsys.readouterr().out
    assert len(asked) == 5
    assert table(out) == [
        ["0", "seed=1", "failed: data", "-", "0"],
        ["1", "seed=2", "completed", "not finite", "1"],
        ["2", "seed=3", "killed by SIGKILL", "-", "2"],
        ["3", "seed=4", "completed", "1.0000", "best", "3"],
        ["4", "seed=5", "failed: out of memory", "-", "4"],
    ]
    assert f"3 of 5 trials did not complete. The same command with output_dir={folder} runs only these." in out
    rows = SweepFolder(folder).trials()
    assert {n: (t.status, t.exit_code, t.metric) for n, t in rows.items()} == {
        0: ("failed: data", 3, None),
        1: ("completed", 0, None),
        2: ("killed by SIGKILL", 137, None),
        3: ("completed", 0, 1.0),
        4: ("failed: out of memory", 7, None),
    }
    assert rows[3].metric_name == "eval_loss" and rows[3].folder == str(folder / "3")

    outcomes.clear()  # what was wrong has been put right: the same numbers, the same folders
    assert here(*command) == 0
    assert [row[1:3] for row in table(capsys.readouterr().out)] == [[f"seed={n}", "completed"] for n in (1, 2, 3, 4, 5)]
    assert asked[5:] == asked[:5]


def test_an_interrupt_ends_the_sweep_and_says_what_is_left(trials, tmp_path, capsys):
    outcomes, asked, _ = trials
    outcomes |= {1: (3, {}), 2: (143, {})}
    assert here("-m", "seed=1,2,3", f"output_dir={tmp_path / 's'}") == 143
    out = capsys.readouterr().out
    assert [row[1:3] for row in table(out)] == [
        ["seed=1", "failed: data"],
        ["seed=2", "interrupted"],
        ["seed=3", "not run"],
    ]
    assert len(asked) == 2 and "3 of 3 trials did not complete" in out


def test_a_prepared_sweep_is_the_same_without_a_flag(trials, tmp_path, capsys):
    _, asked, _ = trials
    assert here("sweep=learning_rate", "recipe=quickstart", f"output_dir={tmp_path / 's'}") == 0
    assert [words[0] for words in asked] == [f"optim.learning_rate={r}" for r in (5e-05, 0.0001, 0.0002, 0.0004)]
    assert all("sweep=learning_rate" not in words for words in asked), "a trial is no sweep"
    assert [row[1] for row in table(capsys.readouterr().out)] == [words[0] for words in asked]


def test_the_default_folder_is_one_for_the_whole_sweep(trials, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    _, asked, _ = trials
    assert here("-m", "seed=1,2") == 0
    (folder,) = (tmp_path / "outputs/quickstart").iterdir()
    assert [words[-1] for words in asked] == [f"output_dir='outputs/quickstart/{folder.name}/{n}'" for n in (0, 1)]


def foreign(folder: Path) -> str:
    folder.mkdir()
    (folder / "thesis.txt").write_text("mine")
    return "holds other things (thesis.txt) and no sweep"


def a_run(folder: Path) -> str:
    folder.mkdir()
    (folder / "config.yaml").write_text("seed: 1")
    return "holds other things (config.yaml) and no sweep"


def a_file(folder: Path) -> str:
    folder.write_text("mine")
    return "is a file, not a folder"


def another_sweep_at_work(folder: Path) -> str:
    """C4."""
    busy = SweepFolder(folder)
    busy.open()
    busies.append(busy)
    return "another process is running in this folder"


busies: list[SweepFolder] = []


@pytest.mark.parametrize("place", [foreign, a_run, a_file, another_sweep_at_work], ids=lambda place: place.__name__)
def test_a_folder_that_cannot_be_the_sweeps_is_code_5_and_untouched(place, trials, tmp_path, capsys):
    folder = tmp_path / "s"
    said = place(folder)
    before = sorted(tmp_path.rglob("*"))
    assert here("-m", "seed=1,2", f"output_dir={folder}") == 5
    assert said in capsys.readouterr().err
    assert sorted(tmp_path.rglob("*")) == before and trials[1] == []
    while busies:
        busies.pop().close()


@pytest.mark.parametrize(("metric", "best"), [("final_loss", 0), ("peak_memory_gib", 2)])
def test_the_metric_to_minimise_is_a_key(trials, tmp_path, capsys, metric, best):
    values = [(3.0, 1.0, 5.0), (2.0, 4.0, 6.0), (2.5, 3.0, 4.0)]
    names = ("eval_loss", "final_loss", "peak_memory_gib")
    outcomes, _, _ = trials
    outcomes |= {seed: (0, dict(zip(names, v, strict=True))) for seed, v in enumerate(values)}
    assert here("-m", "seed=0,1,2", f"search.metric={metric}", f"output_dir={tmp_path / 's'}") == 0
    results = json.loads((tmp_path / "s/results.json").read_text())
    assert results["best"]["trial"] == best
    assert results["trials"][1]["memory"] == {"peak_memory_gib": 6.0}
    assert here("-m", "seed=0,1", "search.metric=accuracy", f"output_dir={tmp_path / 't'}") == 2
    assert "must be one of auto, eval_loss" in capsys.readouterr().err


def test_a_trial_that_cannot_fit_is_marked_and_not_run(trials, tmp_path, capsys):
    """Refused by its plan: code 7, and no run has begun; one that ran out of memory has a summary."""
    outcomes, _, _ = trials
    outcomes |= {1: (7, {}), 2: (0, {"eval_loss": 1.0})}
    folder = tmp_path / "s"
    assert here("-m", "seed=1,2", f"output_dir={folder}") == 0, "the sweep did all that can be done"
    assert table(capsys.readouterr().out)[0] == ["0", "seed=1", "does not fit", "-", "0"]
    outcomes |= {1: (7, {"eval_loss": None})}
    assert here("-m", "seed=1,2", f"output_dir={folder}") == 7
    assert table(capsys.readouterr().out)[0][2] == "failed: out of memory"


def test_a_search_draws_its_trials_and_the_rerun_does_what_is_missing(trials, tmp_path, capsys):
    """One of six fails; the same command makes that one alone, with the values that it had."""
    _, asked, decides = trials
    folder, failing = tmp_path / "s", [True]

    def outcome(config):
        if failing[0] and len(asked) == 3:
            return 3, {}
        return 0, {"eval_loss": abs(config.optim.learning_rate - 1e-3)}

    command = ["-m", "search=optuna", "search.trials=6", "search.random_trials=3", "search.prune_after=null"]
    command += ["optim.learning_rate=tag(log,interval(1e-5,1e-1))", "adapter.r=4,8", f"output_dir={folder}"]
    decides.append(outcome)
    assert here(*command) == 3
    out = capsys.readouterr().out
    first = SweepFolder(folder).trials()
    assert [t.status for t in first.values()] == ["completed"] * 2 + ["failed: data"] + ["completed"] * 3
    assert "1 of 6 trials did not complete" in out and [row[0] for row in table(out)] == list("012345")
    assert all(not w.startswith("search") for words in asked for w in words), "a trial is no sweep"
    rates = {n: t.overrides for n, t in first.items()}
    assert len({tuple(words) for words in rates.values()}) == 6

    failing[0] = False
    assert here(*command) == 0
    assert len(asked) == 7 and asked[6] == asked[2]
    results = json.loads((folder / "results.json").read_text())
    best = min(results["trials"], key=lambda row: row["metric"])
    assert results["best"] == best and [row["status"] for row in results["trials"]] == ["completed"] * 6


def test_a_mistake_in_a_trial_starts_none(trials, tmp_path, capsys):
    assert here("-m", "optim.learning_rate=1e-4,abc", f"output_dir={tmp_path / 's'}") == 2
    assert "optim.learning_rate=abc: must be a number" in capsys.readouterr().err
    assert here("-m", "device=cpu,cuda", "train.micro_batch_tokens=8", f"output_dir={tmp_path / 's'}") == 2
    assert trials[1] == [] and list(tmp_path.iterdir()) == []


def test_a_trials_words():
    words = ["optim.eps=1", "sweep=learning_rate", "+model.architecture.a=1", "output_dir=s", "++output_dir=t"]
    kept, words = ["optim.eps=1", "+model.architecture.a=1"], [*words, "search=optuna", "search.trials=3"]
    place, own = "output_dir='my s/3'", "memory.over_budget=run"
    assert _trial_words(words, Path("my s") / "3") == [*kept, "memory.over_budget=refuse", place]
    assert _trial_words([*words, own], Path("my s") / "3") == [*kept, own, place]


def test_settings_are_what_differs():
    def settings(*trials):
        planned = Planned(None, None, [], [*trials], None, len(trials), False)
        return [_settings(words, _varied(planned)) for words in trials]

    assert settings(["a=1", "b=2", "c=3"], ["a=1", "b=4", "c=3"]) == ["b=2", "b=4"]
    assert settings(["a=1", "b=2"]) == ["a=1 b=2"]


@pytest.mark.parametrize(
    ("code", "status"),
    [
        (0, "completed"),
        (1, "failed: a bug"),
        (2, "failed: configuration"),
        (3, "failed: data"),
        (4, "failed: model"),
        (5, "failed: checkpoint or disk"),
        (6, "failed: training became non-finite"),
        (7, "failed: out of memory"),
        (130, "interrupted"),
        (143, "interrupted"),
        (137, "killed by SIGKILL"),
        (139, "killed by SIGSEGV"),
    ],
)
def test_a_code_in_words(code, status):
    assert _status(code) == status


# The process of a trial

PROGRAM = """
import json, os, signal, sys, time
here = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
facts = {"argv": sys.argv[1:], "pid": os.getpid(), "group": os.getpgid(0), "stdin": sys.stdin.read()}
signals = []
for signum in (signal.SIGINT, signal.SIGTERM):
    signal.signal(signum, lambda signum, frame: signals.append(signum))
with open(here + "/facts.json", "w") as file:
    json.dump(facts, file)
what = sys.argv[2]
if what == "wait=true":
    while not signals:
        time.sleep(0.01)
    time.sleep(0.2)
    print("saved", signals, file=open(here + "/saved", "w"))
    sys.exit(128 + signals[0])
if what == "die=true":
    os.kill(os.getpid(), signal.SIGKILL)
sys.exit(int(what.partition("=")[2]))
"""


@pytest.fixture
def program(tmp_path, monkeypatch):
    """A stand-in for the trainer: it says who it is, and ends as its first word tells."""
    package = tmp_path / "trainer"
    package.mkdir()
    (package / "__init__.py").touch()  # a folder without it would give way to an installed trainer
    (package / "__main__.py").write_text(PROGRAM)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return lambda: json.loads((tmp_path / "facts.json").read_text())


def test_a_trial_has_a_process_and_a_group_of_its_own_and_nothing_to_read(program):
    assert _train(["code=0", "a='b c'"]) == 0
    facts = program()
    assert facts["argv"] == ["train", "code=0", "a='b c'"]
    assert facts["pid"] != os.getpid() and facts["group"] == facts["pid"] and facts["stdin"] == ""


@pytest.mark.parametrize(("word", "code"), [("code=3", 3), ("die=true", 137)])
def test_how_it_ended_is_its_code(program, word, code):
    assert _train([word]) == code


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM], ids=["SIGINT", "SIGTERM"])
def test_a_signal_is_passed_on_once_and_waited_for(program, tmp_path, signum):
    """It has all the time it needs to save; then the sweep's own handlers are back."""
    handlers = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)

    def send():
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            if (tmp_path / "facts.json").exists():
                os.kill(os.getpid(), signum)
                return
            time.sleep(0.01)

    thread = threading.Thread(target=send)
    thread.start()
    assert _train(["wait=true"]) == 128 + signum
    thread.join()
    assert (tmp_path / "saved").read_text() == f"saved [{int(signum)}]\n"
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == handlers


# The whole of it, with real trials


@pytest.fixture
def children(monkeypatch):
    """Trials as they are, with their process ids noted; `children.at[trial] = f` calls f(process) once it is there."""
    monkeypatch.setenv("PYTHONPATH", str(REPO))
    real = sweep.subprocess.Popen
    seen: list[int] = []
    at: dict[int, object] = {}

    def popen(*args, **kwargs):
        process = real(*args, **kwargs)
        seen.append(process.pid)
        if len(seen) - 1 in at:
            threading.Thread(target=at[len(seen) - 1], args=(process,)).start()
        return process

    monkeypatch.setattr(sweep.subprocess, "Popen", popen)
    return seen, at


@pytest.mark.slow
def test_the_learning_rate_sweep_on_the_tiny_model(base_overrides, children, tmp_path, capfd):
    """Four processes, four folders, four summaries; the table and Hydra's metric say what the summaries say."""
    folder = tmp_path / "s"
    words = [w for w in base_overrides if not w.startswith("optim.learning_rate")]
    words += ["data.eval_fraction=0.25", "train.max_steps=2", "sweep=learning_rate", f"output_dir={folder}"]
    assert here(*words) == 0
    out = capfd.readouterr().out
    pids = children[0]
    assert len(set(pids)) == 4 and os.getpid() not in pids
    summaries = [json.loads((folder / str(n) / "summary.json").read_text()) for n in range(4)]
    configs = [yaml.safe_load((folder / str(n) / "config.yaml").read_text()) for n in range(4)]
    assert [s["status"] for s in summaries] == ["completed"] * 4
    assert [c["optim"]["learning_rate"] for c in configs] == [5e-5, 1e-4, 2e-4, 4e-4]
    losses = [s["eval_loss"] for s in summaries]
    assert len(set(losses)) == 4
    assert [t.metric for t in SweepFolder(folder).trials().values()] == losses
    best = losses.index(min(losses))
    assert [row[3] for row in table(out)] == [f"{loss:.4f}" for loss in losses]
    assert [n for n, row in enumerate(table(out)) if "best" in row] == [best]
    fresh = {json.loads((folder / str(n) / "manifest.json").read_text())["fresh_adapter_hash"] for n in range(4)}
    assert len(fresh) == 1, "every trial starts from the seed's adapter"


@pytest.mark.slow
def test_a_sweep_with_a_bad_a_diverging_and_a_killed_trial_and_the_rerun(base_overrides, children, tmp_path, capfd):
    """C3 with real processes: bad data, a gradient that is never finite, kill -9 in a step; then the same command."""
    seen, at = children
    folder, late = tmp_path / "s", tmp_path / "late.jsonl"
    good = next(w for w in base_overrides if w.startswith("data.path=")).partition("=")[2]
    words = [w for w in base_overrides if not w.startswith(("data.path=", "train.save_every"))]
    words += ["train.max_steps=60", "train.save_every=1", f"output_dir={folder}"]
    command = ["-m", *words, "adapter.alpha=32,1e38", f"data.path={good},{late}"]

    def kill(process) -> None:
        log = folder / "0" / "train.log"
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline and not (log.exists() and "step  5/" in log.read_text()):
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)

    at[0] = kill
    assert here(*command) == 137
    assert "killed by SIGKILL" in capfd.readouterr().out
    states = SweepFolder(folder).trials()
    assert {n: t.exit_code for n, t in states.items()} == {0: 137, 1: 3, 2: 6, 3: 3}
    assert not (folder / "1").exists() and not (folder / "3").exists(), "bad data leaves no folder"

    late.write_text(Path(good).read_text())
    at.clear()
    assert here(*command) == 6
    capfd.readouterr()
    states = SweepFolder(folder).trials()
    assert {n: t.exit_code for n, t in states.items()} == {0: 0, 1: 0, 2: 6, 3: 6}
    resumed = [row for row in (folder / "0/metrics.jsonl").read_text().splitlines() if '"resumed"' in row]
    assert len(resumed) == 1 and [row["step"] for row in metrics(folder / "0")] == list(range(1, 61))

    before = {n: (folder / n / "metrics.jsonl").read_bytes() for n in ("0", "1")}
    assert here(*command) == 6
    assert {n: (folder / n / "metrics.jsonl").read_bytes() for n in before} == before, "nothing is done twice"
    assert len(seen) == 12


@pytest.mark.slow
def test_each_way_in_which_a_trial_can_end_and_the_rerun(base_overrides, tmp_path, monkeypatch, capfd):
    """Forked trials: one raises, one runs out of memory, one is killed, one diverges, one's loss is NaN, one is well.
    The others finish; the same command makes what is missing, and nothing of a finished trial is touched."""
    from dataclasses import replace

    import torch

    from tests.processes import in_child, kill_after_step
    from trainer.run import prepare as prepare_module
    from trainer.run import train as train_module
    from trainer.training.losses import Chunked

    def raises(*_):
        raise RuntimeError("a bug")

    def no_memory(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    real_sum, real_evaluate = Chunked.sum, train_module.evaluate
    attacks = {
        1: lambda: setattr(prepare_module, "load_data", raises),
        2: lambda: setattr(train_module, "evaluate", no_memory),
        3: lambda: kill_after_step(3),
        4: lambda: setattr(Chunked, "sum", lambda *args: real_sum(*args) * (math.nan if args[1].training else 1)),
        5: lambda: setattr(train_module, "evaluate", lambda *args: replace(real_evaluate(*args), loss=math.nan)),
    }

    def train(words: list[str]) -> int:
        def trial():
            attacks.get(compose(words).config.seed, lambda: None)()
            os._exit(here(*words))

        code = in_child(trial)
        return code if code >= 0 else 128 - code

    monkeypatch.setattr(sweep, "_train", train)
    folder = tmp_path / "s"
    words = ["data.eval_fraction=0.3", "train.max_steps=6", "train.save_every=2", "memory.on_oom=fail"]
    command = ["-m", *base_overrides, *words, "seed=1,2,3,4,5,6", f"output_dir={folder}"]
    assert here(*command) == 1
    out = capfd.readouterr().out
    codes = {n: trial.exit_code for n, trial in SweepFolder(folder).trials().items()}
    assert codes == {0: 1, 1: 7, 2: 137, 3: 6, 4: 0, 5: 0}
    assert [row[3] for row in table(out)][4] == "not finite" and "4 of 6 trials did not complete" in out

    finished = [file for n in ("4", "5") for file in (folder / n).rglob("*") if file.is_file() and file.name != ".lock"]
    before = {file: (file.stat().st_mtime_ns, file.read_bytes()) for file in finished}
    attacks.clear()
    assert here(*command) == 0
    assert {trial.status for trial in SweepFolder(folder).trials().values()} == {"completed"}
    assert before == {file: (file.stat().st_mtime_ns, file.read_bytes()) for file in finished}
    assert [row["step"] for row in metrics(folder / "2", "resumed")] == [2]
    alone = tmp_path / "alone"
    assert here(*base_overrides, *words, "seed=3", f"output_dir={alone}") == 0
    name = "adapter/adapter_model.safetensors"
    assert (folder / "2" / name).read_bytes() == (alone / name).read_bytes()


@pytest.mark.slow
def test_a_search_with_real_trials_one_of_which_fails(base_overrides, children, tmp_path, capfd):
    """Six trials by Optuna, side by side in submitit's processes; what failed is made good by the same command."""
    folder, late = tmp_path / "s", tmp_path / "late.jsonl"
    good = next(w for w in base_overrides if w.startswith("data.path=")).partition("=")[2]
    words = [w for w in base_overrides if not w.startswith(("data.path=", "optim.learning_rate"))]
    words += ["data.eval_fraction=0.25", "train.max_steps=4", "train.eval_every=2", f"output_dir={folder}"]
    words += ["search=optuna", "search.trials=6", "search.random_trials=3", "search.prune_after=2"]
    words += ["optim.learning_rate=tag(log,interval(1e-4,1e-1))", f"data.path={good},{late}"]
    words += ["search.parallel=2", "hydra/launcher=submitit_local"]
    assert here("-m", *words) == 3
    out = capfd.readouterr().out
    trials = SweepFolder(folder).trials()
    failed = [n for n, t in trials.items() if f"data.path={late}" in t.overrides]
    assert sorted(trials) == list(range(6)) and failed
    assert all(trials[n].status == "failed: data" for n in failed) and f"{len(failed)} of 6 trials" in out
    assert {t.status for n, t in trials.items() if n not in failed} <= {"completed", "pruned"}

    late.write_text(Path(good).read_text())
    before = {n: t for n, t in trials.items() if n not in failed}
    assert here("-m", *words) == 0
    trials = SweepFolder(folder).trials()
    assert {n: trials[n] for n in before} == before, "nothing is done twice"
    results = json.loads((folder / "results.json").read_text())
    summaries = {n: json.loads((folder / str(n) / "summary.json").read_text()) for n in range(6)}
    completed = {n: summaries[n]["eval_loss"] for n, t in trials.items() if t.status == "completed"}
    assert results["best"]["trial"] == min(completed, key=completed.get)
    assert [row["memory"]["peak_memory_gib"] for row in results["trials"]] == [
        summaries[n]["peak_memory_gib"] for n in range(6)
    ]


@pytest.mark.slow
def test_a_trial_whose_plan_is_over_budget_takes_no_step(base_overrides, children, tmp_path, capfd):
    folder = tmp_path / "s"
    words = [*base_overrides, "train.max_steps=1", "memory.budget_gib=0.000001,4", f"output_dir={folder}"]
    assert here("-m", *words) == 0
    trials = SweepFolder(folder).trials()
    assert [t.status for t in trials.values()] == ["does not fit", "completed"]
    assert not (folder / "0").exists() and (folder / "1/summary.json").exists()
    assert "memory.over_budget=refuse: by the plan" in capfd.readouterr().err
