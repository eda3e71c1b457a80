"""Models by id, against a hub on this machine: the library is the real one, only its address is another."""

from __future__ import annotations

import json
import shutil
import socket
from collections import namedtuple
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants

from tests.model.hub_stub import COMMIT, OLDER, hub_over
from tests.support import cli, make_model, metrics, train_here
from trainer.config.compose import compose
from trainer.errors import ConfigError, ModelError, StorageError
from trainer.model.loading import base as load
from trainer.model.loading import hub as module
from trainer.model.loading.architecture import skeleton
from trainer.model.loading.folder import INDEX, SINGLE

NAME = "some-one/tiny-model"
TOKEN = "hf_thisIsASecretThatMustNotShow"
CPU = torch.device("cpu")


@pytest.fixture
def hub(tiny, tmp_path, monkeypatch):
    """The stub with the tiny model, and older weights of it at another commit."""
    older = make_model(tmp_path / "older", seed=1).path
    with hub_over({NAME: {COMMIT: tiny.path, OLDER: older}}) as stub:
        monkeypatch.setattr(constants, "ENDPOINT", stub.url)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", constants_template(stub.url))
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_ETAG_TIMEOUT", 1)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        module.snapshot.cache_clear()
        yield stub
    module.snapshot.cache_clear()


def constants_template(url: str) -> str:
    return url + "/{repo_id}/resolve/{revision}/{filename}"


def model_of(*words: str):
    return compose([f"model.path={NAME}", "quant=none", "precision=fp32", *words]).config.model


def load_all(*words: str):
    run = compose([f"model.path={NAME}", "quant=none", "precision=fp32", *words])
    load.load_tokenizer(run.config.model)
    config = load.load_config(run.config.model)
    return load.load_base(run.config.model, config, run.config.quant, run.config.precision.build(CPU), CPU, "sdpa")


def same_weights(model, folder: Path) -> bool:
    from safetensors.torch import load_file

    files = load_file(folder / SINGLE)
    return all(torch.equal(value, files[name]) for name, value in model.state_dict().items())


def refused(kind=ModelError, *words: str) -> str:
    with pytest.raises(kind) as caught:
        load.load_config(model_of(*words))
    message = str(caught.value)
    assert "\n" not in message
    assert TOKEN not in message
    return message


def test_a_model_by_id_is_the_model_in_the_folder(hub, tiny):
    base = load_all()
    assert same_weights(base, tiny.path)
    assert base.name_or_path == NAME  # what an adapter's files will name
    assert base.config._commit_hash == COMMIT


def test_weights_come_last(hub):
    load.load_tokenizer(model_of())
    load.load_config(model_of())
    assert SINGLE not in hub.names()
    assert "tokenizer.json" in hub.names()


def test_a_pinned_revision_is_that_commit(hub, tmp_path):
    assert same_weights(load_all(f"model.revision={OLDER}"), tmp_path / "older")


def test_a_second_start_fetches_nothing(hub):
    load_all()
    hub.requests.clear()
    module.snapshot.cache_clear()
    load_all()
    assert hub.names() == []


def test_a_pinned_commit_in_the_cache_needs_no_hub(hub):
    load_all(f"model.revision={OLDER}")
    hub.requests.clear()
    module.snapshot.cache_clear()
    load_all(f"model.revision={OLDER}")
    assert hub.requests == []


@pytest.mark.parametrize("how", ["offline", "unreachable"])
def test_the_cache_does_without_the_hub(hub, tiny, monkeypatch, how):
    load_all()
    module.snapshot.cache_clear()
    hub.requests.clear()
    if how == "offline":
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    else:
        monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert same_weights(load_all(), tiny.path)
    assert hub.requests == []


def test_offline_without_a_cache_says_so(hub, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE is set" in refused()
    assert hub.requests == []


def test_a_download_that_was_cut_off(hub, tiny, tmp_path, monkeypatch):
    """Offline it is an error that says what to do; with the hub it goes on."""
    load_all()
    (weights,) = (tmp_path / "cache").rglob(f"snapshots/*/{SINGLE}")
    blob = weights.resolve()
    half = blob.read_bytes()[:1000]
    blob.with_name(blob.name + ".incomplete").write_bytes(half)
    blob.unlink()
    weights.unlink()
    module.snapshot.cache_clear()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match=r"only a part of it \(1 of 1 weight files"):
        load_all()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    module.snapshot.cache_clear()
    assert same_weights(load_all(), tiny.path)


