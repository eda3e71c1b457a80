"""Options of the group `data`: which rows, in which format, and what of them is trained on."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from datetime import date
from enum import Enum
from typing import Annotated, Any

from trainer.data.chat.messages import ROLES
from trainer.errors import closest
from trainer.ranges import AT_LEAST_1, BELOW_1, MOST_TOKENS, SHARE, numbers
from trainer.registry import Section, option


class Format(Enum):
    auto = "auto"
    messages = "messages"
    sharegpt = "sharegpt"
    alpaca = "alpaca"
    prompt_completion = "prompt_completion"
    text = "text"


FIELDS = (
    *("messages", "conversations", "tools", "system", "instruction", "input", "output", "history"),
    *("prompt", "completion", "text"),
)
"""Every field that a format reads: what data.columns may name."""


class OverLength(Enum):
    drop = "drop"
    truncate = "truncate"
    split = "split"
    error = "error"


class TrainOn(Enum):
    assistant = "assistant"
    last = "last"
    all = "all"


class TrainPart(Enum):
    all = "all"
    filled = "filled"
    answer = "answer"
    thoughts = "thoughts"


class EmptyAnswers(Enum):
    train = "train"
    bad_row = "bad_row"


class OnBadRow(Enum):
    error = "error"
    skip = "skip"


class MixBy(Enum):
    samples = "samples"
    tokens = "tokens"


class Stop(Enum):
    first_exhausted = "first_exhausted"
    all_exhausted = "all_exhausted"


LENGTH = numbers("must be 2 or more: a target needs a token before it", minimum=2).up_to(MOST_TOKENS)


@option("data", "file")
@dataclass
class Data(Section):
    """Rows from files, folders of files, or the hub."""

    path: str | None
    """a file, a folder of shards, or owner/name on the hub; embedded:NAME is a file that comes with the trainer"""
    split: str | None
    """which split of a hub data set, or of a folder whose names tell splits: null is train; file: unused"""
    sources: Any
    """a mixture instead of path: a list of {path, weight} with, where they differ, name, split, format, columns,
    roles, row_template, train_on and train_part"""
    mix_by: MixBy
    """what a source's weight is a share of"""
    stop: Stop
    """where an epoch of a mixture ends: when the first source has been seen whole, or when all have"""
    format: Format
    """how a row is laid out; auto looks at the fields of each row"""
    columns: dict[str, Any]
    """our field: the column that holds it, such as {instruction: question, output: answer}"""
    roles: dict[str, Any]
    """a role in the rows: system, user, assistant or tool"""
    row_template: str | None
    """Jinja file that turns a row's fields into a JSON row of data.format (or, for format=text, into the text)"""
    chat_template: str | None
    """for a base model without one: a name (chatml, plain, instruction; with tools chatml_tools, plain_tools) or a
    Jinja file; null: the tokenizer's own"""
    eval_path: str | None
    """held-out file of the same kind; null: eval_fraction of the training samples"""
    eval_fraction: Annotated[float, BELOW_1]
    """share of the samples held out from training, 0 to below 1; unused where eval_path is given"""
    max_length: Annotated[int, LENGTH]
    """tokens in one sample"""
    over_length: OverLength
    """a sample over max_length: drop it, truncate its end, split it (format text only), or stop with an error"""
    train_on: TrainOn
    """targets: all assistant turns, the last turn only, or every token"""
    train_part: TrainPart
    """targets in an answer that begins with thoughts (<think>): all of it, all but think blocks that are empty
    (filled), the answer behind the thoughts, or the thoughts"""
    empty_answers: EmptyAnswers
    """an answer without a word: train its end token, or take it for a bad row"""
    on_bad_row: OnBadRow
    """a row that cannot be used: stop with all of them listed, or skip and count them"""
    max_dropped_share: Annotated[float, SHARE]
    """share of the rows that may be dropped before the run stops, 0 to 1"""
    max_truncated_share: Annotated[float, SHARE]
    """share of the samples that may be truncated before the run stops, 0 to 1"""
    max_duplicate_share: Annotated[float, SHARE]
    """share of the samples that may be a repetition of an earlier one before the run stops, 0 to 1"""
    streaming: bool
    """read, tokenise and pack rows as they are needed: nothing is kept, in memory or on disk. Training
    needs train.max_steps, and data.eval_path or eval_fraction=0"""
    streaming_window: Annotated[int, AT_LEAST_1]
    """usable samples of a stream that are shuffled and packed together; the thresholds hold for each window"""
    cache_dir: str | None
    """folder of token caches; null: none is kept"""
    workers: Annotated[int | None, AT_LEAST_1]
    """processes that tokenise; null: one a CPU core where there is enough to do"""
    today: str | None
    """the day that a chat template with strftime_now tells, YYYY-MM-DD; null: that on which the run begins, which a
    resumed run keeps"""

    def problems(self, config):
        problems = source_problems(self)
        if self.over_length is OverLength.split and self.format not in (Format.auto, Format.text):
            problems.append(f"data.over_length=split cuts plain text; data.format={self.format.value} cannot be split")
        if self.today is not None and not _is_day(self.today):
            problems.append(f"data.today={self.today}: must be a day, YYYY-MM-DD, or null for the day of the run")
        return problems


