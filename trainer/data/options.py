"""Options of the group `data`: which files, in which format, and what of them is trained on."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from trainer.config.registry import option


class Format(Enum):
    auto = "auto"
    messages = "messages"
    sharegpt = "sharegpt"
    alpaca = "alpaca"
    prompt_completion = "prompt_completion"
    text = "text"


class OverLength(Enum):
    drop = "drop"
    truncate = "truncate"
    split = "split"
    error = "error"


class TrainOn(Enum):
    assistant = "assistant"
    last = "last"
    all = "all"


class OnBadRow(Enum):
    error = "error"
    skip = "skip"


@option("data", "file")
@dataclass
class Data:
    """Rows from local files."""

    path: str | None
    """json or jsonl file; embedded:NAME is a file that comes with the trainer"""
    format: Format
    """how a row is laid out; auto looks at the keys of each row"""
    eval_path: str | None
    """held-out file of the same kind; null: eval_fraction of data.path"""
    eval_fraction: float
    """share of data.path's samples held out from training, 0 to below 1; unused where eval_path is given"""
    max_length: int
    """tokens in one sample"""
    over_length: OverLength
    """a sample over max_length: drop it, truncate its end, split it (format text only), or stop with an error"""
    train_on: TrainOn
    """targets: all assistant turns, the last turn only, or every token"""
    on_bad_row: OnBadRow
    """a row that cannot be used: stop with all of them listed, or skip and count them"""
