"""Rows of a finished run, read again: what it held out, or any others in its place."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from transformers import AutoTokenizer

from trainer.data.tokens.gather import read_data
from trainer.data.tokens.tokenize import Tokens
from trainer.errors import ConfigError
from trainer.export.reload import find_result
from trainer.model.loading.architecture import building
from trainer.tracking.run_folder import RunFolder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from trainer.config.schema import Config
    from trainer.data.data_settings import Data


def as_of(data: Data, folder: Path) -> Data:
    """The run's data settings, on the day on which the run began: a template may tell it."""
    manifest = RunFolder(folder).manifest() or {}
    return replace(data, today=data.today or manifest.get("today"))


def held_out_rows(config: Config, folder: Path, tokenizer: PreTrainedTokenizerBase) -> tuple[Tokens, str]:
    """A run's held-out samples, or its training samples where it held out none; and which, in words.

    Raises ConfigError where a streamed run held out none, DataError where the data is not there any more.
    """
    data = as_of(config.data, folder)
    if data.streaming and data.eval_path is None:
        raise ConfigError(f"run={folder}: its data was streamed and nothing held out. Name rows with data.path=FILE.")
    loaded = read_data(data, config.seed, tokenizer)
    if loaded.held_out is not None:
        return loaded.held_out, "held-out"
    return loaded.train_set, "training (none were held out)"


def asked_rows(
    config: Config, folder: Path, named: bool, tokenizer: PreTrainedTokenizerBase | None = None
) -> tuple[Tokens, str]:
    """All rows of `config.data` where the user `named` them, else those that the run held out; and which, in words."""
    tokenizer = tokenizer or result_tokenizer(find_result(folder))
    if not named:
        return held_out_rows(config, folder, tokenizer)
    loaded = read_data(as_of(config.data, folder), config.seed, tokenizer)
    return loaded.train_set, "given"


def result_tokenizer(result: Path) -> PreTrainedTokenizerBase:
    """The tokenizer beside a run's adapter or model. Raises ModelError."""
    with building(f"{result}: cannot be loaded"):
        return AutoTokenizer.from_pretrained(result)
