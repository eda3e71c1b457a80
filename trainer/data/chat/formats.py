"""From a row's fields to a sample: a dialogue for the chat template, or plain text with an optional prompt.

Every format that is read here becomes the same thing: the messages of messages.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from trainer.data.chat.messages import ALIASES, BadRow, Dialogue, PlainText, Sample, dialogue, parsed, shown
from trainer.data.data_settings import Format
from trainer.data.sources.row import Row
from trainer.data.sources.strict_json import decode, problem
from trainer.errors import closest

CALL_ROLE = "function_call"
"""A sharegpt turn of the assistant that calls functions; its value is the calls as JSON."""

KEYS: dict[Format, tuple[str, ...]] = {
    Format.messages: ("messages",),
    Format.sharegpt: ("conversations",),
    Format.alpaca: ("instruction", "output"),
    Format.prompt_completion: ("prompt", "completion"),
    Format.text: ("text",),
}
"""Fields by which a format is known, and which it needs."""

WORDS = {
    "instruction": ("question", "query", "instruction", "prompt", "input", "user", "problem"),
    "output": ("answer", "response", "output", "completion", "target", "assistant", "solution", "reply"),
    "input": ("context", "passage", "input"),
    "messages": ("conversation", "conversations", "dialog", "dialogue", "chat", "turns", "messages"),
    "text": ("content", "document", "body", "story", "article"),
}
"""What others call our fields."""


@dataclass(frozen=True)
class RowReader:
    """How the rows of one source are read."""

    format: Format
    columns: dict[str, str] = field(default_factory=dict)
    """our field -> the column that holds it"""
    roles: dict[str, str] = field(default_factory=dict)
    """a role in the rows -> system, user, assistant or tool"""
    row_template: Callable[[dict[str, Any]], str] | None = None
    """renders a row's fields to the row that is read instead"""

    def sample(self, row: Row) -> tuple[Sample, Format]:
        """The sample in a row and the format it was read as. Raises BadRow."""
        if row.fields is None:
            raise BadRow(row.problem)
        fields = self._fields(row.fields)
        chosen = detect(fields) if self.format is Format.auto else self.format
        missing = [key for key in KEYS[chosen] if fields.get(key) is None]
        if missing:
            hints = ", ".join(f"{key}{closest(key, fields)}" for key in missing)
            raise BadRow(f"format {chosen.value} needs the field {hints}; the row has {_names(fields)}")
        return _READERS[chosen](fields, {**ALIASES, **self.roles}), chosen

    def _fields(self, fields: dict[str, Any]) -> dict[str, Any]:
        """The row under our names, after the row template."""
        if self.row_template is not None:
            return _templated(self.row_template(fields), self.format)
        if not self.columns:
            return fields
        absent = [theirs for theirs in self.columns.values() if theirs not in fields]
        if absent:
            hints = ", ".join(f"{name}{closest(name, fields)}" for name in absent)
            raise BadRow(f"data.columns names the column {hints}; the row has {_names(fields)}")
        taken = set(self.columns.values())
        kept = {name: value for name, value in fields.items() if name not in taken and name not in self.columns}
        return kept | {ours: fields[theirs] for ours, theirs in self.columns.items()}


def detect(fields: dict[str, Any]) -> Format:
    """The one format whose fields the row has. Raises BadRow where there is none, or more than one."""
    found = [format for format, keys in KEYS.items() if all(fields.get(key) is not None for key in keys)]
    if len(found) == 1:
        return found[0]
    if found:
        names = " and ".join(format.value for format in found)
        raise BadRow(f"the row fits {names}: choose one with data.format=")
    known = "; ".join(f"{format.value}: {', '.join(keys)}" for format, keys in KEYS.items())
    fix = _columns_for(fields) or f"known are {known}. data.columns maps other names"
    raise BadRow(f"unknown format: the row has {_names(fields)}; {fix}")


def _columns_for(fields: dict[str, Any]) -> str | None:
    """The data.columns to type, where the row's names are words for ours."""
    mapped: dict[str, str] = {}
    for ours, theirs in WORDS.items():
        name = next((f for f in fields if f.lower() in theirs and f not in mapped.values()), None)
        if name is not None:
            mapped[ours] = name
    for format in (Format.alpaca, Format.messages, Format.text):
        keys = [key for key in (*KEYS[format], *(("input",) if format is Format.alpaca else ())) if key in mapped]
        if set(KEYS[format]) <= set(keys):
            pairs = ", ".join(f"{key}: {mapped[key]}" for key in keys if mapped[key] != key)
            if all(re.fullmatch(r"\w+", mapped[key]) for key in keys):
                return f"to train on them as {format.value} type 'data.columns={{{pairs}}}'"
    return None


