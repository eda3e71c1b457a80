"""From a row's fields to a sample: a dialogue for the chat template, or plain text with an optional prompt.

Every format that is read here becomes the same thing: messages as the chat templates of transformers know them
(role, content, tool_calls with their arguments as an object). What a row says and no sample can hold is refused.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from trainer.data.options import Format
from trainer.data.rows import Row
from trainer.errors import closest

ROLES = ("system", "user", "assistant", "tool")

ALIASES = {
    "developer": "system",
    "human": "user",
    "gpt": "assistant",
    "model": "assistant",
    "observation": "tool",
    "function": "tool",
}
"""Names that other formats give to our roles; data.roles adds to them and wins."""

THOUGHTS = ("reasoning_content", "thinking", "reasoning")
"""Names that rows give to what the assistant thought before it answered; templates know the first."""

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

FIELDS = (
    *("messages", "conversations", "tools", "system", "instruction", "input", "output", "history"),
    *("prompt", "completion", "text"),
)
"""Every field that a format reads: what data.columns may name."""

Message = dict[str, Any]


class BadRow(ValueError):
    """A row that cannot become a sample; the message says why, the caller knows where."""


@dataclass(frozen=True)
class Dialogue:
    """Messages for the chat template."""

    messages: list[Message]
    trained: list[bool]
    """which messages may be targets, before data.train_on"""
    tools: list[dict[str, Any]] | None = None
    """functions that the assistant may call, as JSON schemas"""


@dataclass(frozen=True)
class PlainText:
    """Text without a template: targets are all of `text`, none of `prompt`."""

    prompt: str
    text: str


Sample = Dialogue | PlainText


@dataclass(frozen=True)
class Reader:
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


def to_sample(row: Row, format: Format) -> Sample:
    """The sample in a row that needs no mapping. Raises BadRow."""
    return Reader(format).sample(row)[0]


def detect(fields: dict[str, Any]) -> Format:
    """The one format whose fields the row has. Raises BadRow where there is none, or more than one."""
    found = [format for format, keys in KEYS.items() if all(fields.get(key) is not None for key in keys)]
    if len(found) == 1:
        return found[0]
    if found:
        names = " and ".join(format.value for format in found)
        raise BadRow(f"the row fits {names}: choose one with data.format=")
    known = "; ".join(f"{format.value}: {', '.join(keys)}" for format, keys in KEYS.items())
    raise BadRow(f"unknown format: the row has {_names(fields)}; known are {known}. data.columns maps other names")


def _templated(rendered: str, format: Format) -> dict[str, Any]:
    """What a row template wrote: the text itself for data.format=text, else a JSON object of the format."""
    if format is Format.text:
        return {"text": rendered}
    try:
        fields = json.loads(rendered)
    except json.JSONDecodeError as error:
        raise BadRow(f"data.row_template wrote no JSON ({error.msg} at {error.pos}): {_shown(rendered)}") from None
    if not isinstance(fields, dict):
        raise BadRow(f"data.row_template must write a JSON object, not {_shown(fields)}")
    return fields


def _messages(fields: dict[str, Any], roles: dict[str, str]) -> Dialogue:
    return _dialogue(fields["messages"], "messages", roles, _tools(fields))


def _sharegpt(fields: dict[str, Any], roles: dict[str, str]) -> Dialogue:
    """from/value turns, an optional system text and tools beside them; role/content turns are taken too."""
    turns, name = _parsed(fields["conversations"], "conversations"), "conversations"
    if not isinstance(turns, list) or not turns:
        raise BadRow(f"{name} must be a list of turns, not {_shown(turns)}")
    messages = []
    if isinstance(fields.get("system"), str) and fields["system"]:
        messages.append({"role": "system", "content": fields["system"]})
    shift = len(messages)
    for i, turn in enumerate(turns):
        if not isinstance(turn, dict):
            raise BadRow(f"{name}[{i}] must be an object with from and value, not {_shown(turn)}")
        if "from" not in turn:
            messages.append(turn)
            continue
        message = {"role": turn["from"], "content": turn.get("value")}
        message |= {key: turn[key] for key in ("train", "weight", "name") if key in turn}
        if roles.get(turn["from"], turn["from"]) == CALL_ROLE:
            message |= {
                "role": "assistant",
                "content": "",
                "tool_calls": _parsed_calls(turn.get("value"), f"{name}[{i}]"),
            }
        messages.append(message)
    return _dialogue(messages, name, roles, _tools(fields), shift)


def _parsed_calls(value: Any, where: str) -> list[Any]:
    try:
        calls = json.loads(value) if isinstance(value, str) else value
    except json.JSONDecodeError as error:
        raise BadRow(f"{where}.value of a {CALL_ROLE} must be JSON ({error.msg}): {_shown(value)}") from None
    return calls if isinstance(calls, list) else [calls]


def _dialogue(
    messages: Any, name: str, roles: dict[str, str], tools: list[dict] | None = None, shift: int = 0
) -> Dialogue:
    messages = _parsed(messages, name)
    if not isinstance(messages, list) or not messages:
        raise BadRow(f"{name} must be a list of messages, not {_shown(messages)}")
    clean, trained = [], []
    for i, message in enumerate(messages):
        where = f"{name}[{i - shift}]"
        if not isinstance(message, dict):
            raise BadRow(f"{where} must be an object with role and content, not {_shown(message)}")
        clean.append(_message(message, where, roles))
        trained.append(_is_trained(message, clean[-1]["role"], where))
    return Dialogue(clean, trained, tools)


def _message(message: dict[str, Any], where: str, roles: dict[str, str]) -> Message:
    role = message.get("role")
    known = roles.get(role, role) if isinstance(role, str) else role
    if known not in ROLES:
        hint = closest(str(role), ROLES)
        raise BadRow(f"{where}.role is {_shown(role)}{hint}; allowed are {', '.join(ROLES)}. data.roles maps others")
    calls = message.get("tool_calls")
    if calls is None and message.get("function_call") is not None:
        calls = [message["function_call"]]
    content = message.get("content")
    if content is None and calls:
        content = ""
    clean: Message = {"role": known, "content": _text_of(content, where)}
    if calls:
        if known != "assistant":
            raise BadRow(f"{where}.tool_calls: only the assistant calls tools, not {_shown(known)}")
        clean["tool_calls"] = [_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(calls)]
    for key in ("name", "tool_call_id", *THOUGHTS):
        if message.get(key) is not None:
            if not isinstance(message[key], str):
                raise BadRow(f"{where}.{key} must be a string, not {_shown(message[key])}")
            clean.setdefault(THOUGHTS[0] if key in THOUGHTS else key, message[key])
    return clean


def _text_of(content: Any, where: str) -> str:
    """A string, or a list of text parts (OpenAI) put together."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise BadRow(f"{where}.content must be a string or a list of text parts, not {_shown(content)}")
    texts = []
    for i, part in enumerate(content):
        if isinstance(part, dict) and part.get("type", "text") == "text" and isinstance(part.get("text"), str):
            texts.append(part["text"])
        elif isinstance(part, str):
            texts.append(part)
        else:
            kind = part.get("type") if isinstance(part, dict) else part
            raise BadRow(f"{where}.content[{i}] must be a text part, not {_shown(kind)}: only text is trained on")
    return "".join(texts)


