"""launch.sh and .ci/run, with a stand-in for Python, so that nothing is installed."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# Stands in for every Python: makes an "environment" that holds itself, notes what pip and programs are asked.
# Its first lines are for both, sh and Python: a shebang cannot hold a path with a space.
FAKE_PYTHON = """#!/bin/sh
'''exec' "{python}" "$0" "$@"
' '''
import json, os, shutil, sys, time
args = sys.argv[1:]
env = os.environ
with open(env["CALLS"], "a") as calls:
    row = {{"args": args, "cwd": os.getcwd(), "pid": os.getpid(), "program": sys.argv[0], "env": dict(env)}}
    calls.write(json.dumps(row) + "\\n")
if args[0] == "-ISc" and "print" in args[1]:
    print(env.get("FAKE_VERSION", "3.12"))
elif args[0] == "-ISc":
    sys.exit(tuple(map(int, env.get("FAKE_VERSION", "3.12").split("."))) < (3, 11))
elif args[0] == "-Ic":
    sys.exit(int(env.get("FAKE_NO_VENV", "0")))
elif args[:2] == ["-m", "venv"]:
    time.sleep(float(env.get("FAKE_VENV_SECONDS", "0")))
    os.makedirs(args[-1] + "/bin")
    shutil.copy(sys.argv[0], args[-1] + "/bin/python")
elif args[:2] == ["-m", "pip"] and "install" in args:
    print("pip says: collecting")
    time.sleep(float(env.get("FAKE_PIP_SECONDS", "0")))
    sys.exit(int(env.get("FAKE_PIP_EXIT", "0")))
elif args[0] == "-m" and args[1] in ("trainer", "pytest"):
    time.sleep(float(env.get("FAKE_PROGRAM_SECONDS", "0")))
    sys.exit(int(env.get("FAKE_EXIT", "0")))
