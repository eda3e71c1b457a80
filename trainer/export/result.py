"""The result of a run: an adapter that plain PEFT loads, or a whole model, with tokenizer and template beside it."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from peft import PeftModel
from peft.utils import CONFIG_NAME
from safetensors.torch import load_file, save_file
from transformers import GenerationConfig, PreTrainedModel

from trainer.atomic import replace_folder
from trainer.training.weights import ADAPTER_FILE, MODEL_FILE, save_trainable

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from trainer.model.adapters.weight_share import WeightShare


def export(
    adapted: torch.nn.Module,
    base: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    end_tokens: list[int],
    run_dir: Path,
    decoder_in_whole: str | None = None,
    weight_share: WeightShare | None = None,
) -> str:
    """Writes adapter/ or model/ whole; returns its name in the run folder.

    `decoder_in_whole`: what the text decoder is called in the model that its folder holds, where it was taken out of
    one; the adapter is written for that model, which is what plain transformers loads.
    `weight_share`: what took a part of the base for the adapter, which is written for the base as it was.
    """
    name = "adapter" if isinstance(adapted, PeftModel) else "model"
    building = run_dir / f".building-{name}"
    shutil.rmtree(building, ignore_errors=True)
    building.mkdir()
    save_trainable(adapted, building)
    if weight_share is not None:
        weight_share.to_plain(building)
    if name == "adapter" and decoder_in_whole is not None:
        fit_whole(building, adapted, decoder_in_whole)
    if name == "model":
        base.config.save_pretrained(building)
        assert (building / MODEL_FILE).is_file()
    tokenizer.save_pretrained(building)
    generation = GenerationConfig(eos_token_id=end_tokens, bos_token_id=tokenizer.bos_token_id)
    generation.pad_token_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else end_tokens[0]
    generation.save_pretrained(building)
    replace_folder(building, run_dir / name)
    return name


def fit_whole(folder: Path, adapted: PeftModel, decoder_in_whole: str) -> None:
    """Renames a saved adapter's keys for the whole model, and its targets so that they fit that and the decoder alone:
    endings would fit a vision tower too."""
    decoder, base = adapted.get_base_model().get_decoder(), adapted.get_base_model()
    alone = next(name for name, module in base.named_modules() if module is decoder)
    prefix = "base_model.model."
    weights = load_file(folder / ADAPTER_FILE)
    renamed = {re.sub(rf"^{prefix}{alone}\.", f"{prefix}{decoder_in_whole}.", key): t for key, t in weights.items()}
    save_file(renamed, folder / ADAPTER_FILE, metadata={"format": "pt"})
    config = json.loads((folder / CONFIG_NAME).read_text())
    config["target_modules"] = _targets(adapted.base_model.targeted_module_names, alone, decoder_in_whole)
    (folder / CONFIG_NAME).write_text(json.dumps(config, indent=2, sort_keys=True))


def _targets(names: list[str], alone: str, whole: str) -> str:
    """A regular expression for modules of the decoder by either name, and for those outside (the head)."""
    inside = [name.removeprefix(f"{alone}.").split(".") for name in names if name.startswith(f"{alone}.")]
    shapes = {r"\.".join(r"\d+" if part.isdigit() else part for part in parts) for parts in inside}
    by_block = {tuple(part for part in parts if part.isdigit()) for parts in inside}
    if len(inside) != len(shapes) * len(by_block):  # not the same in all blocks: each by its name
        shapes = {r"\.".join(parts) for parts in inside}
    outside = [re.escape(name) for name in names if not name.startswith(f"{alone}.")]
    return "|".join([rf"(?:{re.escape(alone)}|{re.escape(whole)})\.(?:{'|'.join(sorted(shapes))})", *outside])


def stop_tokens(lasts: set[int], tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Where generation must stop: the tokenizer's end token, and the control tokens that trained answers end with.

    A template may end a turn with another token than the tokenizer's: a model that never sees it as a stop goes on.
    """
    special = set(tokenizer.all_special_ids) | {
        index for index, token in tokenizer.added_tokens_decoder.items() if token.special
    }
    ends: set[int] = set() if tokenizer.eos_token_id is None else {tokenizer.eos_token_id}
    return sorted(ends | (lasts & special))
