"""A merged model as a folder that plain transformers loads: shards of safetensors, configuration, tokenizer.

It is built under a hidden name, its config.json last, so that a half of it never looks like a model.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from peft.utils import CONFIG_NAME, SAFETENSORS_WEIGHTS_NAME
from safetensors.torch import save_file

from trainer.atomic import flush, replace_folder
from trainer.errors import StorageError
from trainer.export.merging import Merger
from trainer.model.loading.folder import CONFIG, INDEX, SINGLE, WEIGHTS
from trainer.tracking.console import Screen
from trainer.units import GIB

NOT_COPIED = (CONFIG_NAME, SAFETENSORS_WEIGHTS_NAME, CONFIG, SINGLE)
"""Files of a result that are not its tokenizer, template and generation settings."""
SLACK = 64 << 20
"""Bytes for the small files, the receipt and a header."""


def check_target(target: Path, needed: int) -> None:
    """Raises StorageError where the target is there already, or its disk has not room for so many bytes."""
    if target.exists():
        raise StorageError(f"to={target}: is there already; choose another name, or remove it.")
    nearest = next(path for path in target.absolute().parents if path.is_dir())
    free = shutil.disk_usage(nearest).free
    if needed + SLACK > free:
        raise StorageError(
            f"to={target}: the merged model needs {needed / GIB:.2f} GiB, and {nearest} has {free / GIB:.2f} GiB free. "
            "Free some space, choose another disk with to=, or a smaller merge.dtype."
        )


@contextmanager
def built_file(target: Path) -> Iterator[Path]:
    """The same for a single file."""
    building = target.with_name(f".building-{target.name}")
    try:
        building.parent.mkdir(parents=True, exist_ok=True)
        yield building
        flush(building)
        building.rename(target)
    except OSError as error:
        raise StorageError(f"to={target}: cannot be written: {error.strerror or error}.") from error
    finally:
        building.unlink(missing_ok=True)


@contextmanager
def built(target: Path) -> Iterator[Path]:
    """A hidden folder to build in, which gets its name when the block ends well and is removed when it does not."""
    building = target.with_name(f".building-{target.name}")
    try:
        building.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(building, ignore_errors=True)
        building.mkdir()
        yield building
        replace_folder(building, target)
    except OSError as error:
        raise StorageError(f"to={target}: cannot be written: {error.strerror or error}.") from error
    finally:
        shutil.rmtree(building, ignore_errors=True)


def write_model(merger: Merger, building: Path, result: Path, dtype: torch.dtype, shard: int, screen: Screen) -> int:
    """Writes the merged model with shards of about `shard` bytes; returns its weights' bytes.

    Raises StorageError. The result's tokenizer, chat template and generation settings go along.
    """
    sizes = merger.sizes()
    files, total = _plan(sizes, dtype.itemsize, shard)
    held: dict[str, torch.Tensor] = {}
    with screen.bar("merging", len(sizes)) as bar:
        for number, (name, tensor) in enumerate(merger.tensors(dtype)):
            held[name] = tensor
            del tensor
            bar.at(number + 1)
            if number + 1 == len(sizes) or files[sizes[number + 1][0]] != files[name]:
                _save(held, building / files[name])
                held.clear()
    if len(set(files.values())) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": files}
        (building / INDEX).write_text(json.dumps(index, indent=2), encoding="utf-8")
    for file in result.iterdir():
        if file.name not in NOT_COPIED and file.is_file():
            shutil.copyfile(file, building / file.name)
    config = merger.model.config
    config.dtype = dtype
    config.architectures = [type(merger.model).__name__]
    config.save_pretrained(building)
    return total


def _plan(sizes: list[tuple[str, torch.Size]], itemsize: int, shard: int) -> tuple[dict[str, str], int]:
    """The file of each tensor, by its name, and the bytes of all; a shard is full before it would be larger."""
    numbers, held, total = {}, 0, 0
    number = 1
    for name, shape in sizes:
        size = shape.numel() * itemsize
        if held and held + size > shard:
            number, held = number + 1, 0
        held, total = held + size, total + size
        numbers[name] = number
    if number == 1:
        return dict.fromkeys(numbers, SINGLE), total
    stem = SINGLE.removesuffix(WEIGHTS)
    return {name: f"{stem}-{k:05d}-of-{number:05d}{WEIGHTS}" for name, k in numbers.items()}, total


def _save(tensors: dict[str, torch.Tensor], file: Path) -> None:
    try:
        save_file(tensors, file, metadata={"format": "pt"})
    except Exception as error:  # safetensors has its own error for a full disk
        raise StorageError(f"{file.parent}: cannot be written: {error}.") from error
