"""From a row's fields to a sample: a dialogue, or plain text with an optional prompt."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from trainer.data.options import Format
from trainer.data.rows import Row
from trainer.errors import closest

ROLES = ("system", "user", "assistant")

KEYS: dict[Format, tuple[str, ...]] = {
    Format.messages: ("messages",),
    Format.alpaca: ("instruction", "output"),
    Format.prompt_completion: ("prompt", "completion"),
    Format.text: ("text",),
}


class BadRow(ValueError):
    """A row that cannot become a sample; the message says why, the caller knows where."""


@dataclass(frozen=True)
class Dialogue:
    """Messages for the chat template."""

    messages: list[dict[str, str]]
    trained: list[bool]
    """which messages may be targets, before data.train_on"""


@dataclass(frozen=True)
class PlainText:
    """Text without a template: targets are all of `text`, none of `prompt`."""

    prompt: str
    text: str


Sample = Dialogue | PlainText


def to_sample(row: Row, format: Format) -> Sample:
    """The sample in a row. Raises BadRow."""
    if row.fields is None:
        raise BadRow(row.problem)
    fields = row.fields
    chosen = _detect(fields) if format is Format.auto else format
    missing = [key for key in KEYS[chosen] if key not in fields]
    if missing:
        hints = ", ".join(f"{key}{closest(key, fields)}" for key in missing)
        raise BadRow(f"format {chosen.value} needs the field {hints}; the row has {', '.join(fields) or 'none'}")
    return _READERS[chosen](fields)


def _detect(fields: dict[str, Any]) -> Format:
    found = [format for format, keys in KEYS.items() if all(key in fields for key in keys)]
    if len(found) == 1:
        return found[0]
    if found:
        names = " and ".join(format.value for format in found)
        raise BadRow(f"the row fits {names}: choose one with data.format=")
    known = "; ".join(f"{format.value}: {', '.join(keys)}" for format, keys in KEYS.items())
    raise BadRow(f"unknown format: the row has {', '.join(fields) or 'no fields'}; known are {known}")


def _messages(fields: dict[str, Any]) -> Dialogue:
    return _dialogue(fields["messages"], "messages")


def _dialogue(messages: Any, name: str) -> Dialogue:
    if not isinstance(messages, list) or not messages:
        raise BadRow(f"{name} must be a list of messages, not {_shown(messages)}")
    clean = []
    for i, message in enumerate(messages):
        if not isinstance(message, dict):
            raise BadRow(f"{name}[{i}] must be an object with role and content, not {_shown(message)}")
        role, content = message.get("role"), message.get("content")
        if role not in ROLES:
            raise BadRow(
                f"{name}[{i}].role is {_shown(role)}{closest(str(role), ROLES)}; allowed are {', '.join(ROLES)}"
            )
        if not isinstance(content, str):
            raise BadRow(f"{name}[{i}].content must be a string, not {_shown(content)}")
        clean.append({"role": role, "content": content})
    return Dialogue(clean, [message["role"] == "assistant" for message in clean])


def _alpaca(fields: dict[str, Any]) -> Dialogue:
    instruction, output = _string(fields, "instruction"), _string(fields, "output")
    given = _string(fields, "input") if fields.get("input") is not None else ""
    question = f"{instruction}\n\n{given}" if given else instruction
    return _dialogue([{"role": "user", "content": question}, {"role": "assistant", "content": output}], "messages")


def _prompt_completion(fields: dict[str, Any]) -> Sample:
    prompt, completion = fields["prompt"], fields["completion"]
    if isinstance(prompt, list) and isinstance(completion, list):
        before, after = _dialogue(prompt, "prompt"), _dialogue(completion, "completion")
        return Dialogue(before.messages + after.messages, [False] * len(before.messages) + after.trained)
    return PlainText(_string(fields, "prompt"), _string(fields, "completion"))


def _text(fields: dict[str, Any]) -> PlainText:
    return PlainText("", _string(fields, "text"))


def _string(fields: dict[str, Any], key: str) -> str:
    if not isinstance(fields[key], str):
        raise BadRow(f"{key} must be a string, not {_shown(fields[key])}")
    return fields[key]


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."


_READERS = {
    Format.messages: _messages,
    Format.alpaca: _alpaca,
    Format.prompt_completion: _prompt_completion,
    Format.text: _text,
}