def _call(call: Any, where: str) -> dict[str, Any]:
    """One function call as templates want it: arguments as an object, though OpenAI writes them as a string."""
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise BadRow(f"{where} must name a function and its arguments, not {_shown(call)}")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except json.JSONDecodeError as error:
            raise BadRow(f"{where}.arguments is no JSON ({error.msg}): {_shown(arguments)}") from None
    if not isinstance(arguments, dict):
        raise BadRow(f"{where}.arguments must be an object, not {_shown(arguments)}")
    clean = {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
    return {"id": call["id"], **clean} if isinstance(call.get("id"), str) else clean


def _is_trained(message: dict[str, Any], role: str, where: str) -> bool:
    """An assistant's message is, unless its `train` or `weight` (OpenAI) says no."""
    flags = []
    train, weight = message.get("train"), message.get("weight")
    if train is not None:
        if not isinstance(train, bool):
            raise BadRow(f"{where}.train must be true or false, not {_shown(train)}")
        flags.append(train)
    if weight is not None:
        if isinstance(weight, bool) or weight not in (0, 1):
            raise BadRow(f"{where}.weight must be 0 or 1, not {_shown(weight)}")
        flags.append(bool(weight))
    if len(set(flags)) > 1:
        raise BadRow(f"{where}: train={_shown(train)} and weight={_shown(weight)} contradict each other")
    if role != "assistant":
        if any(flags):
            raise BadRow(f"{where}: only an assistant's message can be trained on, not the {role}'s")
        return False
    return flags[0] if flags else True


def _tools(fields: dict[str, Any]) -> list[dict[str, Any]] | None:
    tools = _parsed(fields.get("tools"), "tools")
    if tools is None or tools == [] or tools == "":
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise BadRow(f"tools must be a list of function schemas, not {_shown(tools)}")
    return [tool if "function" in tool else {"type": "function", "function": tool} for tool in tools]


def _parsed(value: Any, name: str) -> Any:
    """A list that stands in a text column (csv, parquet) as JSON."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            return json.loads(value)
        except json.JSONDecodeError as error:
            raise BadRow(f"{name} is no JSON ({error.msg} at {error.pos}): {_shown(value)}") from None
    return value


def _alpaca(fields: dict[str, Any], roles: dict[str, str]) -> Dialogue:
    instruction, output = _string(fields, "instruction"), _string(fields, "output")
    given = _string(fields, "input") if fields.get("input") is not None else ""
    messages = []
    if fields.get("system"):
        messages.append({"role": "system", "content": _string(fields, "system")})
    history = fields.get("history") or []
    if not isinstance(history, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in history):
        raise BadRow(f"history must be a list of [question, answer] pairs, not {_shown(history)}")
    for question, answer in history:
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    messages.append({"role": "user", "content": f"{instruction}\n\n{given}" if given else instruction})
    messages.append({"role": "assistant", "content": output})
    return _dialogue(messages, "messages", {})


def _prompt_completion(fields: dict[str, Any], roles: dict[str, str]) -> Sample:
    prompt, completion = fields["prompt"], fields["completion"]
    if isinstance(prompt, list) and isinstance(completion, list):
        before = _dialogue(prompt, "prompt", roles)
        after = _dialogue(completion, "completion", roles)
        untrained = [False] * len(before.messages)
        return Dialogue(before.messages + after.messages, untrained + after.trained, _tools(fields))
    return PlainText(_string(fields, "prompt"), _string(fields, "completion"))


def _text(fields: dict[str, Any], roles: dict[str, str]) -> PlainText:
    return PlainText("", _string(fields, "text"))


def _string(fields: dict[str, Any], key: str) -> str:
    if not isinstance(fields[key], str):
        raise BadRow(f"{key} must be a string, not {_shown(fields[key])}")
    return fields[key]


def _names(fields: dict[str, Any]) -> str:
    return ", ".join(fields) or "no fields"


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."


_READERS: dict[Format, Callable[[dict[str, Any], dict[str, str]], Sample]] = {
    Format.messages: _messages,
    Format.sharegpt: _sharegpt,
    Format.alpaca: _alpaca,
    Format.prompt_completion: _prompt_completion,
    Format.text: _text,
}
