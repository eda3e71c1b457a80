"""A run's merged model: checked for room, written, compared with the adapter, and only then given its name."""

from __future__ import annotations

import gc
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from peft.utils import SAFETENSORS_WEIGHTS_NAME
from transformers import AutoModelForCausalLM

from trainer.config.saved import Run
from trainer.data.tokens.tokenize import Tokens
from trainer.device.find import find_device
from trainer.device.measure import Memory
from trainer.errors import ModelError
from trainer.export import gguf_files
from trainer.export.merged_folder import built, built_file, check_target, write_model
from trainer.export.merging import Merger, Onto, in_effect
from trainer.export.receipt import Difference, difference, lines, reference
from trainer.export.reload import find_result, load_trained
from trainer.export.rows import asked_rows
from trainer.model.loading.base import load_config
from trainer.tracking.run_folder import RunFolder, versions
from trainer.units import GIB

if TYPE_CHECKING:
    from trainer.tracking.console import Screen

RECEIPT = "merge_receipt.json"


@dataclass(frozen=True)
class Wanted:
    """A merged model."""

    target: Path
    onto: Onto
    dtype: torch.dtype | None
    """None: the base's own"""
    shard: int
    """bytes of a file"""
    rows: int
    """held-out samples to compare on; 0: no comparison"""
    max_kl: float | None
    """nats a target; None: no limit"""


def merge(run: Run, folder: Path, wanted: Wanted, screen: Screen) -> dict[str, Any]:
    """Writes the merged model and its receipt, which is returned. Raises TrainerError, and leaves nothing then."""
    result, device = find_result(folder), find_device(run.config.device)
    tokens = None
    if wanted.rows:  # what can fail without weights fails before any is read
        tokens, which = asked_rows(run.config, folder, named=False)
    with Memory(torch.device("cpu")) as memory:
        merger = Merger(run.config, result, wanted.onto, device, run.config.precision.build(device))
        dtype = wanted.dtype or merger.own_dtype()
        check_target(wanted.target, _bytes(merger, dtype))
        screen.say(_announcement(run, folder, wanted, merger, dtype))
        with built(wanted.target) as half:
            size = write_model(merger, half, result, dtype, wanted.shard, screen)
            receipt = _what(run, wanted, merger, dtype, size) | _memory(memory, folder)
            del merger
            if tokens is not None:
                found = _compare(run, folder, half, tokens, wanted)
                receipt |= {"rows": which, **found.to_json(), "max_kl": wanted.max_kl}
                screen.table("merged against adapter", lines(found))
            (half / RECEIPT).write_text(json.dumps(receipt | {"versions": versions()}, indent=1), encoding="utf-8")
    screen.say(
        f"merged model: {wanted.target} ({size / GIB:.2f} GiB; at most {receipt['peak_memory_gib']:.2f} GiB of memory, "
        f"training {receipt['training_peak_memory_gib'] or 0:.2f})"
    )
    return receipt


def to_gguf(run: Run, folder: Path, wanted: Wanted, screen: Screen) -> None:
    """Writes the merged model as one GGUF file. Raises TrainerError, and leaves nothing then."""
    result, device = find_result(folder), find_device(run.config.device)
    merger = Merger(run.config, result, wanted.onto, device, run.config.precision.build(device))
    dtype = wanted.dtype or torch.float16
    check_target(wanted.target, _bytes(merger, dtype))
    screen.say(_announcement(run, folder, wanted, merger, dtype))
    with built_file(wanted.target) as half:
        gguf_files.write_model(merger, result, half, dtype)
    screen.say(f"merged model: {wanted.target} ({wanted.target.stat().st_size / GIB:.2f} GiB)")


def adapter_to_gguf(run: Run, folder: Path, target: Path, screen: Screen) -> None:
    """Writes the adapter alone as a GGUF file, for a GGUF of its base. Raises TrainerError, and leaves nothing then."""
    result = find_result(folder)
    if result.name != "adapter":
        raise ModelError(f"run={folder}: trained every weight and has no adapter. Use merge.format=gguf.")
    check_target(target, (result / SAFETENSORS_WEIGHTS_NAME).stat().st_size)
    with built_file(target) as half:
        gguf_files.write_adapter(load_config(run.config.model), result, half)
    screen.say(f"adapter for llama.cpp's --lora: {target}, on a GGUF of {run.config.model.path}")


def _bytes(merger: Merger, dtype: torch.dtype) -> int:
    return sum(shape.numel() for _, shape in merger.sizes()) * dtype.itemsize


def _announcement(run: Run, folder: Path, wanted: Wanted, merger: Merger, dtype: torch.dtype) -> str:
    trained = in_effect(run.config)
    base = {Onto.original: "the original base", Onto.dequantized: f"the base as {run.choices['quant']} has it"}
    why = ", which the adapter was trained against" if wanted.onto is trained else f", trained against {base[trained]}"
    alone = "; the text decoder alone" if merger.text_only else ""
    return f"merging {folder} onto {base[wanted.onto]}{why}, to {_name(dtype)}{alone}"


def _what(run: Run, wanted: Wanted, merger: Merger, dtype: torch.dtype, size: int) -> dict[str, Any]:
    return {
        "base_model": run.config.model.path,
        "adapter": run.choices["adapter"],
        "base": wanted.onto.value,
        "trained_against": in_effect(run.config).value,
        "dtype": _name(dtype),
        "tied_embeddings": merger.tied,
        "weights_gib": size / GIB,
        "shard_gib": wanted.shard / GIB,
        "largest_layer_gib": merger.largest * 4 / GIB,
    }


def _memory(memory: Memory, folder: Path) -> dict[str, Any]:
    """What merging took on the host, in which shards and layers lie, beside what training took."""
    reading, summary = memory.read(), RunFolder(folder).summary() or {}
    return {
        "peak_memory_gib": reading.peak / GIB,
        "training_peak_memory_gib": summary.get("peak_memory_gib"),
    }


def _compare(run: Run, folder: Path, half: Path, tokens: Tokens, wanted: Wanted) -> Difference:
    """Both models, one after the other. Raises ModelError where they are too far apart."""
    trained = load_trained(run, folder)
    device = next(trained.model.parameters()).device
    known = reference(trained.model, tokens, wanted.rows, trained.dtypes)
    del trained
    gc.collect()
    merged = AutoModelForCausalLM.from_pretrained(half, dtype="auto", device_map={"": device}, use_safetensors=True)
    found = difference(known, merged, tokens)
    if wanted.max_kl is not None and not found.kl_divergence <= wanted.max_kl:
        raise ModelError(
            f"merge.max_kl={wanted.max_kl}: the merged model is further than that from the adapter: "
            + ", ".join(f"{name} {value}" for name, value in lines(found))
            + ". Nothing was written. merge.dtype=fp32 rounds less, merge.base= chooses the base; or allow more."
        )
    return found


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