def _is_day(text: str) -> bool:
    try:
        return date.fromisoformat(text).isoformat() == text
    except ValueError:
        return False


@dataclass(frozen=True)
class DataSource:
    """Where one kind of rows comes from; data.path is one, data.sources are several."""

    key: str
    """the setting that names it"""
    path: str
    name: str
    """in tables and metrics"""
    weight: float
    data: Data
    """the settings that hold for it"""


OWN_KEYS = ("split", "format", "columns", "roles", "row_template", "train_on", "train_part")
"""Settings that a source of a mixture may have to itself."""

ENUMS: dict[str, type[Enum]] = {"format": Format, "train_on": TrainOn, "train_part": TrainPart}
"""Those of them that take one of a few words."""


def training_sources(data: Data) -> list[DataSource]:
    """What is trained on. The settings have been checked (source_problems)."""
    if data.sources is None:
        return [DataSource("data.path", data.path, data.path, 1.0, data)]
    sources = []
    for i, entry in enumerate(data.sources):
        own = {key: _typed(key, entry[key]) for key in OWN_KEYS if key in entry}
        name = entry.get("name", entry["path"])
        weight = float(entry.get("weight", 1.0))
        sources.append(DataSource(f"data.sources[{i}].path", entry["path"], name, weight, replace(data, **own)))
    return sources


def source_problems(data: Data) -> list[str]:
    """What is wrong with data.path, data.sources and the mappings, in a user's words."""
    problems = _mapping_problems("data", data.columns, data.roles)
    if data.train_on is TrainOn.all and data.train_part is not TrainPart.all:
        problems.append(f"data.train_part={data.train_part.value} has no effect with data.train_on=all: leave one out")
    if data.sources is None:
        if data.path is None:
            problems.append("data.path is missing: give a file, a folder or a hub data set, or use data=quickstart")
        return problems
    if not isinstance(data.sources, list) or not data.sources:
        return [*problems, f"data.sources={data.sources}: must be a list of {{path: ..., weight: ...}}"]
    allowed = ("path", "weight", "name", *OWN_KEYS)
    for i, entry in enumerate(data.sources):
        key = f"data.sources[{i}]"
        if not isinstance(entry, dict) or not isinstance(entry.get("path"), str):
            problems.append(f"{key}: must be a mapping with a path, not {entry}")
            continue
        problems += [
            f"{key}.{name}: unknown key{closest(str(name), allowed)}. Allowed: {', '.join(allowed)}"
            for name in entry
            if name not in allowed
        ]
        weight = entry.get("weight", 1.0)
        if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not 0 < weight < float("inf"):
            problems.append(f"{key}.weight={weight}: must be a number above 0")
        for name, kind in ENUMS.items():
            if name in entry and str(entry[name]) not in kind.__members__:
                hint = closest(str(entry[name]), kind.__members__)
                problems.append(f"{key}.{name}={entry[name]}: must be one of {', '.join(kind.__members__)}{hint}")
        for name in ("name", "split", "row_template"):
            if entry.get(name) is not None and not isinstance(entry[name], str):
                problems.append(f"{key}.{name}={entry[name]}: must be text")
        problems += _mapping_problems(key, entry.get("columns", {}), entry.get("roles", {}))
    names = [entry.get("name", entry.get("path")) for entry in data.sources if isinstance(entry, dict)]
    doubled = sorted({str(name) for name in names if names.count(name) > 1})
    if doubled:
        problems.append(f"data.sources: {', '.join(doubled)} stands there more than once; give each its own name")
    return problems


def _mapping_problems(key: str, columns: Any, roles: Any) -> list[str]:
    problems = []
    for part, mapping in (("columns", columns), ("roles", roles)):
        if not isinstance(mapping, dict) or not all(isinstance(value, str) for value in mapping.values()):
            problems.append(f"{key}.{part}={mapping}: must be a mapping of names to names")
            continue
        wrong = [n for n in mapping if n not in FIELDS] if part == "columns" else []
        wrong += [r for r in mapping.values() if r not in ROLES] if part == "roles" else []
        allowed = FIELDS if part == "columns" else ROLES
        problems += [
            f"{key}.{part}: {name} is none of ours{closest(str(name), allowed)}. Allowed: {', '.join(allowed)}"
            for name in wrong
        ]
    return problems


def _typed(key: str, value: Any) -> Any:
    return ENUMS[key][str(value)] if key in ENUMS else value


assert set(OWN_KEYS) <= {f.name for f in fields(Data)}
