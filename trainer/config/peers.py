"""Configurations of other trainers as settings of ours. What maps to what is data: `trainer/assets/peers/*.yaml`.

A table has `marks` (keys by which its files are recognised), `start` (our settings that mean what the peer does where
a file is silent) and `keys`. An entry of `keys`, by the peer's dotted key, may hold

- `to`: our setting or group that gets the value; `values`: the value by regular expression, as ours or as a mapping of
  our settings; what none of them matches has no counterpart, or ends the import with `stop`;
- `also`: our settings besides; `double`: a setting that is twice the value unless the file says it;
- `differs`: what is not the same; `none`: why there is no counterpart; `idle`: why none is needed;
- `whole`, `positive`, `share`, `names`, `pair`, `batch`, `rows`: how the value is read (`_Reader`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from trainer.config.config_file import ConfigFile
from trainer.config.keys import Keys
from trainer.config.schema import SECTIONS
from trainer.config.shelf import default_choices
from trainer.errors import ConfigError, listing
from trainer.redact import secrets_in
from trainer.resources import PACKAGE

TABLES = PACKAGE / "assets" / "peers"
PEERS = ("axolotl", "llama_factory", "torchtune", "trl")
MAPPED, DIFFERS, NONE, IDLE = "mapped", "differs in meaning", "no counterpart", "needs none"
LEAST_MARKS = 2
"""Keys of a peer that a file must hold to be taken for one of its."""


@dataclass
class Row:
    """What became of one key of the file."""

    key: str
    value: Any
    verdict: str
    ours: dict[str, Any] = field(default_factory=dict)
    """our settings and groups that it gave"""
    says: str = ""


@dataclass
class Imported:
    """A peer's file as settings of ours."""

    peer: str
    rows: list[Row]
    empty: list[str]
    """keys without a value: the peer's own default"""
    picks: dict[str, str]
    """options by group"""
    settings: dict[str, Any]
    """values by full key"""


@cache
def table(peer: str) -> dict[str, Any]:
    """The mapping of a peer."""
    return yaml.safe_load((TABLES / f"{peer}.yaml").read_text(encoding="utf-8"))


def import_file(file: Path, peer: str | None = None) -> Imported:
    """Reads a peer's configuration. Raises ConfigError where it is none, or asks for what has no counterpart at all."""
    tree = ConfigFile(file.stem, file).tree()
    name = peer or _recognised(file, tree)
    return _Reader(table(name), tree, file).imported()


def _recognised(file: Path, tree: dict[str, Any]) -> str:
    there = {**tree, **_flat(tree)}
    found = {peer: sum(mark in there for mark in table(peer)["marks"]) for peer in PEERS}
    best = max(found, key=found.get)
    others = [peer for peer, count in found.items() if count == found[best]]
    if found[best] < LEAST_MARKS or len(others) > 1:
        raise ConfigError(
            f"{file}: is not recognised as a configuration of axolotl, LLaMA-Factory, torchtune or TRL by its keys "
            f"({', '.join(list(map(str, tree))[:5])}). Say whose it is: from=" + "|".join(PEERS)
        )
    return best


