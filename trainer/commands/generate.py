"""generate: answers from a finished run, through the same template and tokenizer path as training."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.commands.arguments import key_values, run_argument
from trainer.errors import ConfigError, DataError, StorageError, listing

if TYPE_CHECKING:
    from trainer.export.dialogue import Conversation
    from trainer.export.reload import Trained

ARGUMENTS = ("prompt", "prompts", "to", "system", "max_new_tokens", "batch_size")

HELP = """trainer generate run=DIR [prompt="..."] [prompts=FILE [to=FILE] [batch_size=8]] [system="..."]
                 [max_new_tokens=256]

Answers with the run's adapter on its base (or with its model). Greedy: the same prompt, the same answer.

  prompt="..."     one answer, shown as it is written
  prompts=FILE     answers to all prompts of a file, in batches: a prompt a line, or a .jsonl file of texts, of
                   {"prompt": "..."} or of {"messages": [...]}; one JSON object a prompt goes to the screen or to=FILE
  neither          a chat that keeps its history: /new begins anew, /exit or Ctrl-D ends, Ctrl-C stops an answer
"""


def run(words: list[str]) -> int:
    folder, saved = run_argument(words, ARGUMENTS)
    arguments = key_values(words, ("run", "model.trust_remote_code", *ARGUMENTS))
    limit, batch_size = _number(arguments, "max_new_tokens", 256), _number(arguments, "batch_size", 8)
    prompt, file, to, system = (arguments.get(name) for name in ("prompt", "prompts", "to", "system"))
    _check(prompt, file, to)
    dialogues = None if file is None else read_prompts(Path(file), system)
    from trainer.export.dialogue import Conversation
    from trainer.export.reload import load_trained
    from trainer.tracking.console import Screen, quiet_libraries

    quiet_libraries(Screen())
    trained = load_trained(saved, folder)
    if dialogues is not None:
        _batches(trained, dialogues, limit, batch_size, None if to is None else Path(to))
        return 0
    conversation = Conversation(trained, limit, system)
    if prompt is not None:
        conversation.ask(prompt, _show)
        print()
        return 0
    return _chat(conversation)


def read_prompts(file: Path, system: str | None) -> list[list[dict[str, Any]]]:
    """The dialogues of a file, each ending with a user's turn. Raises DataError with all bad lines."""
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"prompts={file}: cannot be read: {getattr(error, 'strerror', None) or 'not UTF-8'}.") from None
    dialogues, problems = [], []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line) if file.suffix in (".jsonl", ".ndjson") else line
            messages = _messages(value)
        except ValueError as error:
            problems.append(f"{file}:{number}: {error}")
            continue
        if system is not None and messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": system})
        dialogues.append(messages)
    if problems:
        raise DataError(listing(problems[:10]))
    if not dialogues:
        raise DataError(f"prompts={file}: holds no prompt.")
    return dialogues


def _messages(value: Any) -> list[dict[str, Any]]:
    """A line's dialogue; an expected answer at its end is left out. Raises ValueError."""
    if isinstance(value, dict) and isinstance(value.get("messages"), list):
        messages = value["messages"]
        if not all(isinstance(m, dict) and isinstance(m.get("role"), str) and "content" in m for m in messages):
            raise ValueError("messages: each needs a role and a content")
        if messages and messages[-1]["role"] == "assistant":
            messages = messages[:-1]
        if not messages:
            raise ValueError("messages: no turn to answer")
        return list(messages)
    text = value.get("prompt") if isinstance(value, dict) else value
    if not isinstance(text, str) or not text.strip():
        raise ValueError('needs a text, {"prompt": "..."} or {"messages": [...]}')
    return [{"role": "user", "content": text}]


def _batches(trained: Trained, dialogues: list, limit: int, batch_size: int, to: Path | None) -> None:
    """Writes {"messages", "answer"} a line, each batch as it is done: what is stopped keeps what it has."""
    from trainer.tracking.console import Screen

    screen = Screen()
    for messages in dialogues:
        trained.prompt(messages)  # what the template refuses is said before the first answer
    try:
        out = sys.stdout if to is None else to.open("x", encoding="utf-8")
    except OSError as error:
        raise StorageError(f"to={to}: cannot be written: {error.strerror}.") from None
    with screen.bar("answering", len(dialogues)) as bar:
        for start in range(0, len(dialogues), batch_size):
            batch = dialogues[start : start + batch_size]
            for messages, text in zip(batch, trained.answer_many(batch, limit), strict=True):
                print(json.dumps({"messages": messages, "answer": text}, ensure_ascii=False), file=out, flush=True)
            bar.at(start + len(batch))
    if to is not None:
        out.close()
        screen.say(f"{len(dialogues)} answers in {to}")


def _chat(conversation: Conversation) -> int:
    """Questions from the keyboard, or line by line from a pipe, until their end."""
    terminal = sys.stdin.isatty()
    if terminal:
        print("A chat with the trained model: /new begins anew, /exit or Ctrl-D ends, Ctrl-C stops an answer.")
    while True:
        try:
            question = input("you> " if terminal else "").strip()
        except EOFError:
            return 0
        if question == "/exit":
            return 0
        if question == "/new":
            conversation.forget()
        elif question:
            _reply(conversation, question)


def _reply(conversation: Conversation, question: str) -> None:
    before = conversation.forgotten
    try:
        conversation.ask(question, _show)
    except KeyboardInterrupt:
        print(" (stopped)", end="")
    except DataError as error:
        print(f"trainer: {error}", file=sys.stderr, end="")
    print()
    if conversation.forgotten > before:
        print(f"({conversation.forgotten} oldest turns no longer fit the model and are left out)", file=sys.stderr)


def _show(piece: str) -> None:
    print(piece, end="", flush=True)


def _check(prompt: str | None, file: str | None, to: str | None) -> None:
    problems = []
    if prompt is not None and file is not None:
        problems.append("prompt and prompts exclude each other: one answer, or those to a file")
    if prompt is not None and not prompt.strip():
        problems.append('prompt="": is empty; leave it out for a chat')
    if to is not None and file is None:
        problems.append("to=FILE belongs to prompts=FILE")
    if to is not None and Path(to).exists():
        problems.append(f"to={to}: is there already; choose another name")
    if problems:
        raise ConfigError(listing(problems))


def _number(arguments: dict[str, str], key: str, default: int) -> int:
    text = arguments.get(key, str(default))
    if not text.isdigit() or int(text) < 1:
        raise ConfigError(f"{key}={text}: must be a whole number above 0")
    return int(text)
