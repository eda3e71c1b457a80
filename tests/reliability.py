"""`python -m tests.reliability [short]`: runs the attacks and writes tests/RELIABILITY.md with what came of them.

An attack is a test; one that has a test for each place, file or input counts each. `short` leaves out what is marked
slow, as CI does. Figures are of this run only.
"""

from __future__ import annotations

import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

from tests.support import REPO, chat_rows, cli, make_model, train_here, write_jsonl
from trainer.tracking.run_folder import versions
from trainer.training.watch import Watch

ATTACKS = {
    "kills, signals and power losses survived": (
        "tests/run/test_beginning.py tests/run/test_train.py tests/run/test_streamed_run.py tests/test_atomic.py",
        "kill or signal or power or renamed or atomic",
    ),
    "resumes equal bit for bit": (
        "tests/run/test_beginning.py tests/run/test_streamed_run.py",
        "resume or ends_equal or killed or bit_for_bit",
    ),
    "damaged files found": (
        "tests/run/test_beginning.py tests/training/test_checkpoint.py tests/data/tokens/test_cache.py "
        "tests/model/loading/test_quantized_cache.py tests/model/loading/test_hub.py tests/config/test_saved.py",
        "damage or flipped or broken or pickle or cut_off or complete_manifest",
    ),
    "full and refusing disks survived": ("tests/training/test_checkpoint.py tests/model/loading", "disk or written"),
    "non-finite training and out of memory told": ("tests/training/test_loop.py tests/run", "nan or finite or spoilt"),
    "bad inputs refused": (
        "tests/config tests/data/sources tests/data/chat/test_sandbox.py tests/model/loading tests/test_redact.py",
        "refused or wrong or cannot or is_no_bug or odd_value or hostile or link or told or secret",
    ),
    "broken services survived": ("tests/tracking/test_wandb_service.py", "host or service or address"),
    "sweeps that lose a trial": ("tests/commands/test_sweep.py", "trial"),
    "searches for a secret without a hit": ("tests/test_redact.py tests/tracking/test_wandb.py", "secret or key"),
}
"""A row of the table: where its tests lie, and which of them."""
MISTAKES = (
    ["model.revison=x"], ["recipe=nothing"], ["optim.learning_rate=fast"], ["data.path=/nowhere.jsonl"],
    ["model.path=/nowhere"], ["train.epochs=-1"], ["hf_aaaaaaaaaaaaaaaaaaaa"], ["trian"], ["resume", "run=/nowhere"],
)  # fmt: skip


def attack(where: str, which: str, short: bool) -> tuple[int, int]:
    """Tests passed and tried."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        words = [
            *where.split(),
            "-k",
            which,
            "-m",
            "not slow" if short else "",
            "--numprocesses=0",
            f"--junitxml={report}",
        ]
        subprocess.run([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *words], cwd=REPO, check=False)
        suite = next(ElementTree.parse(report).iter("testsuite"))
        tried, skipped = int(suite.get("tests", 0)), int(suite.get("skipped", 0))
        return tried - skipped - int(suite.get("failures", 0)) - int(suite.get("errors", 0)), tried - skipped


def seconds_to_an_error() -> list[float]:
    """Of each mistake, in a process of its own."""
    taken = []
    with tempfile.TemporaryDirectory() as folder:
        for words in MISTAKES:
            start = time.perf_counter()
            done = cli(*words, cwd=Path(folder))
            taken.append(time.perf_counter() - start)
            assert done.returncode in (2, 3, 4, 5) and "Traceback" not in done.stderr, (words, done.stderr)
    return taken


def slopes(steps: int) -> tuple[float, float]:
    """Growth a step of resident memory (KiB) and of open files over the second half of a run (least squares)."""
    seen: list[tuple[int, int]] = []
    real = Watch.after_step

    def after_step(self, state, grad_norm):
        real(self, state, grad_norm)
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        seen.append((pages * resource.getpagesize() // 1024, len(os.listdir("/proc/self/fd"))))

    Watch.after_step = after_step
    try:
        with tempfile.TemporaryDirectory() as folder:
            model, data = make_model(Path(folder) / "model"), write_jsonl(Path(folder) / "rows.jsonl", chat_rows())
            words = [*model.overrides(), f"data.path={data}", "data.max_length=128", "train.micro_batch_tokens=128"]
            words += ["device=cpu", "data.eval_fraction=0", f"train.max_steps={steps}", "train.save_every=50"]
            train_here(words, Path(folder) / "run")
    finally:
        Watch.after_step = real
    late = seen[len(seen) // 2 :]
    memory, files = (statistics.linear_regression(range(len(late)), column).slope for column in zip(*late, strict=True))
    return memory, files


def table(short: bool) -> Iterator[str]:
    """The lines of RELIABILITY.md."""
    command = "python -m tests.reliability" + (" short" if short else "")
    yield "# Reliability\n"
    yield f"Made by `{command}`: tests that attack, passed of tried.\n"
    yield "| | passed | tried |\n|---|---:|---:|"
    for name, (where, which) in ATTACKS.items():
        passed, tried = attack(where, which, short)
        yield f"| {name} | {passed} | {tried} |"
    taken = seconds_to_an_error()
    median, largest = statistics.median(taken), max(taken)
    yield f"\nSeconds to an error, {len(taken)} mistakes: median {median:.1f}, largest {largest:.1f}.\n"
    steps = 200 if short else 1600
    memory, files = slopes(steps)
    yield f"Second half of {steps} steps: {memory:+.2f} KiB of resident memory and {files:+.4f} open files a step."
    found = ", ".join(f"{name} {version}" for name, version in versions().items())
    yield f"\n{platform.system()} {platform.machine()}, {os.cpu_count()} cores; {found}."


if __name__ == "__main__":
    lines = list(table(short="short" in sys.argv[1:]))
    (REPO / "tests" / "RELIABILITY.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
