"""Messages as the chat templates of transformers know them: role, content, tool_calls with arguments as an object.

What a row says and no sample can hold is refused.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from trainer.data.sources.strict_json import decode, problem
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

FIELDS = ("role", "content", "name", "tool_calls", "function_call", "tool_call_id", *THOUGHTS)
"""What is read of a message, beside whether it is trained on."""

SWITCHES = ("train", "loss")
"""Names that rows give to whether a message is trained on; true or false."""

WEIGHTS = ("weight", "loss_weight")
"""Names that rows give to how much a message counts; of these only 0 and 1 are taken."""

OWN_WEIGHT = re.compile(r"(?i:(?<![a-z])(?:weight|mask|loss|train|ignore)|(?:weight|mask)s?(?![a-z]))")
"""In a field's name: it says what of a message is to be trained on."""

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
    names: list[str] | None = field(default=None, compare=False)
    """what the row calls each message; None: messages[i]"""

    def in_the_rows_words(self, text: str) -> str:
        """A problem with messages[i], under the names that the row has."""
        if self.names is None:
            return text
        return re.sub(r"\bmessages\[(\d+)\]", lambda match: self.names[int(match[1])], text)


@dataclass(frozen=True)
class PlainText:
    """Text without a template: targets are all of `text`, none of `prompt`."""

    prompt: str
    text: str


Sample = Dialogue | PlainText


def dialogue(
    messages: Any, name: str, roles: dict[str, str], tools: list[dict] | None = None, shift: int = 0
) -> Dialogue:
    """The messages under the name that the row gives them; `shift` of them do not stand in its list. Raises BadRow."""
    messages = parsed(messages, name)
    if not isinstance(messages, list) or not messages:
        raise BadRow(f"{name} must be a list of messages, not {shown(messages)}")
    clean, trained = [], []
    for i, message in enumerate(messages):
        where = f"{name}[{i - shift}]"
        if not isinstance(message, dict):
            raise BadRow(f"{where} must be an object with role and content, not {shown(message)}")
        clean.append(_message(message, where, roles))
        trained.append(_is_trained(message, clean[-1]["role"], where))
    names = None
    if name != "messages":
        names = [f"{name}[{i - shift}]" if i >= shift else "system" for i in range(len(clean))]
    return Dialogue(clean, trained, tools, names)


def _message(message: dict[str, Any], where: str, roles: dict[str, str]) -> Message:
    role = message.get("role")
    known = roles.get(role, role) if isinstance(role, str) else role
    if known not in ROLES:
        hint = closest(str(role), ROLES)
        raise BadRow(f"{where}.role is {shown(role)}{hint}; allowed are {', '.join(ROLES)}. data.roles maps others")
    calls = message.get("tool_calls")
    if calls is None and message.get("function_call") is not None:
        calls = [message["function_call"]]
    content = message.get("content")
    if content is None and calls:
        content = ""
    clean: Message = {"role": known, "content": _text_of(content, where)}
    if calls:
        if known != "assistant":
            raise BadRow(f"{where}.tool_calls: only the assistant calls tools, not {shown(known)}")
        clean["tool_calls"] = [_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(calls)]
    for key in ("name", "tool_call_id", *THOUGHTS):
        if message.get(key) is not None:
            if not isinstance(message[key], str):
                raise BadRow(f"{where}.{key} must be a string, not {shown(message[key])}")
            clean.setdefault(THOUGHTS[0] if key in THOUGHTS else key, message[key])
    return clean


def _text_of(content: Any, where: str) -> str:
    """A string, or a list of text parts (OpenAI) put together."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise BadRow(f"{where}.content must be a string or a list of text parts, not {shown(content)}")
    texts = []
    for i, part in enumerate(content):
        if isinstance(part, dict) and part.get("type", "text") == "text" and isinstance(part.get("text"), str):
            texts.append(part["text"])
        elif isinstance(part, str):
            texts.append(part)
        else:
            raise BadRow(f"{where}.content[{i}] {_no_text_part(part)}")
    return "".join(texts)


def _no_text_part(part: Any) -> str:
    if not isinstance(part, dict):
        return f"must be a text part, not {shown(part)}"
    kind = part.get("type", "text")
    if kind != "text":
        return f"must be a text part, not {shown(kind)}: only text is trained on"
    if "text" in part:
        return f"is a text part whose text is {shown(part['text'])}, no string"
    return f'is a text part without "text": it has {", ".join(part)}'


def _call(call: Any, where: str) -> dict[str, Any]:
    """One function call as templates want it: arguments as an object, though OpenAI writes them as a string."""
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise BadRow(f"{where} must name a function and its arguments, not {shown(call)}")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        try:
            arguments = decode(arguments or "{}")
        except ValueError as error:
            raise BadRow(f"{where}.arguments: {problem(error)}: {shown(arguments)}") from None
    if not isinstance(arguments, dict):
        raise BadRow(f"{where}.arguments must be an object, not {shown(arguments)}")
    clean = {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
    return {"id": call["id"], **clean} if isinstance(call.get("id"), str) else clean


def _is_trained(message: dict[str, Any], role: str, where: str) -> bool:
    """An assistant's message is, unless a switch or a weight of it says no. Raises BadRow for what could be another."""
    flags = {}
    for key, value in message.items():
        if value is None or key in FIELDS:
            continue
        if key in SWITCHES:
            if not isinstance(value, bool):
                raise BadRow(f"{where}.{key} must be true or false, not {shown(value)}")
            flags[key] = value
        elif key in WEIGHTS:
            if isinstance(value, bool) or value not in (0, 1):
                raise BadRow(f"{where}.{key} must be 0 or 1, not {shown(value)}")
            flags[key] = bool(value)
        elif OWN_WEIGHT.search(key):
            raise BadRow(
                f"{where}.{key} could say what is trained on, and is not known{closest(key, (*SWITCHES, *WEIGHTS))}. "
                f"Known are {', '.join(SWITCHES)} (true or false) and {', '.join(WEIGHTS)} (0 or 1)"
            )
    if len(set(flags.values())) > 1:
        said = " and ".join(f"{key}={shown(message[key])}" for key in flags)
        raise BadRow(f"{where}: {said} contradict each other")
    wanted = next(iter(flags.values()), role == "assistant")
    if wanted and role != "assistant":
        raise BadRow(f"{where}: only an assistant's message can be trained on, not the {role}'s")
    return wanted


def parsed(value: Any, name: str) -> Any:
    """A list that stands in a text column (csv, parquet) as JSON."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            return decode(value)
        except ValueError as error:
            raise BadRow(f"{name}: {problem(error)}: {shown(value)}") from None
    return value


def shown(value: Any) -> str:
    """A value in a message, in short."""
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."