def _templated(rendered: str, format: Format) -> dict[str, Any]:
    """What a row template wrote: the text itself for data.format=text, else a JSON object of the format."""
    if format is Format.text:
        return {"text": rendered}
    try:
        fields = decode(rendered)
    except ValueError as error:
        raise BadRow(f"data.row_template: {problem(error)}: {shown(rendered)}") from None
    if not isinstance(fields, dict):
        raise BadRow(f"data.row_template must write a JSON object, not {shown(fields)}")
    return fields


def _messages(fields: dict[str, Any], roles: dict[str, str]) -> Dialogue:
    return dialogue(fields["messages"], "messages", roles, _tools(fields))


def _sharegpt(fields: dict[str, Any], roles: dict[str, str]) -> Dialogue:
    """from/value turns, an optional system text and tools beside them; role/content turns are taken too."""
    turns, name = parsed(fields["conversations"], "conversations"), "conversations"
    if not isinstance(turns, list) or not turns:
        raise BadRow(f"{name} must be a list of turns, not {shown(turns)}")
    messages = []
    if isinstance(fields.get("system"), str) and fields["system"]:
        messages.append({"role": "system", "content": fields["system"]})
    shift = len(messages)
    for i, turn in enumerate(turns):
        if not isinstance(turn, dict):
            raise BadRow(f"{name}[{i}] must be an object with from and value, not {shown(turn)}")
        if "from" not in turn:
            messages.append(turn)
            continue
        others = {key: value for key, value in turn.items() if key not in ("from", "value")}
        message = {**others, "role": turn["from"], "content": turn.get("value")}
        if roles.get(turn["from"], turn["from"]) == CALL_ROLE:
            message |= {
                "role": "assistant",
                "content": "",
                "tool_calls": _parsed_calls(turn.get("value"), f"{name}[{i}]"),
            }
        messages.append(message)
    try:
        return dialogue(messages, name, roles, _tools(fields), shift)
    except BadRow as error:
        if not all("from" in turn for turn in turns):
            raise
        theirs = str(error).replace("].role", "].from").replace("].content", "].value")
        raise BadRow(theirs) from None


def _parsed_calls(value: Any, where: str) -> list[Any]:
    try:
        calls = decode(value) if isinstance(value, str) else value
    except ValueError as error:
        raise BadRow(f"{where}.value of a {CALL_ROLE}: {problem(error)}: {shown(value)}") from None
    return calls if isinstance(calls, list) else [calls]


def _tools(fields: dict[str, Any]) -> list[dict[str, Any]] | None:
    tools = parsed(fields.get("tools"), "tools")
    if tools is None or tools == [] or tools == "":
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise BadRow(f"tools must be a list of function schemas, not {shown(tools)}")
    return [tool if "function" in tool else {"type": "function", "function": tool} for tool in tools]


def _alpaca(fields: dict[str, Any], roles: dict[str, str]) -> Dialogue:
    instruction, output = _string(fields, "instruction"), _string(fields, "output")
    given = _string(fields, "input") if fields.get("input") is not None else ""
    messages = []
    if fields.get("system"):
        messages.append({"role": "system", "content": _string(fields, "system")})
    history = fields.get("history") or []
    if not isinstance(history, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in history):
        raise BadRow(f"history must be a list of [question, answer] pairs, not {shown(history)}")
    for question, answer in history:
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    messages.append({"role": "user", "content": f"{instruction}\n\n{given}" if given else instruction})
    messages.append({"role": "assistant", "content": output})
    sample = dialogue(messages, "messages", {})
    pairs = [f"history[{i}][{k}]" for i in range(len(history)) for k in (0, 1)]
    names = [*(["system"] if fields.get("system") else []), *pairs, "instruction", "output"]
    return replace(sample, names=names)


def _prompt_completion(fields: dict[str, Any], roles: dict[str, str]) -> Sample:
    prompt, completion = fields["prompt"], fields["completion"]
    if isinstance(prompt, list) and isinstance(completion, list):
        before = dialogue(prompt, "prompt", roles)
        after = dialogue(completion, "completion", roles)
        untrained = [False] * len(before.messages)
        names = [*before.names, *after.names]
        return Dialogue(before.messages + after.messages, untrained + after.trained, _tools(fields), names)
    return PlainText(_string(fields, "prompt"), _string(fields, "completion"))


def _text(fields: dict[str, Any], roles: dict[str, str]) -> PlainText:
    return PlainText("", _string(fields, "text"))


def _string(fields: dict[str, Any], key: str) -> str:
    if not isinstance(fields[key], str):
        raise BadRow(f"{key} must be a string, not {shown(fields[key])}")
    return fields[key]


def _names(fields: dict[str, Any]) -> str:
    return ", ".join(fields) or "no fields"


_READERS: dict[Format, Callable[[dict[str, Any], dict[str, str]], Sample]] = {
    Format.messages: _messages,
    Format.sharegpt: _sharegpt,
    Format.alpaca: _alpaca,
    Format.prompt_completion: _prompt_completion,
    Format.text: _text,
}
