"""The quantised cache: the second start gives the same bits without the source's weights; what changes makes a new
entry; a damaged entry is said and made anew; a disk that refuses costs nothing."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time

import pytest
import torch

from tests.factories import FP32, option
from tests.support import make_model, metrics, train_here
from trainer.config.compose import compose
from trainer.errors import ConfigError
from trainer.model.loading import base as load
from trainer.model.loading import quantized_cache
from trainer.model.loading.model_source import ModelSource
from trainer.model.model_settings import Weights
from trainer.model.precision import Dtypes

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TRAINER_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "models"


@pytest.fixture
def counted(monkeypatch) -> list:
    """One entry each time the weights are read from the source."""
    calls, real = [], load._from_files
    monkeypatch.setattr(load, "_from_files", lambda *a: calls.append(a) or real(*a))
    return calls


def build(folder, quant="nf4", dtypes: Dtypes = FP32, cached: bool = True, **changes):
    model = option("model", "tiny", path=str(folder), weights=Weights.pretrained, quantized_cache=cached)
    return load.load_base(model, load.load_config(model), option("quant", quant, **changes), dtypes, CPU, "sdpa")


def same_bits(one, two) -> None:
    """State with every quantisation constant, buffers that are in no state, and what the arithmetic reads."""
    for ours, theirs in ((one.state_dict(), two.state_dict()), (dict(one.named_buffers()), dict(two.named_buffers()))):
        assert ours.keys() == theirs.keys()
        for name, tensor in ours.items():
            assert tensor.dtype is theirs[name].dtype and torch.equal(tensor, theirs[name]), name
    for (name, a), (_, b) in zip(one.named_parameters(), two.named_parameters(), strict=True):
        assert a.requires_grad is b.requires_grad and type(a) is type(b), name
        if (state := getattr(a, "quant_state", None)) is not None:
            other = b.quant_state
            assert (state.shape, state.dtype, state.blocksize) == (other.shape, other.dtype, other.blocksize)
            assert state.quant_type == other.quant_type and state.nested is other.nested
            if state.nested:
                assert torch.equal(state.offset, other.offset) and state.state2.dtype is other.state2.dtype
                assert state.state2.blocksize == other.state2.blocksize
    for (name, a), (_, b) in zip(one.named_modules(), two.named_modules(), strict=True):
        for field in ("compute_dtype", "support_avx512bf16_for_cpu"):
            assert getattr(a, field, None) == getattr(b, field, None), name
    assert one.name_or_path == two.name_or_path and one.is_loaded_in_4bit is two.is_loaded_in_4bit
    assert one.generation_config == two.generation_config
    assert one.config.to_dict() == two.config.to_dict()


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("quant", "double"), [("nf4", True), ("nf4", False), ("fp4", True)])
def test_the_second_start_has_the_same_bits_and_reads_no_source(quant, double, dtype, tied, tmp_path, counted, capsys):
    model, dtypes = make_model(tmp_path / "model", tied=tied), Dtypes(dtype, "cpu")
    plain = build(model.path, quant, dtypes, cached=False, double_quant=double)
    first = build(model.path, quant, dtypes, double_quant=double)
    assert len(counted) == 2 and "stored for the next start" in capsys.readouterr().err
    second = build(model.path, quant, dtypes, double_quant=double)
    assert len(counted) == 2 and "quantised base from" in capsys.readouterr().err
    same_bits(plain, first)
    same_bits(plain, second)
    ids = torch.arange(5, 37)[None]
    with dtypes.autocast(), torch.no_grad():
        assert torch.equal(plain(ids).logits, second(ids).logits)
    assert (second.get_input_embeddings().weight is second.get_output_embeddings().weight) is tied


def test_an_entry_holds_its_files_and_their_hashes(tiny, cache):
    build(tiny.path)
    (entry,) = cache.iterdir()
    hashes = json.loads((entry / "manifest.json").read_text())
    assert sorted(hashes) == ["config.json", "generation_config.json", "model.safetensors"]
    assert {file.name for file in entry.iterdir()} == {*hashes, "manifest.json"}
    for name, value in hashes.items():
        assert hashlib.sha256((entry / name).read_bytes()).hexdigest() == value
    assert cache.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("settled", [0, 3600], ids=["hashes remembered", "hashes made each time"])
def test_what_changes_the_bits_makes_another_entry(settled, tmp_path, cache, counted, monkeypatch):
    monkeypatch.setattr(quantized_cache, "SETTLED_SECONDS", settled)
    folder = make_model(tmp_path / "model").path
    for changes in ({}, {"quant": "fp4"}, {"double_quant": False}, {"dtypes": Dtypes(torch.bfloat16, "cpu")}):
        build(folder, **changes)
    assert len(counted) == 4
    times = os.stat(folder / "model.safetensors")
    shutil.copyfile(make_model(tmp_path / "other", seed=1).path / "model.safetensors", folder / "model.safetensors")
    os.utime(folder / "model.safetensors", ns=(times.st_atime_ns, times.st_mtime_ns))  # same size, same time
    other = build(folder)
    assert len(counted) == 5
    same_bits(other, build(folder, cached=False))
    monkeypatch.setattr("bitsandbytes.__version__", "0.0.1")
    build(folder)
    assert len(counted) == 7 and len(list(cache.iterdir())) == 6


def test_a_sources_hash_is_made_once_while_nothing_touches_it(tmp_path, monkeypatch):
    file, hashed, real = tmp_path / "weights", [], quantized_cache._sha256
    monkeypatch.setattr(quantized_cache, "_sha256", lambda file: hashed.append(file) or real(file))
    monkeypatch.setattr(quantized_cache, "SETTLED_SECONDS", 0)
    for content in (b"one", b"two", b"two"):
        file.write_bytes(content)
        for _ in range(2):
            assert quantized_cache._known_sha256(file) == hashlib.sha256(content).hexdigest()
            time.sleep(0.02)  # a file system's tick
    assert 3 <= len(hashed) <= 4
    (memo,) = (tmp_path / "cache" / "hashes").iterdir()
    memo.write_text("[]")
    assert quantized_cache._known_sha256(file) == hashlib.sha256(b"two").hexdigest()
    monkeypatch.setattr(quantized_cache, "SETTLED_SECONDS", 3600)
    file.write_bytes(b"new")
    count = len(hashed)
    assert [quantized_cache._known_sha256(file) for _ in range(2)] == [hashlib.sha256(b"new").hexdigest()] * 2
    assert len(hashed) == count + 2


def test_a_hub_models_entry_is_named_by_its_commit(tiny, monkeypatch):
    def key(commit, path="owner/name"):
        found = load.hub.HubSnapshot(path, commit, tiny.path, None)
        return quantized_cache._key(ModelSource(tiny.path, "model.path=x", found), config, torch.float32, CPU)

    config = option("quant", "nf4").config(torch.float32)
    hashed, real = [], quantized_cache._sha256
    monkeypatch.setattr(quantized_cache, "_sha256", lambda file: hashed.append(file) or real(file))
    assert key("a" * 40) == key("a" * 40)
    assert len({key("a" * 40), key("b" * 40), key("a" * 40, "owner/other")}) == 3
    assert not any(file.suffix == ".safetensors" for file in hashed)


def flip(file):
    content = bytearray(file.read_bytes())
    content[-100] ^= 1
    file.write_bytes(content)


DAMAGES = {
    "one bit": lambda entry: flip(entry / "model.safetensors"),
    "cut off": lambda entry: os.truncate(entry / "model.safetensors", 1000),
    "no weights": lambda entry: (entry / "model.safetensors").unlink(),
    "no manifest": lambda entry: (entry / "manifest.json").unlink(),
    "odd manifest": lambda entry: (entry / "manifest.json").write_text("[]"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_entry_is_said_and_made_anew(damage, tiny, cache, counted, capsys):
    plain = build(tiny.path, cached=False)
    build(tiny.path)
    (entry,) = cache.iterdir()
    DAMAGES[damage](entry)
    capsys.readouterr()
    same_bits(plain, build(tiny.path))
    said = capsys.readouterr().err
    assert f"{entry}: this quantised base is damaged; it is made anew" in said and "stored for the next start" in said
    assert len(counted) == 3
    same_bits(plain, build(tiny.path))
    assert len(counted) == 3 and list(cache.iterdir()) == [entry]


def test_a_disk_that_refuses_is_said_and_leaves_nothing(tiny, cache, monkeypatch, capsys):
    def refuses(*_, **__):
        raise RuntimeError("I/O error: No space left on device (os error 28)")

    plain = build(tiny.path, cached=False)
    monkeypatch.setattr(quantized_cache, "save_file", refuses)
    same_bits(plain, build(tiny.path))
    assert "no quantised cache" in (said := capsys.readouterr().err) and "No space left" in said
    assert list(cache.iterdir()) == []


def test_a_race_keeps_the_entry_that_was_first(tiny, cache, monkeypatch, capsys):
    build(tiny.path)
    monkeypatch.setattr(quantized_cache.Path, "exists", lambda _: False)  # both looked before either had stored
    build(tiny.path)
    assert "cannot be written" not in capsys.readouterr().err
    assert len(list(cache.iterdir())) == 1


def test_a_run_is_the_same_with_and_without(base_overrides, tmp_path, cache):
    overrides = [*base_overrides, "quant=nf4", "train.max_steps=2"]
    train_here(overrides, tmp_path / "plain")
    train_here([*overrides, "model.quantized_cache=true"], tmp_path / "first")
    train_here([*overrides, "model.quantized_cache=true"], tmp_path / "second")
    losses = [[row["loss"] for row in metrics(tmp_path / name)] for name in ("plain", "first", "second")]
    assert len(losses[0]) == 2 and losses[0] == losses[1] == losses[2]
    files = [(tmp_path / name / "adapter" / "adapter_model.safetensors").read_bytes() for name in ("plain", "second")]
    assert files[0] == files[1]
    configs = [(tmp_path / name / "adapter" / "adapter_config.json").read_text() for name in ("plain", "second")]
    assert configs[0] == configs[1]


@pytest.mark.parametrize(
    "words",
    [
        ("quant=none",),
        ("quant=int8",),
        ("quant=nf4", "model.weights=random"),
        ("quant=nf4", "model.trust_remote_code=true", f"model.revision={'a' * 40}"),
    ],
)
def test_where_it_would_do_nothing_it_is_refused(words, base_overrides):
    with pytest.raises(ConfigError, match=r"model\.quantized_cache=true"):
        compose([*base_overrides, "model.quantized_cache=true", *words])