"""

LOCK = "# head\none==1 \\\n    --hash=sha256:1\ntorch==3\ntwo==2 \\\n    --hash=sha256:2\n"

# What launch.sh may use besides bash itself.
TOOLS = ["bash", "dirname", "readlink", "flock", "grep", "env", "mkdir", "mv", "rm", "sleep", "tail", "tput"]


class Box:
    """A copy of the set-up files in a folder with a space in its name, and a PATH with one fake Python."""

    def __init__(self, folder: Path):
        self.root = folder / "my clone" / "trainer"
        self.bin = folder / "bin"
        self.elsewhere = folder / "else where"
        self.calls_file = folder / "calls.jsonl"
        for made in (self.root, self.bin, self.elsewhere):
            made.mkdir(parents=True)
        for name in ("launch.sh", "pyproject.toml"):
            shutil.copy(ROOT / name, self.root)
        (self.root / "requirements.lock").write_text(LOCK)
        for tool in TOOLS:
            if (path := shutil.which(tool)) is not None:
                (self.bin / tool).symlink_to(path)
        self.fake("python3")

    def fake(self, name: str) -> Path:
        path = self.bin / name
        path.write_text(FAKE_PYTHON.format(python=sys.executable))
        path.chmod(0o755)
        return path

    def start(self, *args: str, script: Path | None = None, cwd: Path | None = None, **env: str):
        return subprocess.Popen(
            [str(script or self.root / "launch.sh"), *args],
            cwd=cwd or self.elsewhere,
            env={"PATH": str(self.bin), "CALLS": str(self.calls_file), **env},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def launch(self, *args: str, **options) -> subprocess.CompletedProcess:
        process = self.start(*args, **options)
        out, err = process.communicate(timeout=60)
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def calls(self, *head: str) -> list[dict]:
        """The calls whose arguments start with `head`, since the last `forget`."""
        rows = self.calls_file.read_text().splitlines() if self.calls_file.exists() else []
        return [row for row in map(json.loads, rows) if row["args"][: len(head)] == list(head)]

    def pip_installs(self) -> list[list[str]]:
        return [row["args"] for row in self.calls("-m", "pip") if "install" in row["args"]]

    def wait_for(self, process: subprocess.Popen, calls: Callable[[], list]) -> None:
        """Returns when a running launch has made one of `calls`."""
        deadline = time.monotonic() + 20
        while not calls():
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)

    def forget(self) -> None:
        self.calls_file.unlink(missing_ok=True)


@pytest.fixture
def box(tmp_path):
    return Box(tmp_path)


@pytest.mark.parametrize("script", ["launch.sh", ".ci/run"])
def test_script_is_executable_bash(script):
    subprocess.run(["bash", "-n", ROOT / script], check=True)
    assert os.access(ROOT / script, os.X_OK)
    assert (ROOT / script).read_text().startswith("#!/usr/bin/env bash\n")


def test_first_launch_installs_and_second_only_runs(box):
    first = box.launch("plan")
    assert first.returncode == 0, first.stderr
    hashed, torch, project = box.pip_installs()
    assert hashed[-4:] == ["--require-hashes", "--no-deps", "-r", f"{box.root}/.venv/hashed.lock"]
    assert (box.root / ".venv/hashed.lock").read_text() == LOCK.replace("torch==3\n", "")
    assert torch[-2:] == ["install", "torch==3"]
    assert "--no-deps" in project
    assert project[-2:] == ["--editable", str(box.root)]
    assert [line[:13] for line in first.stderr.splitlines()] == [
        "set-up: [1/3]",
        "set-up: [2/3]",
        "set-up: [3/3]",
        "set-up: ready",
    ]
    assert "3 packages" in first.stderr
    assert first.stdout == ""
    box.forget()
    second = box.launch("plan")
    assert (second.returncode, second.stderr) == (0, "")
    assert box.calls("-m") == box.calls("-m", "trainer", "plan")
    assert box.calls("-m", "trainer")[0]["program"] == f"{box.root}/.venv/bin/python"


def test_changed_lock_is_installed_on_top(box):
    box.launch()
    box.forget()
    (box.root / "requirements.lock").write_text(LOCK.replace("two==2", "two==3"))
    assert box.launch().returncode == 0
    assert box.calls("-m", "venv") == []
    assert len(box.pip_installs()) == 3
    box.forget()
    box.launch()
    assert box.pip_installs() == []


def test_moved_clone_is_made_again(box):
    box.launch()
    (box.root / ".venv/lib").touch()
    box.root = box.root.rename(box.root.with_name("moved"))
    box.forget()
    assert box.launch().returncode == 0
    assert not (box.root / ".venv/lib").exists()
    assert len(box.calls("-m", "venv")) == 1


def test_environment_of_another_python_is_made_again(box):
    box.launch()
    box.forget()
    assert box.launch(FAKE_VERSION="3.13").returncode == 0
    assert len(box.calls("-m", "venv")) == 1


def test_environment_of_the_user_is_kept_and_completed(box):
    (box.root / ".venv/bin").mkdir(parents=True)
    shutil.copy(box.bin / "python3", box.root / ".venv/bin/python")
    (box.root / ".venv/mine").touch()
    assert box.launch().returncode == 0
    assert box.calls("-m", "venv") == []
    assert len(box.pip_installs()) == 3
    assert (box.root / ".venv/mine").exists()


def test_failed_install_shows_pips_end_and_is_redone(box):
    failed = box.launch(FAKE_PIP_EXIT="9")
    assert failed.returncode == 2
    assert re.search("-m pip .* failed with code 9", failed.stderr)
    assert "pip says: collecting" in failed.stderr
    assert box.calls("-m", "trainer") == []
    box.forget()
    assert box.launch().returncode == 0
    assert len(box.calls("-m", "venv")) == 1
    assert len(box.pip_installs()) == 3


@pytest.mark.parametrize(
    "number, code", [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGKILL, -signal.SIGKILL)]
)
def test_interrupted_install_is_redone(box, number, code):
    # After SIGKILL its pip lives on and keeps the lock: the next launch waits for that one's end.
    seconds = 3 if number == signal.SIGKILL else 30
    process = box.start(FAKE_PIP_SECONDS=str(seconds))
    box.wait_for(process, box.pip_installs)
    begin = time.monotonic()
    process.send_signal(number)
    assert process.wait(timeout=20) == code
    assert time.monotonic() - begin < 10
    process.communicate()
    box.forget()
    assert box.launch().returncode == 0
    assert len(box.calls("-m", "venv")) == 1
    assert len(box.calls("-m", "trainer")) == 1


def test_interrupt_while_the_environment_is_emptied_and_made_is_redone(box):
    box.launch(FAKE_PIP_EXIT="1")
    box.forget()
    process = box.start(FAKE_VENV_SECONDS="30")
    box.wait_for(process, lambda: box.calls("-m", "venv"))
    process.terminate()
    assert process.wait(timeout=20) == 143
    process.communicate()
    (box.root / ".venv/half").touch()
    box.forget()
    assert box.launch().returncode == 0
    assert len(box.calls("-m", "venv")) == 1
    assert not (box.root / ".venv/half").exists()


@pytest.mark.skipif(shutil.which("flock") is None, reason="without flock launches do not wait for each other")
def test_two_launches_at_once_install_once(box):
    both = [box.start("data", FAKE_PIP_SECONDS="1") for _ in range(2)]
    errors = [process.communicate(timeout=60)[1] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert len(box.calls("-m", "venv")) == 1
    assert len(box.pip_installs()) == 3
    assert len(box.calls("-m", "trainer")) == 2
    assert sum("waiting for it" in error for error in errors) == 1


@pytest.mark.skipif(shutil.which("flock") is None, reason="no flock here")
def test_lock_is_not_held_while_the_program_runs(box):
    process = box.start(FAKE_PROGRAM_SECONDS="30")
    try:
        box.wait_for(process, lambda: box.calls("-m", "trainer"))
        subprocess.run(["flock", "-n", box.root / "requirements.lock", "true"], check=True)
    finally:
        process.kill()
        process.communicate()


def test_arguments_pass_unchanged_and_the_callers_folder_stays(box):
    args = ["generate", "run=out puts/a", 'it is "so" $HOME *', "", "a\nb"]
    assert box.launch(*args).returncode == 0
    (call,) = box.calls("-m", "trainer")
    assert call["args"] == ["-m", "trainer", *args]
    assert call["cwd"] == str(box.elsewhere)


def test_without_arguments_the_quickstart_runs(box):
    box.launch()
    (call,) = box.calls("-m", "trainer")
    assert call["args"] == ["-m", "trainer", "recipe=quickstart"]


@pytest.mark.parametrize("code", ["0", "3", "130"])
def test_exit_code_of_the_program_passes(box, code):
    assert box.launch(FAKE_EXIT=code).returncode == int(code)


def test_program_takes_the_place_of_the_shell(box):
    """Signals for launch.sh reach Python because it is the same process."""
    process = box.start()
    process.communicate(timeout=60)
    assert box.calls("-m", "trainer")[0]["pid"] == process.pid


def test_symlink_to_launch_finds_the_clone(box):
    box.launch()
    (box.elsewhere / "link").symlink_to(Path("..") / "my clone/trainer/launch.sh")
    (box.bin / "again").symlink_to(box.elsewhere / "link")
    box.forget()
    assert box.launch("plan", script=box.bin / "again").returncode == 0
    assert box.calls("-m") == box.calls("-m", "trainer", "plan")


def test_trainer_python_is_used_and_nothing_installed(box):
    own = box.fake("own python")
    result = box.launch("plan", TRAINER_PYTHON=str(own), FAKE_EXIT="4")
    assert (result.returncode, result.stderr) == (4, "")
    (call,) = box.calls()
    assert call["args"] == ["-m", "trainer", "plan"]
    assert call["program"] == str(own)
    assert call["env"]["PYTHONPATH"] == str(box.root)
    assert not (box.root / ".venv").exists()


def test_trainer_python_may_be_a_name_or_a_relative_path(box):
    box.fake("mine")
    assert box.launch("test", TRAINER_PYTHON="mine").returncode == 0
    assert box.launch("test", TRAINER_PYTHON="../bin/mine").returncode == 0
    assert [row["args"] for row in box.calls()] == [["-m", "pytest"]] * 2


def test_trainer_python_that_does_not_run_is_refused(box):
    result = box.launch(TRAINER_PYTHON="/nowhere/python")
    assert result.returncode == 2
    assert "TRAINER_PYTHON=/nowhere/python" in result.stderr


def test_test_runs_pytest_in_the_repository(box):
    (box.elsewhere / "test_mine.py").touch()
    args = ["-k", "a b", "tests/test_setup.py::test_x", "test_mine.py::test_y", "-m", "slow", "--maxfail=1"]
    assert box.launch("test", *args, FAKE_EXIT="5").returncode == 5
    (call,) = box.calls("-m", "pytest")
    expected = [*args[:3], f"{box.elsewhere}/test_mine.py::test_y", *args[4:]]
    assert call["args"] == ["-m", "pytest", *expected]
    assert call["cwd"] == str(box.root)


def test_python_variable_comes_first(box):
    box.fake("python3.12")
    own = box.fake("chosen")
    box.launch(PYTHON=str(own))
    assert box.calls("-m", "venv")[0]["program"] == str(own)


def test_python_that_cannot_run_is_passed_over(box):
    broken = box.bin / "python3"
    broken.write_text("#!/bin/sh\nexit 127\n")
    box.fake("python3.12")
    result = box.launch(PYTHON=str(broken))
    assert result.returncode == 0
    assert f"PYTHON={broken} is not a Python 3.11 or newer; looking for another" in result.stderr
    assert box.calls("-m", "venv")[0]["program"] == str(box.bin / "python3.12")


def test_old_python_is_refused(box):
    result = box.launch(FAKE_VERSION="3.10")
    assert result.returncode == 2
    assert "no Python 3.11 or newer" in result.stderr
    assert "PYTHON=/path/to/" in result.stderr


def test_no_python_is_refused(box):
    (box.bin / "python3").unlink()
    result = box.launch()
    assert result.returncode == 2
    assert "no Python 3.11 or newer" in result.stderr


def test_missing_venv_module_is_named_with_its_fix(box):
    result = box.launch(FAKE_NO_VENV="1")
    assert result.returncode == 2
    assert "venv module is missing" in result.stderr
    assert "apt install python3.12-venv" in result.stderr


def test_allocator_setting_only_with_cuda_and_never_over_the_users(box):
    def seen(**env: str) -> str | None:
        box.forget()
        box.launch(TRAINER_PYTHON=str(box.bin / "python3"), **env)
        return box.calls()[0]["env"].get("PYTORCH_ALLOC_CONF")

    if not Path("/proc/driver/nvidia/version").exists():
        assert seen() is None
    (box.bin / "nvidia-smi").write_text("#!/bin/sh\n")
    (box.bin / "nvidia-smi").chmod(0o755)
    assert seen() == ("expandable_segments:True" if sys.platform == "linux" else None)
    assert seen(PYTORCH_ALLOC_CONF="backend:native") == "backend:native"
    assert seen(PYTORCH_CUDA_ALLOC_CONF="backend:native") is None


def test_ci_runs_the_readmes_test_command(box):
    (box.root / ".ci").mkdir()
    shutil.copy(ROOT / ".ci/run", box.root / ".ci")
    result = box.launch(script=box.root / ".ci/run", FAKE_EXIT="3")
    assert result.returncode == 3
    (call,) = box.calls("-m", "pytest")
    assert (call["args"], call["cwd"]) == (["-m", "pytest"], str(box.root))
