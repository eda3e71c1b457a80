"""The quantised base, stored once and loaded straight: model.quantized_cache=true.

An entry is a folder named by a hash over the source (the hub's commit, or the content of the files), the quantisation,
the dtype, the device, and the code and libraries that made it. It holds one safetensors file in the model's own names
beside copies of the source's configuration, and appears whole or not at all. Every file's sha256 is checked before it
is read; an entry that is damaged is made anew, and that is said.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from trainer.model.loading.folder import CONFIG, SINGLE, weight_files
from trainer.units import GIB

if TYPE_CHECKING:
    from trainer.model.loading.model_source import ModelSource

MANIFEST, GENERATION = "manifest.json", "generation_config.json"
SETTLED_SECONDS = 2
"""How long a file must have been left alone before its hash is remembered: clocks of file systems tick coarsely."""


def say(text: str) -> None:
    """Where a base came from, on stderr: an answer of generate stays alone on stdout."""
    print(f"trainer: {text}", file=sys.stderr)


def through_cache(
    source: ModelSource,
    config: PretrainedConfig,
    quantization: Any,
    dtype: torch.dtype,
    device: torch.device,
    attention: str,
    load: Callable[[], PreTrainedModel],
) -> PreTrainedModel:
    """The base from the cache, or the one that `load` makes, which is then stored.

    `quantization` is the BitsAndBytesConfig that `load` quantises with. A cache that cannot be written is said and
    costs the run nothing.
    """
    folder = _root() / _key(source, quantization, dtype, device)
    if folder.exists():
        if _whole(folder):
            say(f"quantised base from {folder}")
            return _open(folder, config, quantization, dtype, device, attention)
        say(f"{folder}: this quantised base is damaged; it is made anew")
        shutil.rmtree(folder, ignore_errors=True)
    base = load()
    try:
        size = _store(base, source, folder)
    except OSError as error:
        say(f"no quantised cache: {folder.parent} cannot be written ({error.strerror or error})")
    else:
        say(f"quantised base stored for the next start: {folder} ({size / GIB:.2f} GiB)")
    return base


def _root() -> Path:
    """Beside the token caches, whose place in conf/data is the same."""
    return Path(os.path.expanduser(os.environ.get("TRAINER_CACHE", "~/.cache/trainer"))) / "models"


def _key(source: ModelSource, quantization: Any, dtype: torch.dtype, device: torch.device) -> str:
    import bitsandbytes
    import transformers

    if source.hub is not None:
        content: Any = [source.hub.path, source.hub.commit]
    else:
        names = [CONFIG, GENERATION, *weight_files(source.folder, source.asked)]
        content = {name: _known_sha256(source.folder / name) for name in names if (source.folder / name).is_file()}
    parts = {
        "source": content,
        "quantization": quantization.to_dict(),
        "dtype": str(dtype),
        "device": device.type,  # each kind of device rounds in its own way
        "versions": [torch.__version__, transformers.__version__, bitsandbytes.__version__],
        "code": [_sha256(Path(__file__).parent / name) for name in ("base.py", "../families.py", Path(__file__).name)],
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:32]


def _known_sha256(file: Path) -> str:
    """The sha256 of a source's file, remembered for as long as the system saw nothing change it (ctime, not mtime)."""
    stat = file.stat()
    mark = [stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns]
    name = hashlib.sha256(str(file.absolute()).encode("utf-8", "surrogateescape")).hexdigest()[:32]
    memo = _root().parent / "hashes" / f"{name}.json"
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
        known = json.loads(memo.read_text(encoding="utf-8"))
        if known["mark"] == mark:
            return known["sha256"]
    settled = time.time() - stat.st_ctime > SETTLED_SECONDS
    value = _sha256(file)
    if settled:
        with contextlib.suppress(OSError):
            memo.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            handle, building = tempfile.mkstemp(dir=memo.parent)
            with os.fdopen(handle, "w", encoding="utf-8") as stream:
                json.dump({"mark": mark, "sha256": value}, stream)
            os.replace(building, memo)
    return value


def _whole(folder: Path) -> bool:
    """Whether each file is what was written."""
    try:
        hashes = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        return SINGLE in hashes and all(_sha256(folder / Path(name).name) == value for name, value in hashes.items())
    except (OSError, ValueError, TypeError, AttributeError):
        return False


def _open(
    folder: Path,
    config: PretrainedConfig,
    quantization: Any,
    dtype: torch.dtype,
    device: torch.device,
    attention: str,
) -> PreTrainedModel:
    """transformers' own way to load a model that is quantised already."""
    config = copy.deepcopy(config)
    config.quantization_config = quantization.to_dict()
    base, report = AutoModelForCausalLM.from_pretrained(
        folder,
        config=config,
        dtype=dtype,
        device_map={"": device},
        attn_implementation=attention,
        use_safetensors=True,
        output_loading_info=True,
    )
    assert not report["missing_keys"], f"{folder} has no {sorted(report['missing_keys'])[0]}"
    base.config.quantization_config = quantization
    return base


def _store(base: PreTrainedModel, source: ModelSource, folder: Path) -> int:
    """Writes an entry; returns its bytes. Raises OSError."""
    tensors = _tensors(base)
    size = sum(tensor.nbytes for tensor in tensors.values())
    folder.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    free = shutil.disk_usage(folder.parent).free
    if size > free:
        raise OSError(f"{size / GIB:.1f} GiB needed, {free / GIB:.1f} GiB free")
    building = Path(tempfile.mkdtemp(prefix=".building-", dir=folder.parent))
    try:
        try:
            save_file(tensors, building / SINGLE, metadata={"format": "pt"})
        except Exception as error:  # safetensors has its own error for a full disk
            raise OSError(str(error)) from error
        for name in (CONFIG, GENERATION):
            if (source.folder / name).is_file():
                shutil.copyfile(source.folder / name, building / name)
        hashes = {file.name: _sha256(file) for file in sorted(building.iterdir())}
        (building / MANIFEST).write_text(json.dumps(hashes, indent=1), encoding="utf-8")
        for file in building.iterdir():
            with file.open("rb") as handle:
                os.fsync(handle.fileno())
        try:
            building.rename(folder)
        except OSError:  # another process stored the same base meanwhile
            if not _whole(folder):
                raise
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return size


def _tensors(base: PreTrainedModel) -> dict[str, torch.Tensor]:
    """The state, tied weights once. Code tables, which layers share, are copied: safetensors takes no shared tensor."""
    tied = set(base.all_tied_weights_keys)
    tensors, known = {}, set()
    for name, tensor in base.state_dict().items():
        if name in tied:
            continue
        storage = tensor.untyped_storage().data_ptr()
        tensors[name] = tensor.detach().clone() if storage in known else tensor.detach().contiguous()
        known.add(storage)
    return tensors


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
