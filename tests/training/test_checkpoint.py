"""Checkpoints: what rotation keeps, what a full disk costs, and that each file comes back bit for bit."""

from __future__ import annotations

import errno
import json
import resource

import pytest
import torch
from peft import LoraConfig, get_peft_model

from tests.factories import llama
from tests.processes import in_child
from tests.support import train_here
from trainer.errors import StorageError
from trainer.training import checkpoint as module
from trainer.training.checkpoint import Checkpoints, damage, load_checkpoint, load_state, seal
from trainer.training.state import State, Window, rng_state

CPU = torch.device("cpu")


def lora_and_optimizer(seed: int = 0):
    torch.manual_seed(seed)
    model = get_peft_model(llama(), LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False))
    return model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)


def step(model, optimizer):
    model(input_ids=torch.arange(10)[None], labels=torch.arange(10)[None]).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.fixture
def trained():
    model, optimizer = lora_and_optimizer()
    step(model, optimizer)
    return model, optimizer


def weights(model):
    return {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}


def test_everything_comes_back(trained, tmp_path):
    model, optimizer = trained
    window = Window(torch.tensor(2.5), 7, 20, 1e9, 0.25)
    state = State(
        step=3, num_tokens=60, num_targets=21, seconds=1.5, skipped_steps=2, skipped_in_a_row=1, window=window
    )
    torch.manual_seed(77)
    rng = rng_state(CPU)
    drawn = torch.rand(3)
    folder = Checkpoints(tmp_path, 2).save(model, optimizer, state, rng)

    other, other_optimizer = lora_and_optimizer(seed=5)
    loaded = load_state(folder)
    load_checkpoint(folder, other, other_optimizer, CPU)
    assert torch.equal(torch.rand(3), drawn)
    assert loaded.to_json() == state.to_json() and loaded.window.loss_sum == 2.5
    for name, weight in weights(model).items():
        assert torch.equal(weight, weights(other)[name])
    step(model, optimizer)
    step(other, other_optimizer)
    for name, weight in weights(model).items():
        assert torch.equal(weight, weights(other)[name]), "the optimizer's state did not come back"


def test_no_file_is_a_pickle(trained, tmp_path):
    folder = Checkpoints(tmp_path, 2).save(*trained, State(step=1), rng_state(CPU))
    assert {file.suffix for file in folder.iterdir()} == {".safetensors", ".json"}
    manifest = json.loads((folder / "manifest.json").read_text())
    assert set(manifest["files"]) == {file.name for file in folder.iterdir()} - {"manifest.json"}


def test_rotation_keeps_best_and_last(trained, tmp_path):
    """R5: best at step 2, keep 1, five saves."""
    checkpoints = Checkpoints(tmp_path, keep=1)
    for number in range(1, 6):
        checkpoints.save(*trained, State(step=number, best_step=min(number, 2)), rng_state(CPU))
    assert checkpoints.names() == ["step-00000002", "step-00000005"]
    assert checkpoints.pointer("best") == "step-00000002" and checkpoints.pointer("last") == "step-00000005"
    assert (tmp_path / "best").read_text() == "step-00000002\n"
    assert all(damage(tmp_path / name) is None for name in checkpoints.names())


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_rotation_keeps_the_newest(keep, trained, tmp_path):
    checkpoints = Checkpoints(tmp_path, keep)
    for number in range(1, 6):
        checkpoints.save(*trained, State(step=number), rng_state(CPU))
    assert checkpoints.names() == [f"step-{n:08d}" for n in range(6 - keep, 6)]


def test_a_save_replaces_the_folder_of_its_step_and_removes_what_kills_left(trained, tmp_path):
    checkpoints = Checkpoints(tmp_path, 2)
    for left in (".building-step-00000007", ".old-step-00000002", "step-00000003"):
        (tmp_path / left).mkdir()
        (tmp_path / left / "x").write_text("half")
    folder = checkpoints.save(*trained, State(step=3), rng_state(CPU))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["last", "step-00000003"]
    assert damage(folder) is None and not (folder / "x").exists()


