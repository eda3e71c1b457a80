"""The result of a run: an adapter that plain PEFT loads, or a whole model, with tokenizer and template beside it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from peft import PeftModel
from transformers import GenerationConfig, PreTrainedModel

from trainer.atomic import replace_folder
from trainer.training.weights import MODEL_FILE, save_trainable

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def export(
    adapted: torch.nn.Module,
    base: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    end_tokens: list[int],
    run_dir: Path,
) -> str:
    """Writes adapter/ or model/ whole; returns its name in the run folder."""
    name = "adapter" if isinstance(adapted, PeftModel) else "model"
    building = run_dir / f".building-{name}"
    shutil.rmtree(building, ignore_errors=True)
    building.mkdir()
    save_trainable(adapted, building)
    if name == "model":
        base.config.save_pretrained(building)
        assert (building / MODEL_FILE).is_file()
    tokenizer.save_pretrained(building)
    generation = GenerationConfig(eos_token_id=end_tokens, bos_token_id=tokenizer.bos_token_id)
    generation.pad_token_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else end_tokens[0]
    generation.save_pretrained(building)
    replace_folder(building, run_dir / name)
    return name


def stop_tokens(lasts: set[int], tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Where generation must stop: the tokenizer's end token, and the control tokens that trained answers end with.

    A template may end a turn with another token than the tokenizer's: a model that never sees it as a stop goes on.
    """
    special = set(tokenizer.all_special_ids) | {
        index for index, token in tokenizer.added_tokens_decoder.items() if token.special
    }
    ends: set[int] = set() if tokenizer.eos_token_id is None else {tokenizer.eos_token_id}
    return sorted(ends | (lasts & special))
