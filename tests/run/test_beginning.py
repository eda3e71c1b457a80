"""Stopped, killed and continued runs against the uninterrupted one, bit for bit; folders that hold something else."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from datetime import date
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.processes import in_child, kill_after_step, kill_at
from tests.support import CHATS, REPO, chat_rows, metrics, slow_but, train_here, write_jsonl
from trainer.config.compose import compose
from trainer.config.saved import load_run
from trainer.errors import StorageError
from trainer.run import beginning as beginning_module
from trainer.run import train as train_module
from trainer.run.train import run_training
from trainer.training import checkpoint as checkpoint_module
from trainer.training import loop as loop_module
from trainer.training.checkpoint import Checkpoints, load_state
from trainer.training.losses import Chunked
from trainer.training.state import State
from trainer.training.watch import Watch

THIRTEEN = [*CHATS, *[(a, q) for q, a in CHATS[:5]]]
TIMED = ("seconds", "tokens_per_second", "mfu", "roof_share", "matmul_tflops", "time")
CLOCK = (*TIMED, "peak_memory", "memory_allocated_gib", "memory_peak_gib", "rss_peak_gib")
"""What two equal runs may differ in."""


@pytest.fixture(scope="module")
def thirteen(tmp_path_factory) -> Path:
    return write_jsonl(tmp_path_factory.mktemp("rows") / "thirteen.jsonl", chat_rows(THIRTEEN))


@pytest.fixture
def job(base_overrides, thirteen, chats) -> list[str]:
    """13 samples in 7 rows, 3 epochs of 4 steps (the last one short), dropout, NF4, 8-bit state, warm-up, cosine.

    Rows of metrics, evaluations and checkpoints fall on different steps.
    """
    return [
        *base_overrides,
        f"data.path={thirteen}",
        f"data.eval_path={chats}",
        "data.max_length=96",
        "train.micro_batch_tokens=96",
        "quant=nf4",
        "optim=paged_adamw_8bit",
        "optim.learning_rate=1e-2",
        "adapter.dropout=0.1",
        "adapter.r=64",
        "schedule=cosine",
        "schedule.warmup_steps=2",
        "train.epochs=3",
        "train.accumulation_steps=2",
        "train.log_every=2",
        "train.save_every=3",
        "train.eval_every=4",
    ]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """The run of `job` without a stop, made once."""
    made: dict[str, Path] = {}

    def run(job: list[str]) -> Path:
        if "run" not in made:
            made["run"] = tmp_path_factory.mktemp("uninterrupted") / "run"
            train_here(job, made["run"])
        return made["run"]

    return run


def rows(run: Path) -> list[dict]:
    """Train and evaluation rows without the clock."""
    kept = [*metrics(run), *metrics(run, "eval")]
    return [{key: value for key, value in row.items() if key not in CLOCK} for row in kept]


def assert_equal_runs(run: Path, expected: Path) -> None:
    assert rows(run) == rows(expected)
    for name in ("adapter/adapter_model.safetensors", *last_files(expected)):
        assert (run / name).read_bytes() == (expected / name).read_bytes(), name
    summaries = [json.loads((folder / "summary.json").read_text()) for folder in (run, expected)]
    for key in (
        "status",
        "steps",
        "num_tokens",
        "num_targets",
        "final_loss",
        "eval_loss",
        "best_eval_loss",
        "best_step",
    ):
        assert summaries[0][key] == summaries[1][key], key


def last_files(run: Path) -> list[str]:
    last = (run / "checkpoints" / "last").read_text().strip()
    return [f"checkpoints/{last}/{name}" for name in ("optimizer.safetensors", "optimizer.json", "rng.safetensors")]


def test_two_runs_with_one_seed_are_equal_and_with_another_are_not(job, uninterrupted, tmp_path):
    """C2, and what makes the comparisons of this file mean something."""
    expected = uninterrupted(job)
    assert len(metrics(expected, "eval")) == 4 and metrics(expected)[-1]["step"] == 12
    train_here(job, tmp_path / "again")
    assert_equal_runs(tmp_path / "again", expected)
    train_here([*job, "seed=1"], tmp_path / "other")
    assert rows(tmp_path / "other") != rows(expected)
    hashes = [
        json.loads((run / "manifest.json").read_text())["fresh_adapter_hash"]
        for run in (expected, tmp_path / "again", tmp_path / "other")
    ]
    assert hashes[0] == hashes[1] != hashes[2]


def test_the_eight_bit_state_of_the_job_is_eight_bit(job, uninterrupted):
    from safetensors.torch import load_file

    state = load_file(uninterrupted(job) / last_files(uninterrupted(job))[0])
    dtypes = {str(tensor.dtype) for name, tensor in state.items() if name.endswith("state1")}
    assert "torch.uint8" in dtypes
    assert not any("qmap" in name for name in state)


def test_killed_in_the_second_epoch_and_resumed_twice(job, uninterrupted, tmp_path, capfd):
    """R1, R2, R3, R6: SIGKILL after step 7 (checkpoint of 6), again after step 11 (checkpoint of 9)."""
    run = tmp_path / "run"

    def killed_after(step):
        kill_after_step(step)
        train_here(job, run)

    assert in_child(lambda: killed_after(7)) == -signal.SIGKILL
    assert not (run / "adapter").exists() and not (run / "summary.json").exists()
    assert in_child(lambda: killed_after(11)) == -signal.SIGKILL
    assert "resumed at step 6 from step-00000006" in capfd.readouterr().out
    train_here(job, run)
    assert "resumed at step 9 from step-00000009" in capfd.readouterr().out
    assert_equal_runs(run, uninterrupted(job))
    assert [row["step"] for row in metrics(run, "resumed")] == [6, 9]


PLACES = {
    "before the first checkpoint": (loop_module, "rng_state", 2),
    "between two micro-batches": (Chunked, "sum", 30),
    "between the weights' step and its count": (loop_module.torch.optim.Optimizer, "zero_grad", 8),
    "while a checkpoint is written": (checkpoint_module, "save_optimizer", 2),
    "before a checkpoint's manifest": (checkpoint_module, "seal", 2),
    "before a checkpoint gets its name": (checkpoint_module, "replace_folder", 2),
    "before `last` names it": (checkpoint_module, "write_atomically", 6),
}


@pytest.mark.parametrize(
    "place",
    slow_but(
        ["between two micro-batches", "between the weights' step and its count", "before a checkpoint gets its name"],
        PLACES,
    ),
)
def test_killed_anywhere(place, job, uninterrupted, tmp_path):
    run = tmp_path / "run"

    def killed():
        kill_at(*PLACES[place])
        train_here(job, run)

    assert in_child(killed) == -signal.SIGKILL
    train_here(job, run)
    assert_equal_runs(run, uninterrupted(job))
    assert not list(run.rglob(".building*")), "what the kill left half-written is still there"


@pytest.mark.slow
def test_killed_at_random_moments(job, uninterrupted, tmp_path, record_property):
    """From outside the steps, by a clock: lives of one run, each shorter than the whole."""
    run, draw, kills = tmp_path / "run", random.Random(17), 0
    expected = uninterrupted(job)
    whole = json.loads((expected / "summary.json").read_text())["stages"]["training"]

    def life(seconds: float) -> None:
        real = train_module.train

        def train(*args):
            threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGKILL)).start()
            real(*args)
            threading.Event().wait()  # for the kill

        train_module.train = train
        train_here(job, run)

    while kills < 13:
        assert in_child(lambda: life(draw.uniform(0, whole / 2))) == -signal.SIGKILL
        kills += 1
        if kills % 5 == 0:  # begin anew: else all later lives see the last steps only
            train_here(job, run)
            assert_equal_runs(run, expected)
            run = tmp_path / f"run{kills}"
    record_property("attacks", kills)
    train_here(job, run)
    assert_equal_runs(run, expected)


@pytest.mark.slow
def test_every_state_of_the_folder_that_saving_passes_through(job, uninterrupted, tmp_path, record_property):
    """Before each thing that Python does to a file while a checkpoint is saved, the folder is copied as a kill would
    leave it: what is found in each copy is the newest checkpoint that was whole by then, byte for byte."""
    run, states, whole = tmp_path / "run", tmp_path / "states", tmp_path / "whole"
    states.mkdir()
    watched = ("open", "os.rename", "os.replace", "os.remove", "os.rmdir", "os.mkdir", "os.link", "shutil.rmtree")

    def work():
        saving, seen, least = [], set(), [0]

        def look(event, args):
            if saving and event in watched:
                saving.clear()  # what copying does is not looked at
                folder = run / "checkpoints"
                tree = [
                    (p.relative_to(folder), s.st_size, s.st_ino) for p in sorted(folder.rglob("*")) if (s := p.stat())
                ]
                if folder.exists() and str(tree) not in seen:
                    seen.add(str(tree))
                    shutil.copytree(folder, states / f"{len(seen):04}-{least[0]}")
                saving.append(1)

        def watching(method):
            def watched_method(self, *args):
                saving.append(1)
                result = method(self, *args)
                saving.clear()
                least[0] = next(a for a in args if isinstance(a, State)).step
                if self.folder.name == "checkpoints":
                    target = whole / f"{least[0]}-{method.__name__}"
                    shutil.copytree(self.path(least[0]), target, dirs_exist_ok=True)
                return result

            return watched_method

        Checkpoints.save, Checkpoints.amend = watching(Checkpoints.save), watching(Checkpoints.amend)
        sys.addaudithook(look)
        train_here(job, run)

    assert in_child(work) == 0
    assert_equal_runs(run, uninterrupted(job))
    found, run_id = [], json.loads((run / "manifest.json").read_text())["run_id"]
    for state in sorted(states.iterdir()):
        least = int(state.name.partition("-")[2])
        newest = Checkpoints(state, 2, run_id).newest(lambda _: None)
        step = 0 if newest is None else load_state(newest).step
        assert step >= least, (state.name, "a checkpoint that was whole is lost")
        if newest is not None:
            contents = {file.name: file.read_bytes() for file in newest.iterdir()}
            saved = [{file.name: file.read_bytes() for file in kept.iterdir()} for kept in whole.glob(f"{step}-*")]
            assert contents in saved, state.name
        found.append(step)
    record_property("attacks", len(found))
    assert len(found) > 80 and {0, 3, 4, 6, 8, 9, 12} == set(found)


@pytest.mark.slow
def test_the_program_killed_and_resumed_by_command(job, uninterrupted, tmp_path):
    """`python -m trainer` ended by kill -9 from outside while it trains, then `trainer resume run=DIR`."""
    run = tmp_path / "run"
    words = [*job, f"output_dir={run}"]
    process = subprocess.Popen([sys.executable, "-m", "trainer", *words], cwd=REPO, stdin=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while not (run / "checkpoints" / "step-00000006").exists():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.002)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    assert not (run / "adapter").exists()
    subprocess.run([sys.executable, "-m", "trainer", "resume", f"run={run}"], cwd=REPO, check=True)
    assert_equal_runs(run, uninterrupted(job))


def half_run(job: list[str], run: Path, step: int = 7) -> None:
    """A run that stopped after `step`."""

    def work():
        kill_after_step(step)
        train_here(job, run)

    assert in_child(work) == -signal.SIGKILL


def test_resume_takes_the_saved_configuration(job, uninterrupted, tmp_path):
    """What `trainer resume run=DIR` does, in this process."""
    run = tmp_path / "run"
    half_run(job, run)
    run_training(load_run(run), run)
    assert_equal_runs(run, uninterrupted(job))


def damages():
    def delete(file: Path):
        file.unlink()

    def truncate(file: Path):
        file.write_bytes(file.read_bytes()[:-1])

    def flip(file: Path):
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)

    def empty(file: Path):
        file.write_bytes(b"")

    return [delete, truncate, flip, empty]


def test_any_damaged_file_is_said_and_the_checkpoint_before_is_taken(job, uninterrupted, tmp_path, record_property):
    """R4, for each file and each kind of damage."""
    run = uninterrupted(job)
    names = sorted(file.name for file in (run / "checkpoints/step-00000012").iterdir())
    assert {"adapter_model.safetensors", "optimizer.safetensors", "state.json", "manifest.json"} < set(names)
    record_property("attacks", len(names) * len(damages()))
    for name in names:
        for damage in damages():
            copy = tmp_path / "copy"
            shutil.copytree(run / "checkpoints", copy)
            checkpoints, said = Checkpoints(copy, 2), []
            assert checkpoints.newest(said.append).name == "step-00000012" and not said
            damage(copy / "step-00000012" / name)
            assert checkpoints.newest(said.append).name == "step-00000009", (name, damage.__name__)
            assert len(said) == 1 and "step-00000012" in said[0]
            assert name in said[0] or name == "manifest.json"
            shutil.rmtree(copy)


def test_a_run_with_a_damaged_checkpoint_still_ends_equal(job, uninterrupted, tmp_path, capsys):
    run = tmp_path / "run"
    half_run(job, run)
    damaged = run / "checkpoints/step-00000006/optimizer.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-10])
    train_here(job, run)
    screen = capsys.readouterr().out
    assert "checkpoint step-00000006 is not used: optimizer.safetensors is not as it was written" in screen
    assert "resumed at step 4 from step-00000004" in screen
    assert_equal_runs(run, uninterrupted(job))


def test_without_any_good_checkpoint_the_run_begins_again(job, uninterrupted, tmp_path, capsys):
    run = tmp_path / "run"
    half_run(job, run)
    for folder in (run / "checkpoints").glob("step-*"):
        (folder / "state.json").unlink()
    train_here(job, run)
    assert "resumed at" not in capsys.readouterr().out
    assert_equal_runs(run, uninterrupted(job))


class Pickled:
    """Leaves a mark where it is unpickled."""

    def __init__(self, mark: Path):
        self.mark = mark

    def __reduce__(self):
        return (Path.touch, (self.mark,))


def test_a_pickle_in_place_of_any_file_is_never_loaded(job, tmp_path, record_property):
    """C8: as it is, the hash tells; with a manifest that fits, the run stops with 5 before it reads the file."""
    import pickle

    import torch

    half_run(job, tmp_path / "half")
    mark = tmp_path / "mark"
    writers = {
        "pickle": lambda file: file.write_bytes(pickle.dumps(Pickled(mark))),
        "torch": lambda file: torch.save({"x": Pickled(mark)}, file),
    }
    names = sorted(file.name for file in (tmp_path / "half/checkpoints/step-00000006").iterdir())
    record_property("attacks", len(names) * len(writers))
    for name in names:
        for writer, write in writers.items():
            run = tmp_path / f"{writer}-{name}"
            shutil.copytree(tmp_path / "half", run)
            folder = run / "checkpoints/step-00000006"
            write(folder / name)
            assert Checkpoints(run / "checkpoints", 2).newest(lambda _: None).name < "step-00000006", (writer, name)
            # PEFT's users read adapter_config.json; a resume does not.
            if name not in ("manifest.json", "adapter_config.json"):
                (folder / "manifest.json").unlink()
                checkpoint_module.seal(folder, {"step": 6})
                with pytest.raises(StorageError, match="cannot be loaded into this run"):
                    train_here(job, run)
            assert not mark.exists(), (writer, name)


def test_a_save_on_a_folder_that_exists_replaces_it(job, uninterrupted, tmp_path):
    """R10: the resumed run saves step 6 again, over a damaged one."""
    run = tmp_path / "run"
    half_run(job, run)
    (run / "checkpoints/step-00000006/manifest.json").unlink()
    (run / "checkpoints/step-00000006/stray").write_text("x")
    train_here(job, run)
    folder = run / "checkpoints/step-00000009"
    assert checkpoint_module.damage(folder) is None
    assert not (run / "checkpoints/step-00000006/stray").exists()
    assert_equal_runs(run, uninterrupted(job))


def test_a_finished_run_is_left_alone(job, uninterrupted, tmp_path, capsys):
    run = tmp_path / "run"
    shutil.copytree(uninterrupted(job), run)
    before = {file: file.stat().st_mtime_ns for file in run.rglob("*") if file.is_file() and file.name != ".lock"}
    summary = train_here(job, run)
    assert summary == json.loads((run / "summary.json").read_text())
    assert "this run is completed; nothing to do" in capsys.readouterr().out
    assert before == {f: f.stat().st_mtime_ns for f in run.rglob("*") if f.is_file() and f.name != ".lock"}


def test_never_refuses_a_folder_with_a_run(job, uninterrupted):
    with pytest.raises(StorageError, match=r"train\.resume=never") as error:
        train_here([*job, "train.resume=never"], uninterrupted(job))
    assert error.value.exit_code == 5


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("train.max_steps=20", "train.max_steps: None there, 20 here"),
        ("optim.learning_rate=1e-3", "optim.learning_rate: 0.01 there, 0.001 here"),
        ("seed=1", "seed: 0 there, 1 here"),
        ("quant=fp4", "choices.quant: nf4 there, fp4 here"),
    ],
)
def test_another_run_is_refused_and_every_difference_named(change, said, job, uninterrupted, tmp_path):
    """R6: a changed horizon too."""
    before = sorted(uninterrupted(job).rglob("*"))
    with pytest.raises(StorageError) as error:
        train_here([*job, change], uninterrupted(job))
    assert error.value.exit_code == 5
    assert said in str(error.value) and "train.resume=force" in str(error.value)
    assert sorted(uninterrupted(job).rglob("*")) == before


def test_force_goes_on_with_other_settings(job, tmp_path, capsys):
    run = tmp_path / "run"
    half_run(job, run)
    summary = train_here([*job, "train.max_steps=8", "train.resume=force"], run)
    assert "resumed at step 6" in capsys.readouterr().out
    assert summary["steps"] == 8 and summary["status"] == "completed"
    assert metrics(run)[-1]["learning_rate"] == pytest.approx(1e-3), "the new horizon's last rate"


def test_force_that_cannot_go_on_changes_nothing(job, tmp_path):
    """Another rank does not fit the checkpoint: the settings are named, no file is blamed, and the run goes on as it
    was."""
    file = write_jsonl(tmp_path / "rows.jsonl", chat_rows(THIRTEEN))
    job, run = [*job, f"data.path={file}"], tmp_path / "run"
    half_run(job, run)
    original = file.read_text()
    write_jsonl(file, chat_rows([*THIRTEEN[:-1], ("Another?", "Yes, another.")]))
    with pytest.raises(StorageError) as error:
        train_here([*job, "adapter.r=4", "train.resume=force"], run)
    said = str(error.value)
    assert "made with other settings" in said and "adapter.r: 64 there, 4 here" in said and "Remove" not in said
    file.write_text(original)
    assert train_here(job, run)["status"] == "completed"


def test_settings_that_change_no_weight_may_differ(job, uninterrupted, tmp_path):
    run = tmp_path / "run"
    half_run(job, run)
    train_here([*job, "train.save_every=5", "train.keep_checkpoints=1", "debug=true"], run)
    assert_equal_runs(run, uninterrupted(job))


def test_changed_data_is_refused(job, tmp_path):
    file = write_jsonl(tmp_path / "rows.jsonl", chat_rows(THIRTEEN))
    changed = [*job, f"data.path={file}"]
    run = tmp_path / "run"
    half_run(changed, run)
    write_jsonl(file, chat_rows([*THIRTEEN[:-1], ("Another?", "Yes, another.")]))
    with pytest.raises(StorageError, match="training data has changed"):
        train_here(changed, run)
    half = shutil.copytree(run, tmp_path / "half")
    assert train_here([*changed, "train.resume=force"], run)["status"] == "completed"

    def killed():
        kill_after_step(7)
        train_here([*changed, "train.resume=force"], half)

    assert in_child(killed) == -signal.SIGKILL
    assert train_here(changed, half)["status"] == "completed", "what was forced once is this run's data"
    assert_equal_runs(half, run)


def test_a_run_keeps_the_day_on_which_it_began(job, tmp_path, monkeypatch):
    template = tmp_path / "dated.jinja"
    template.write_text(
        "{{ strftime_now('%d %b %Y') }}{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{{ eos_token }}"
        "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    dated = [*job, f"data.chat_template={template}"]

    def on(day: str) -> None:
        monkeypatch.setattr(beginning_module, "date", SimpleNamespace(today=lambda: date.fromisoformat(day)))

    on("2026-01-31")
    half_run(dated, tmp_path / "run")
    on("2026-02-01")
    assert train_here(dated, tmp_path / "run")["status"] == "completed"
    train_here([*dated, "data.today=2026-01-31"], tmp_path / "given")
    assert_equal_runs(tmp_path / "run", tmp_path / "given")
    train_here([*dated, "data.today=2026-02-01", "train.max_steps=1"], tmp_path / "later")
    hashes = {
        name: json.loads((tmp_path / name / "manifest.json").read_text())["data_hash"] for name in ("run", "later")
    }
    assert hashes["run"] != hashes["later"], "the day is in the tokens"


def test_a_data_file_that_changes_during_the_run_changes_nothing(job, uninterrupted, tmp_path):
    """What is trained on was read at the start."""
    file = write_jsonl(tmp_path / "rows.jsonl", chat_rows(THIRTEEN))

    def changed():
        real = Watch.after_step

        def after_step(self, state, grad_norm):
            real(self, state, grad_norm)
            if state.step == 3:
                write_jsonl(file, chat_rows([("Another?", "Yes, another.")]))
            if state.step == 6:
                file.unlink()

        Watch.after_step = after_step
        train_here([*job, f"data.path={file}"], tmp_path / "run")

    assert in_child(changed) == 0
    assert_equal_runs(tmp_path / "run", uninterrupted(job))


@pytest.mark.slow
def test_a_clock_that_is_set_back_changes_nothing(job, uninterrupted, tmp_path):
    """A day ahead at first, then a day back; and the run goes on with files from the future."""
    run, real = tmp_path / "run", time.time

    def killed():
        kill_after_step(7)
        after = Watch.after_step

        def after_step(self, state, grad_norm):
            if state.step == 4:
                time.time = lambda: real() - 86400
            after(self, state, grad_norm)

        Watch.after_step, time.time = after_step, lambda: real() + 86400
        train_here(job, run)

    assert in_child(killed) == -signal.SIGKILL
    told = [json.loads(line)["time"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert min(told) < real() - 80000 and max(told) > real() + 80000
    for file in run.rglob("*"):
        os.utime(file, (real() + 86400, real() + 86400))
    os.utime(run / "checkpoints/step-00000004", (real() + 172800, real() + 172800))  # the older is the younger
    train_here(job, run)
    assert_equal_runs(run, uninterrupted(job))
    assert [row["step"] for row in metrics(run, "resumed")] == [6]


def test_every_step_has_one_row_whoever_was_killed(job, uninterrupted, tmp_path):
    """The file itself, not its last rows: what was made again replaces what a kill left, evaluations too."""
    run = tmp_path / "run"
    half_run(job, run, step=8)  # its checkpoint is of step 6; rows of step 8 and an evaluation lie behind it
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"event": "train", "st')
    train_here(job, run)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for event in ("train", "eval"):
        expected = [row["step"] for row in metrics(uninterrupted(job), event)]
        assert [row["step"] for row in lines if row["event"] == event] == expected
    assert_equal_runs(run, uninterrupted(job))


def test_fewer_steps_than_were_done_are_told_and_end(job, tmp_path):
    run = tmp_path / "run"
    half_run(job, run)
    with pytest.raises(StorageError, match=r"at step 6 already, past the 2 .* train\.max_steps=6 train\.resume=force"):
        train_here([*job, "train.max_steps=2", "train.resume=force"], run)
    summary = train_here([*job, "train.max_steps=6", "train.resume=force"], run)
    assert summary["steps"] == 6 and summary["status"] == "completed"


def test_another_runs_checkpoint_and_a_renamed_one_are_passed_over(job, uninterrupted, tmp_path, capsys):
    run, other = tmp_path / "run", tmp_path / "other"
    half_run(job, run)
    half_run([*job, "seed=1"], other)
    shutil.copytree(other / "checkpoints/step-00000006", run / "checkpoints/step-00000006", dirs_exist_ok=True)
    shutil.copytree(run / "checkpoints/step-00000004", run / "checkpoints/step-00000700")
    train_here(job, run)
    screen = " ".join(capsys.readouterr().out.split())
    assert "checkpoint step-00000700 is not used: it was saved as step 4" in screen
    ids = [json.loads((folder / "manifest.json").read_text())["run_id"] for folder in (other, run)]
    assert f"step-00000006 is not used: it is of another run ({ids[0]}, this one is {ids[1]})" in screen
    assert "resumed at step 4" in screen
    assert_equal_runs(run, uninterrupted(job))


@pytest.mark.parametrize("optim", ["adamw", "paged_adamw_32bit"])
def test_another_optimizers_checkpoint_is_a_sentence(optim, job, tmp_path):
    run = tmp_path / "run"
    half_run(job, run)
    with pytest.raises(StorageError, match="made with other settings") as error:
        train_here([*job, f"optim={optim}", "optim.learning_rate=1e-3", "train.resume=force"], run)
    assert f"choices.optim: paged_adamw_8bit there, {optim} here" in str(error.value)


def test_killed_between_the_files_that_say_what_the_run_is(job, uninterrupted, tmp_path):
    """overrides.yaml is there, config.yaml is not: the same command begins."""
    from trainer.config import saved
    from trainer.tracking.run_folder import check_usable

    run = tmp_path / "run"
    real = saved.write_atomically

    def full(file, text):
        if file.name == saved.CONFIG:
            raise OSError(28, "No space left on device")
        real(file, text)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(StorageError, match="No space left"):
        patch.setattr(saved, "write_atomically", full)
        train_here(job, run)
    assert (run / "overrides.yaml").exists() and not (run / "config.yaml").exists()
    check_usable(run)
    train_here(job, run)
    assert_equal_runs(run, uninterrupted(job))


@pytest.mark.parametrize("how", ["memory", "kill"])
def test_an_evaluation_that_fails_does_not_take_its_step_along(how, job, uninterrupted, tmp_path, capfd):
    """Step 12 is the last: it is saved, evaluated, and the checkpoint learns the result without a second save."""
    import torch

    from trainer.errors import OutOfMemoryError

    run, real, calls = tmp_path / "run", train_module.evaluate, []

    def failing(*args):
        calls.append(1)
        if len(calls) == 4:  # steps 0, 4, 8 and 12
            if how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return real(*args)

    def work():
        train_module.evaluate = failing
        train_here([*job, "memory.on_oom=fail"], run)

    assert in_child(work) == {"kill": -signal.SIGKILL, "memory": OutOfMemoryError.exit_code}[how]
    saved = run / "checkpoints/step-00000012"
    assert checkpoint_module.damage(saved) is None
    assert json.loads((saved / "state.json").read_text())["evaluated_step"] == 8
    train_here(job, run)
    assert "resumed at step 12" in capfd.readouterr().out
    assert_equal_runs(run, uninterrupted(job))
    states = [json.loads((r / "checkpoints/step-00000012/state.json").read_text()) for r in (run, uninterrupted(job))]
    assert states[0]["eval_loss"] == states[1]["eval_loss"] and states[0]["evaluated_step"] == 12
    for name in ("best", "last"):
        assert (run / "checkpoints" / name).read_text() == (uninterrupted(job) / "checkpoints" / name).read_text()


BAD_FILES = [
    ("summary.json", "[]", "is not what a run wrote"),
    ("summary.json", "{", "cannot be read"),
    ("manifest.json", '{"run_id": 5}', "is not what a run wrote"),
    ("manifest.json", "[1]", "is not what a run wrote"),
]


@pytest.mark.parametrize(("name", "content", "said"), BAD_FILES)
def test_a_record_that_no_run_wrote_is_one_line(name, content, said, job, tmp_path):
    from trainer.config.saved import save_run

    run = tmp_path / "run"
    run.mkdir()
    save_run(compose([*job, f"output_dir={run}"]), run)
    (run / name).write_text(content)
    with pytest.raises(StorageError, match=said) as error:
        train_here(job, run)
    assert name in str(error.value) and error.value.exit_code == 5


def test_a_run_folder_is_its_users_own(job, uninterrupted):
    assert uninterrupted(job).stat().st_mode & 0o777 == 0o700
