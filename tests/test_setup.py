"""The set-up but for launch.sh: requirements.lock and the wheel."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path
from typing import NoReturn

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def lock_rows() -> list[str]:
    lines = (ROOT / "requirements.lock").read_text().splitlines()
    return [line.removesuffix(" \\") for line in lines if line.strip() and not line.startswith(("#", "    --hash="))]


def test_every_row_but_torchs_has_hashes():
    """A row goes on over the lines of its hashes; pip then refuses a file that is none of them."""
    rows = (ROOT / "requirements.lock").read_text().replace(" \\\n", " ").splitlines()
    bare = [row for row in rows if "==" in row and not re.fullmatch(r"\S+( +--hash=sha256:[0-9a-f]{64})+", row)]
    assert [row for row in bare if not row.startswith("#")] == [f"torch=={pins()['torch']}"]


def pins() -> dict[str, str]:
    return {canonicalize_name(name): version for name, version in (row.split("==") for row in lock_rows())}


def direct_requirements() -> list[Requirement]:
    return [Requirement(row) for row in PROJECT["dependencies"] + PROJECT["optional-dependencies"]["test"]]


def test_lock_rows_are_exact_public_versions():
    rows = lock_rows()
    assert [row for row in rows if not re.fullmatch(r"[A-Za-z0-9._-]+==[0-9][0-9a-z.]*", row)] == []
    assert len(pins()) == len(rows)


def test_lock_leaves_cuda_packages_to_torch():
    assert [row for row in lock_rows() if re.match(r"(nvidia|cuda|triton|pytorch-triton)", row)] == []


@pytest.mark.parametrize("requirement", direct_requirements(), ids=str)
def test_lock_pins_what_pyproject_asks_for(requirement):
    pinned = pins().get(canonicalize_name(requirement.name))
    assert pinned is not None, f"{requirement.name} is missing in requirements.lock"
    assert requirement.specifier.contains(pinned, prereleases=True)


def not_locked(why: str) -> NoReturn:
    """A failure in the environment that launch.sh makes from the lock; in another there is nothing to compare."""
    if Path(sys.prefix) == ROOT / ".venv":
        pytest.fail(f".venv is not what requirements.lock says: {why}")
    pytest.skip(f"not the locked environment: {why}")


def test_lock_is_the_closure_of_pyproject():
    """No package missing that one of ours asks for, none pinned that nobody asks for."""
    pinned = pins()
    for name, version in pinned.items():
        try:
            installed = metadata.version(name)
        except metadata.PackageNotFoundError:
            not_locked(f"{name} is not installed")
        if installed.split("+")[0] != version:
            not_locked(f"{name} is {installed}")
    wanted: set[str] = set()
    queue = direct_requirements()
    while queue:
        requirement = queue.pop()
        name = canonicalize_name(requirement.name)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        if name in wanted or re.match(r"(nvidia|cuda|triton)", name):
            continue
        wanted.add(name)
        queue += [Requirement(row) for row in metadata.requires(name) or []]
    assert wanted == set(pinned)


def packaged_files() -> dict[str, Path]:
    """Name in the wheel -> file in the repository, for all that is data and not code."""
    data = [*ROOT.glob("conf/**/*.yaml"), *ROOT.glob("recipes/*.yaml")]
    files = {f"trainer/{path.relative_to(ROOT)}": path for path in data}
    assets = [path for path in ROOT.glob("trainer/assets/**/*") if path.is_file() and path.suffix != ".pyc"]
    return files | {str(path.relative_to(ROOT)): path for path in assets}


def build(*command: str) -> None:
    done = subprocess.run([sys.executable, "-m", *command], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    build("pip", "wheel", "--no-deps", "--no-build-isolation", "-w", str(folder), str(ROOT))
    (path,) = folder.glob("trainer-*.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel) -> Path:
    target = wheel.parent / "installed"
    build("pip", "install", "--no-deps", "--no-compile", "--target", str(target), str(wheel))
    return target


@pytest.mark.slow
def test_wheel_carries_configuration_recipes_and_assets(installed):
    files = packaged_files()
    assert {"trainer/conf/config.yaml", "trainer/recipes/quickstart.yaml"} <= set(files)
    assert any(name.startswith("trainer/assets/") for name in files)
    assert [name for name in files if not (installed / name).is_file()] == []
    differing = [name for name, path in files.items() if (installed / name).read_bytes() != path.read_bytes()]
    assert differing == []


@pytest.mark.slow
def test_wheel_holds_one_package_and_nothing_else(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names} == {"trainer", f"trainer-{PROJECT['version']}.dist-info"}
    assert [name for name in names if "__pycache__" in name] == []


@pytest.mark.slow
def test_sdist_builds_the_same_wheel(wheel, tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    (sdist,) = tmp_path.glob("trainer-*.tar.gz")
    build("pip", "wheel", "--no-deps", "--no-build-isolation", "-w", str(tmp_path), str(sdist))
    (again,) = tmp_path.glob("trainer-*.whl")
    assert zipfile.ZipFile(again).namelist() == zipfile.ZipFile(wheel).namelist()


@pytest.mark.slow
def test_wheel_works_from_another_folder_with_the_users_own_recipes(installed, tmp_path):
    (tmp_path / "recipes").mkdir()
    shutil.copy(ROOT / "recipes/quickstart.yaml", tmp_path / "recipes/mine.yaml")

    def run(*args: str) -> str:
        env = os.environ | {"PYTHONPATH": str(installed), "PYTHONSAFEPATH": "1"}
        done = subprocess.run(
            [sys.executable, *args], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert run("-c", "import trainer; print(trainer.__file__)").startswith(str(installed))
    listed = run("-m", "trainer", "recipes")
    assert "quickstart" in listed
    assert "mine" in listed
    mine, shipped = (
        [line for line in run("-m", "trainer", f"recipe={name}", "--cfg", "job").splitlines() if line[:1] != "#"]
        for name in ("mine", "quickstart")
    )
    assert [line.replace("recipe: mine", "recipe: quickstart") for line in mine] == shipped


OPTIONS = """
from dataclasses import dataclass

from trainer.registry import option
from trainer.training.optimizers.optim import Optim


@option("optim", "plain_sgd")
@dataclass
class PlainSGD(Optim):
    def build(self, parameters):
        import torch

        return torch.optim.SGD(self.groups(parameters), lr=self.learning_rate)
"""


@pytest.mark.slow
def test_wheel_trains_with_the_users_own_optimizer(installed, tmp_path):
    """One class and one YAML beside the user's data."""
    (tmp_path / "conf/optim").mkdir(parents=True)
    (tmp_path / "my_options.py").write_text(OPTIONS)
    values = "defaults: [/schema/optim/plain_sgd@_here_]\nlearning_rate: 0.1\nweight_decay: 0.0\n"
    (tmp_path / "conf/optim/plain_sgd.yaml").write_text(values)
    words = "recipe=quickstart optim=plain_sgd train.max_steps=2 output_dir=run --options my_options.py"
    env = os.environ | {"PYTHONPATH": str(installed), "PYTHONSAFEPATH": "1"}
    command = [sys.executable, "-m", "trainer", *words.split()]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "optimizer plain_sgd" in done.stdout and (tmp_path / "run/adapter/adapter_model.safetensors").exists()