class _Reader:
    """Reads one file by one table."""

    def __init__(self, table: dict[str, Any], tree: dict[str, Any], file: Path):
        self.table, self.tree, self.file = table, tree, file
        self.secret = set(secrets_in(tree))
        self.rows: list[Row] = []
        self.empty: list[str] = []
        self.stops: list[str] = []

    def imported(self) -> Imported:
        for key, value in self._entries():
            if value is None or value in ("", [], {}):
                self.empty.append(key)
            else:
                self.rows.append(self._row(key, value))
        if self.stops:
            raise ConfigError(listing([f"{self.file}:{self._line(s)}" for s in self.stops]))
        ours = dict(self.table["start"])
        for row in self.rows:
            ours |= row.ours
        for row in self.rows:
            double = self.table["keys"].get(row.key, {}).get("double")
            if double is not None and row.ours and not any(double in r.ours for r in self.rows):
                ours[double] = row.ours[double] = 2 * row.value
        self._base(ours)
        self._batch(ours)
        if not ours.get("data.path") and not ours.get("data.sources"):
            ours["data"] = "quickstart"
        else:
            ours["data"] = "file"
        picks = {key: str(value) for key, value in ours.items() if key in SECTIONS}
        return Imported(self.table["name"], self.rows, self.empty, picks, self._settings(picks, ours))

    def _entries(self) -> list[tuple[str, Any]]:
        """Keys of the table and of the file, those of mappings with dots where the table has them so."""
        known = self.table["keys"]
        entries = []
        for key, value in self.tree.items():
            inner = isinstance(value, dict) and any(name.startswith(f"{key}.") for name in known)
            entries += _flat({key: value}).items() if inner else [(str(key), value)]
        return entries

    def _row(self, key: str, value: Any) -> Row:
        entry = self.table["keys"].get(key)
        if any(name == key or name.startswith(f"{key}.") for name in self.secret):
            return Row(key, "***", NONE, says="holds a secret, which is not taken over")
        if entry is None:
            return Row(key, value, NONE, says="is not known")
        if isinstance(value, str) and "${" in value:
            value = self._interpolated(value)
        if "none" in entry:
            return Row(key, value, NONE, says=entry["none"])
        if "idle" in entry:
            return Row(key, value, IDLE, says=entry["idle"])
        if "rows" in entry:
            return self._data_row(key, value, entry["rows"] == "held_out")
        ours = self._ours(key, value, entry)
        if isinstance(ours, str):
            return Row(key, value, NONE, says=ours)
        if ours:
            ours |= entry.get("also", {})
        says = entry.get("differs", "")
        return Row(key, value, DIFFERS if says else MAPPED if ours else IDLE, ours, says or ("" if ours else "as here"))

    def _ours(self, key: str, value: Any, entry: dict[str, Any]) -> dict[str, Any] | str:
        """Our settings for a value, or why there are none."""
        word = "true" if value is True else "false" if value is False else str(value).strip()
        if "values" in entry:
            found = [ours for said, ours in entry["values"].items() if re.fullmatch(said, word, re.IGNORECASE)]
            if found:
                return dict(found[0]) if isinstance(found[0], dict) else {entry["to"]: found[0]}
            if "stop" not in entry and not ("to" in entry and "names" in entry):
                return "this value has none" if "to" not in entry or entry["to"] in SECTIONS else {entry["to"]: value}
        if "stop" in entry:
            self.stops.append(f"{key}: {word}: {entry['stop']}")
            return entry["stop"]
        if "pair" in entry:
            name, _, index = entry["pair"].rpartition(".")
            return {f"{name}.{index}": value}
        return self._read(value, entry)

    def _read(self, value: Any, entry: dict[str, Any]) -> dict[str, Any] | str:
        """A value as the entry says that it is to be read, or why it cannot be."""
        if entry.get("names") and isinstance(value, str):
            value = [name.strip() for name in value.split(",")]
        if entry.get("whole"):
            number = _number(value)
            if number is None or number != int(number):
                return "a whole number is wanted here"
            value = int(number)
        if entry.get("positive") and (_number(value) or 0) <= 0:
            return {}
        if entry.get("share") and (_number(value) or 0) >= 1:
            return entry["share"]
        if isinstance(value, str) and _number(value) is not None:
            value = _number(value)  # YAML 1.1 reads 2e-5 as text
        return {entry["to"]: value}

    def _interpolated(self, value: str) -> str:
        """With what the file itself says of a key."""
        flat = _flat(self.tree)
        return re.sub(r"\$\{([\w.]+)\}", lambda match: str(flat.get(match[1], match[0])), value)

    def _data_row(self, key: str, value: Any, held_out: bool) -> Row:
        """axolotl's list of data sets."""
        entries = [entry for entry in value if isinstance(entry, dict) and isinstance(entry.get("path"), str)]
        if not isinstance(value, list) or not entries:
            return Row(key, value, NONE, says="no list of data sets with a path")
        sources, left = [], []
        for entry in entries:
            files = entry.get("data_files")
            is_format = entry["path"] in ("json", "csv", "parquet", "arrow", "text") and isinstance(files, (str, list))
            path = (files[0] if isinstance(files, list) else files) if is_format else entry["path"]
            name = str(entry.get("type") or "").split(".")[0]
            source = {"path": str(path), "split": entry.get("split"), "format": self.table["formats"].get(name)}
            used = {"path", "split", "type", *(["data_files"] if is_format else [])}
            if name == "chat_template" and isinstance(entry.get("field_messages"), str):
                source["columns"] = {"messages": entry["field_messages"]}
                used.add("field_messages")
            if source["format"] is None:
                used.discard("type")
            sources.append({name: said for name, said in source.items() if said is not None})
            left += [f"{name}={entry[name]}" for name in entry if name not in used and entry[name] is not None]
        says = f"without {', '.join(left)}" if left else ""
        if held_out:
            ours = {"data.eval_path": sources[0]["path"]}
            says = "; ".join(filter(None, [says, "read with the format of the training rows"]))
        elif len(sources) == 1:
            ours = {f"data.{name}": said for name, said in sources[0].items()}
        else:
            ours = {"data.sources": sources}
        return Row(key, value, DIFFERS if says else MAPPED, ours, says)

    def _base(self, ours: dict[str, Any]) -> None:
        """The option of `model`: one whose architecture is known, so that a plan needs no download, or any other."""
        path = str(ours.get("model.path", ""))
        bases = yaml.safe_load((TABLES / "bases.yaml").read_text(encoding="utf-8"))
        ours["model"] = next((name for said, name in bases.items() if re.fullmatch(said, path)), "other")

    def _batch(self, ours: dict[str, Any]) -> None:
        """Where rows are packed, a micro-batch has the tokens of as many samples of full length."""
        size, length = ours.get("train.micro_batch_size"), ours.get("data.max_length")
        if isinstance(size, int) and isinstance(length, int):
            ours["train.micro_batch_tokens"] = size * length

    def _settings(self, picks: dict[str, str], ours: dict[str, Any]) -> dict[str, Any]:
        """The values that exist with these options; a row whose setting does not, or not so, has no counterpart."""
        keys = Keys({**default_choices(), **picks})
        settings: dict[str, Any] = {}
        pairs = {key: value for key, value in ours.items() if re.fullmatch(r".*\.\d", key)}
        for key, value in {**ours, **self._pairs(pairs, keys)}.items():
            if key in SECTIONS or key in pairs:
                continue
            problem = keys.problem(key, adding=False) or keys.value_problem(key, value)
            if isinstance(value, str) and "${" in value:
                problem = "an interpolation is not taken over"
            if problem is None:
                settings[key] = value
                continue
            for row in self.rows:
                gave = [ours for ours in row.ours if ours == key or re.fullmatch(re.escape(key) + r"\.\d", ours)]
                for ours in gave:
                    del row.ours[ours]
                if gave and not row.ours:
                    row.verdict, row.says = NONE, problem
        return settings

    def _pairs(self, parts: dict[str, Any], keys: Keys) -> dict[str, Any]:
        """Lists of which the file gives single entries, the others as our option has them."""
        whole: dict[str, Any] = {}
        for part, value in parts.items():
            key, _, index = part.rpartition(".")
            section, _, name = key.partition(".")
            values = whole.setdefault(key, list(keys.values[section].get(name) or [None, None]))
            values[int(index)] = value
        return whole

    def _line(self, stop: str) -> str:
        return f"{ConfigFile(self.file.stem, self.file).line(stop.partition(':')[0])}: {stop}"


def _flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        name = f"{prefix}{key}"
        flat |= _flat(value, f"{name}.") if isinstance(value, dict) and value else {name: value}
    return flat


def _number(value: Any) -> float | int | None:
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    try:
        return value if isinstance(value, (int, float)) else float(value)
    except ValueError:
        return None


def recipe_text(found: Imported, file: str, name: str) -> str:
    """The recipe: a head comment, the options, the values by section."""
    said = f"Imported from {file}, a configuration of {found.peer}; `trainer import` shows what differs."
    picks = "".join(f"  - override /{group}: {option}\n" for group, option in sorted(found.picks.items()))
    tree: dict[str, Any] = {}
    for key, value in found.settings.items():
        section, _, inner = key.partition(".")
        if inner:
            tree.setdefault(section, {})[inner] = value
        else:
            tree[section] = value
    base, method = found.settings.get("model.path", "-"), found.picks.get("adapter", "-")
    head = [said, "", f"  python -m trainer recipe={name}", "", f"Base: {base}", f"Method: {method}"]
    comment = "".join(f"# {line}".rstrip() + "\n" for line in head)
    return f"{comment}defaults:\n{picks}\n" + yaml.safe_dump(tree, sort_keys=False, allow_unicode=True)