def test_four_refusals_are_four_lines_without_the_token(hub):
    """C10. The hub refuses a gated model's files, and lists them all the same."""
    hub.refuse[NAME] = (401, "GatedRepo")
    unknown = refused()
    module.snapshot.cache_clear()
    hub.refuse[NAME] = (403, "GatedRepo")
    gated = refused()
    module.snapshot.cache_clear()
    hub.refuse_listing[NAME] = (404, "RepoNotFound")
    missing = refused()
    module.snapshot.cache_clear()
    hub.hang_seconds = 2.5
    slow = refused()
    assert f"Bearer {TOKEN}" in hub.tokens  # the token was used, and is in no message
    assert "(401)" in unknown and "HF_TOKEN" in unknown
    assert "(403)" in gated and "licence" in gated
    assert "(404)" in missing and "no such model" in missing
    assert "time-out" in slow and "local folder" in slow
    assert all(f"model.path={NAME}" in line for line in (unknown, gated, missing, slow))


def test_an_address_that_swallows_everything(hub, monkeypatch):
    """A queue that is full: the kernel drops whoever knocks, as a black-holed route does."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as server, ExitStack() as waiting:
        for _ in range(2):
            knocking = waiting.enter_context(socket.socket())
            knocking.setblocking(False)
            knocking.connect_ex(server.getsockname())
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        assert "did not answer within 1 s (time-out)" in refused()


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.0, 0.5], ids=["nothing", "half"])
@pytest.mark.parametrize("name", ["tokenizer.json", SINGLE])
def test_a_line_that_falls_silent(hub, monkeypatch, name, share):
    """The hub answers, and in the middle of a file says no more: an end in bounded time, in words."""
    monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 1)
    hub.silent[name] = share
    with pytest.raises(ModelError, match="did not answer within") as error:  # else the stub hangs up, after a minute
        load_all()
    assert TOKEN not in str(error.value) and "\n" not in str(error.value)
    hub.silent.clear()
    module.snapshot.cache_clear()
    load_all()  # what is half there is no obstacle


@pytest.mark.parametrize("status", [401, 403])
def test_a_refused_listing_is_told_apart_too(hub, status):
    hub.refuse_listing[NAME] = (status, "")
    assert f"({status})" in refused()


def test_a_hub_in_trouble(hub):
    hub.refuse_listing[NAME] = (503, "")
    assert "in trouble (503)" in refused()


def test_a_wrong_revision(hub):
    message = refused(ModelError, "model.revision=v9")
    assert "model.revision=v9" in message and "no such revision (404)" in message


def test_no_id_at_all(hub):
    with pytest.raises(ModelError, match="neither a folder here nor a hub id"):
        load.load_config(compose(["model.path='no id'"]).config.model)


def test_space_is_checked_before_the_download(hub, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(2**40, 0, 2**33))
    hub.claimed_sizes[SINGLE] = 2**34
    message = refused(StorageError)
    assert "16.0 GiB are to be downloaded, and 8.0 GiB are free" in message
    assert SINGLE not in hub.names()


def test_pickled_weights_are_not_fetched(hub, tiny, tmp_path):
    folder = tmp_path / "pickled"
    shutil.copytree(tiny.path, folder)
    (folder / SINGLE).rename(folder / "pytorch_model.bin")
    hub.commits[NAME] = {COMMIT: folder}
    assert "only pickled weights" in refused()
    assert hub.names() == []


def test_a_hostile_listing_writes_nothing_elsewhere(hub, tmp_path):
    hub.extra += ["../../outside.json", "/outside.json"]
    load_all()
    assert not list(tmp_path.rglob("outside.json"))


@pytest.mark.parametrize("name", ["../model.safetensors", "/tmp/model.safetensors", "..\\model.safetensors", "m.bin"])
@pytest.mark.parametrize("where", ["folder", "hub"])
def test_an_index_that_leads_out_of_the_folder(hub, tiny, tmp_path, name, where):
    folder = tmp_path / "indexed"
    shutil.copytree(tiny.path, folder)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": {"lm_head.weight": name}}))
    hub.commits[NAME] = {COMMIT: folder}
    path = NAME if where == "hub" else folder
    with pytest.raises(ModelError, match="do not trust this model"):
        load.load_config(compose([f"model.path={path}"]).config.model)


@pytest.mark.parametrize("name", [SINGLE, "chat_template.jinja", "deep/extra.json"])
def test_a_link_out_of_the_folder(tiny, tmp_path, name, capsys):
    """What it leads to would be read, and templates and tokenizers are copied beside the result."""
    folder, outside = tmp_path / "linked", tmp_path / "outside"
    shutil.copytree(tiny.path, folder)
    outside.write_bytes((tiny.path / SINGLE).read_bytes())
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(outside)
    with pytest.raises(ModelError, match="is a link out of the folder") as error:
        load.load_config(compose([f"model.path={folder}"]).config.model)
    assert error.value.exit_code == 4 and f"{name} is a link" in str(error.value)


def test_an_index_that_names_a_link_out_of_the_folder(tiny, tmp_path):
    folder, outside = tmp_path / "linked", tmp_path / "outside.safetensors"
    shutil.copytree(tiny.path, folder)
    (folder / SINGLE).rename(outside)
    (folder / "part.safetensors").symlink_to(outside)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": {"lm_head.weight": "part.safetensors"}}))
    with pytest.raises(ModelError, match=r"part\.safetensors is a link out of the folder"):
        load.load_config(compose([f"model.path={folder}"]).config.model)


def test_links_inside_the_folder_and_a_snapshots_own_blobs_are_followed(tiny, tmp_path):
    inside = tmp_path / "inside"
    shutil.copytree(tiny.path, inside)
    (inside / SINGLE).rename(inside / "whole.safetensors")
    (inside / SINGLE).symlink_to("whole.safetensors")
    store = tmp_path / "models--o--n"
    snapshot = store / "snapshots" / COMMIT
    shutil.copytree(tiny.path, snapshot)
    (store / "blobs").mkdir()
    (snapshot / SINGLE).rename(store / "blobs" / "abc")
    (snapshot / SINGLE).symlink_to("../../blobs/abc")
    for folder in (inside, snapshot):
        load.load_config(compose([f"model.path={folder}"]).config.model)
    (store / "blobs" / "abc").rename(tmp_path / "elsewhere")
    (store / "blobs" / "abc").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ModelError, match="is a link out of the folder"):
        load.load_config(compose([f"model.path={snapshot}"]).config.model)


def test_a_cut_off_weight_file_in_a_folder(tiny, tmp_path):
    folder = tmp_path / "cut"
    shutil.copytree(tiny.path, folder)
    content = (folder / SINGLE).read_bytes()
    for broken in (content[:-1], content[:100], b"", content[:8]):
        (folder / SINGLE).write_bytes(broken)
        with pytest.raises(ModelError, match="damaged or cut off"):
            load.load_config(compose([f"model.path={folder}"]).config.model)


def test_a_missing_shard(tiny, tmp_path):
    folder = tmp_path / "sharded"
    shutil.copytree(tiny.path, folder)
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    (folder / SINGLE).rename(folder / names[0])
    (folder / INDEX).write_text(json.dumps({"weight_map": {"a": names[0], "b": names[1]}}))
    with pytest.raises(ModelError, match=f"1 of 2 weight files are missing: {names[1]}"):
        load.load_config(compose([f"model.path={folder}"]).config.model)


def with_code(folder: Path, source: Path, mark: Path, model_type: str) -> Path:
    """The model with code of its own, which leaves a mark when it runs."""
    shutil.copytree(source, folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {
        "model_type": model_type,
        "auto_map": {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnForCausalLM"},
        "architectures": ["OwnForCausalLM"],
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "own.py").write_text(
        "from transformers import LlamaConfig, LlamaForCausalLM\n"
        f"open({str(mark)!r}, 'w').close()\n"
        f"class OwnConfig(LlamaConfig):\n    model_type = {model_type!r}\n"
        "class OwnForCausalLM(LlamaForCausalLM):\n    config_class = OwnConfig\n"
    )
    return folder


@pytest.mark.parametrize("model_type", ["llama", "own"])
def test_a_models_own_code_is_not_run(tiny, tmp_path, model_type):
    """C9."""
    folder = with_code(tmp_path / "own", tiny.path, tmp_path / "mark", model_type)
    for load_part in (load.load_tokenizer, load.load_config):
        with pytest.raises(ModelError, match=r"auto_map in config.json.*model.trust_remote_code=true"):
            load_part(compose([f"model.path={folder}"]).config.model)
    assert not (tmp_path / "mark").exists()


def test_own_code_runs_only_with_the_flag_and_a_commit(tiny, tmp_path, monkeypatch):
    folder = with_code(tmp_path / "own", tiny.path, tmp_path / "mark", "own")
    flag = [f"model.path={folder}", "model.trust_remote_code=true", "quant=none", "precision=fp32"]
    for revision in ([], ["model.revision=main"]):
        with pytest.raises(ConfigError, match="must be a commit"):
            compose([*flag, *revision])
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "mine.yaml").write_text("model:\n  trust_remote_code: true\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"mine.yaml:2: .*only the command line"):
        compose(["recipe=mine", f"model.revision={COMMIT}"])
    run = compose([*flag, f"model.revision={COMMIT}"])
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    config = load.load_config(run.config.model)
    skeleton(config, True)
    assert (tmp_path / "mark").exists()


def test_another_architecture_than_the_recipe_says_is_said(tiny):
    model = compose([f"model.path={tiny.path}"]).config.model  # the default block is the embedded tiny model's
    line = load.differences(model, load.load_config(model))
    assert "hidden_size 64 (recipe: 192)" in line
    assert "num_hidden_layers 2 (recipe: 4)" in line
    assert "num_key_value_heads" not in line  # 2 in both
    model.architecture["model_type"] = "mistral"
    assert "model_type llama (recipe: mistral)" in load.differences(model, load.load_config(model))
    embedded = compose([]).config.model
    assert load.differences(embedded, load.load_config(embedded)) is None


def test_a_run_from_the_hub_equals_the_run_from_the_folder(hub, tiny, base_overrides, tmp_path):
    words = [*base_overrides, "train.max_steps=2"]
    train_here(words, tmp_path / "folder")
    train_here([*words, f"model.path={NAME}"], tmp_path / "hub")
    losses = [[row["loss"] for row in metrics(tmp_path / run)] for run in ("folder", "hub")]
    assert losses[0] == losses[1]
    manifest = json.loads((tmp_path / "hub" / "manifest.json").read_text())
    assert (manifest["model"], manifest["model_revision"]) == (NAME, COMMIT)
    adapter = json.loads((tmp_path / "hub" / "adapter" / "adapter_config.json").read_text())
    assert adapter["base_model_name_or_path"] == NAME


def test_a_quantised_base_from_the_hub_is_cached_by_its_commit(hub, tmp_path, monkeypatch):
    """The second start fetches nothing and has the bits of the first; another commit is another entry."""
    monkeypatch.setenv("TRAINER_CACHE", str(tmp_path / "quantised"))
    words = ["quant=nf4", "model.quantized_cache=true"]
    first = load_all(*words).state_dict()
    hub.requests.clear()
    module.snapshot.cache_clear()
    second = load_all(*words).state_dict()
    assert hub.names() == []
    assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)
    load_all(*words, f"model.revision={OLDER}")
    assert len(list((tmp_path / "quantised" / "models").iterdir())) == 2


def test_the_command_through_the_environment_alone(hub, chats, tmp_path):
    """HF_ENDPOINT and HF_TOKEN as a user sets them: a refusal is one line with code 4, the token nowhere (C7)."""
    environment = {
        "HF_ENDPOINT": hub.url,
        "HF_HOME": str(tmp_path / "home"),
        "HF_HUB_OFFLINE": "0",
        "HF_TOKEN": TOKEN,
    }
    hub.refuse[NAME] = (403, "GatedRepo")
    words = ["debug=true", f"model.path={NAME}", "data=file", f"data.path={chats}", f"output_dir={tmp_path}/run"]
    done = cli(*words, env=environment)
    assert done.returncode == 4
    assert "does not let you in (403)" in done.stderr.splitlines()[-1]
    assert TOKEN not in done.stdout + done.stderr