def test_a_folder_without_a_complete_manifest_does_not_exist(trained, tmp_path):
    checkpoints = Checkpoints(tmp_path, 5)
    for number in (1, 2, 3):
        checkpoints.save(*trained, State(step=number), rng_state(CPU))
    (tmp_path / "step-00000003/manifest.json").unlink()
    text = (tmp_path / "step-00000002/manifest.json").read_text()
    (tmp_path / "step-00000002/manifest.json").write_text(text[: len(text) // 2])
    said = []
    assert checkpoints.newest(said.append).name == "step-00000001"
    assert [line.split()[1] for line in said] == ["step-00000003", "step-00000002"]


@pytest.mark.parametrize("where", ["save_trainable", "save_optimizer", "save_file", "seal", "replace_folder"])
def test_a_full_disk_keeps_the_checkpoint_before(where, trained, tmp_path, monkeypatch):
    """R9, wherever the disk fills up."""
    checkpoints = Checkpoints(tmp_path, 1)
    checkpoints.save(*trained, State(step=1), rng_state(CPU))

    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(module, where, full)
    with pytest.raises(StorageError) as error:
        checkpoints.save(*trained, State(step=2), rng_state(CPU))
    message = str(error.value)
    assert error.value.exit_code == 5
    assert "No space left on device" in message and "MiB free" in message and "kept is step-00000001" in message
    assert sorted(p.name for p in tmp_path.iterdir()) == ["last", "step-00000001"]
    assert damage(tmp_path / "step-00000001") is None and checkpoints.pointer("last") == "step-00000001"


def limit_files(size: int) -> None:
    """From now on the kernel refuses to write beyond `size` bytes of any file of this process."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


def test_a_write_that_the_kernel_refuses_ends_with_5_and_an_intact_checkpoint(base_overrides, tmp_path, capfd):
    """R9, for real: safetensors' own writer and ours meet the kernel's refusal at the second checkpoint."""
    run = tmp_path / "run"
    real = Checkpoints.save

    def save(self, model, optimizer, state, rng):
        if state.step == 3:
            limit_files(20_000)
        return real(self, model, optimizer, state, rng)

    def work():
        Checkpoints.save = save
        train_here([*base_overrides, "train.max_steps=6", "train.save_every=1", "train.keep_checkpoints=1"], run)

    assert in_child(work) == 5
    assert "checkpoint step-00000003 could not be written" in capfd.readouterr().err
    assert sorted(p.name for p in (run / "checkpoints").iterdir()) == ["last", "step-00000002"]
    assert damage(run / "checkpoints/step-00000002") is None
    assert json.loads((run / "summary.json").read_text())["status"] == "failed"
    assert (
        train_here([*base_overrides, "train.max_steps=6", "train.save_every=1", "train.keep_checkpoints=1"], run)[
            "status"
        ]
        == "completed"
    )


def test_a_result_that_cannot_be_written_ends_with_5_and_can_be_made_up(base_overrides, tmp_path, monkeypatch):
    from trainer.export import result

    run = tmp_path / "run"

    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch, pytest.raises(StorageError, match="No space left") as error:
        patch.setattr(result, "save_trainable", full)
        train_here(base_overrides, run)
    assert error.value.exit_code == 5 and not (run / "adapter").exists()
    train_here(base_overrides, run)
    assert (run / "adapter/adapter_model.safetensors").is_file()


def test_metrics_that_cannot_be_written_end_with_5(base_overrides, tmp_path, capfd):
    """The disk may fill up between checkpoints too."""
    run = tmp_path / "run"

    def work():
        from trainer.tracking.metrics import Metrics

        real = Metrics.write

        def write(self, event, **values):
            if values.get("step") == 3:
                limit_files(900)  # stderr, a file under pytest, must still hold the message
            return real(self, event, **values)

        Metrics.write = write
        train_here([*base_overrides, "train.max_steps=6", "train.save_every=1"], run)

    assert in_child(work) == 5
    assert "File too large" in capfd.readouterr().err
    assert damage(run / "checkpoints/step-00000002") is None


def test_seal_and_damage_cover_folders_in_folders(tmp_path):
    (tmp_path / "a/b").mkdir(parents=True)
    (tmp_path / "a/b/file").write_bytes(b"x" * 100)
    (tmp_path / "state.json").write_text("{}")
    seal(tmp_path, {"step": 1})
    assert damage(tmp_path) is None
    (tmp_path / "a/b/file").write_bytes(b"x" * 99 + b"y")
    assert damage(tmp_path) == "a/b/file is not as it was written"


def test_what_is_learnt_later_is_added_without_a_second_save(trained, tmp_path):
    """amend: the other files are the same files, every byte is as its manifest says, and `best` is right."""
    checkpoints = Checkpoints(tmp_path, 2, "a")
    state = State(step=3)
    folder = checkpoints.save(*trained, state, rng_state(CPU))
    before = {file.name: file.stat().st_ino for file in folder.iterdir()}
    state.evaluated_step = state.best_step = 3
    state.eval_loss = 0.5
    checkpoints.amend(state)
    assert load_state(folder).to_json() == state.to_json() and damage(folder) is None
    after = {file.name: file.stat().st_ino for file in folder.iterdir()}
    assert {name for name in before if before[name] != after[name]} == {"state.json", "manifest.json"}
    assert checkpoints.pointer("best") == "step-00000003"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["best", "last", "step-00000003"]


def test_a_kill_between_two_names_loses_nothing(trained, tmp_path):
    checkpoints = Checkpoints(tmp_path, 2)
    checkpoints.save(*trained, State(step=1), rng_state(CPU))
    (tmp_path / "step-00000001").rename(tmp_path / ".old-step-00000001")
    assert checkpoints.newest(print).name == "step-00000001"


@pytest.mark.parametrize(
    "values", [{"step": "x"}, {"step": 2}, {"seconds": None}, {"window": 5}, {"window": {}}, {"strange": 1}]
)
def test_a_state_that_no_run_wrote_is_one_line(values, trained, tmp_path):
    folder = Checkpoints(tmp_path, 2).save(*trained, State(step=1), rng_state(CPU))
    content = json.loads((folder / "state.json").read_text())
    content = content | values if values != {"window": {}} else content | {"window": {"seconds": "x"}}
    (folder / "state.json").write_text(json.dumps(content))
    with pytest.raises(StorageError, match="cannot be loaded into this run"):
        load_state(folder)


@pytest.mark.parametrize("facts", [{}, {"step": 1, "run_id": None}, {"step": "1", "run_id": 5}, {"step": [1]}])
def test_odd_facts_of_a_checkpoint_never_raise(facts, trained, tmp_path):
    folder = Checkpoints(tmp_path, 2).save(*trained, State(step=1), rng_state(CPU))
    (folder / "manifest.json").unlink()
    seal(folder, facts)
    assert Checkpoints(tmp_path, 2, "a").newest(lambda line: None) is None
