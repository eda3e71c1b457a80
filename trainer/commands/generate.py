"""generate: answers from a finished run, asked as the rows that it was trained on: through the chat template, or as
plain text."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.commands.arguments import real_number, run_argument, whole_number
from trainer.data.sources.files import DataFile
from trainer.data.sources.rows import json_value, read_pieces, text_of
from trainer.data.tokens.counts import ASKED_AS
from trainer.errors import ConfigError, DataError, StorageError, closest, in_json, listing, visible
from trainer.libraries import loading
from trainer.tracking.run_folder import RunFolder

if TYPE_CHECKING:
    from trainer.data.chat.encoder import Asked
    from trainer.export.dialogue import Conversation
    from trainer.export.reload import Trained

ARGUMENTS = ("prompt", "prompts", "to", "system", "as", "max_new_tokens", "batch_size")
DRAWN = ("temperature", "top_p", "top_k", "seed")

HELP = """trainer generate run=DIR [prompt="..."] [prompts=FILE [to=FILE] [batch_size=8]] [system="..."]
                 [as=chat|text] [max_new_tokens=256] [temperature=0.7 [top_p=0.9] [top_k=40] [seed=0]] [device=cpu]

Answers with the run's adapter on its base (or with its model). Greedy, the same prompt, the same answer, unless one of
temperature, top_p and top_k asks for drawn tokens; the seed says which.

  prompt="..."     one answer, shown as it is written
  prompts=FILE     answers to all prompts of a file, in batches: a prompt a line, or a .jsonl file of texts, of
                   {"prompt": "..."} or of {"messages": [...]}; one JSON object a prompt goes to the screen or to=FILE
  neither          a chat that keeps its history: /new begins anew, /exit or Ctrl-D ends, Ctrl-C stops an answer
  as=chat|text     through the chat template, or with the text itself for the model to go on from; without it as the
                   run's rows were trained on (text and prompt_completion rows of strings: text)
"""


def run(words: list[str]) -> int:
    folder, saved, arguments = run_argument(words, (*ARGUMENTS, *DRAWN))
    limit, batch_size = whole_number(arguments, "max_new_tokens", 1, 256), whole_number(arguments, "batch_size", 1, 8)
    prompt, file, to, system = (arguments.get(name) for name in ("prompt", "prompts", "to", "system"))
    _check(prompt, file, to)
    drawn = _drawn(arguments)
    way = _way(arguments.get("as"), folder, system)
    all_asked = None if file is None else read_prompts(Path(file), system, way == "text")
    with loading():
        import torch

        from trainer.export.answering import Sampling
        from trainer.export.dialogue import Conversation
        from trainer.export.reload import load_trained
        from trainer.tracking.console import Screen, quiet_libraries

    quiet_libraries(Screen())
    trained = load_trained(saved, folder)
    if drawn is not None:
        trained.sampling = Sampling(*drawn)
        torch.manual_seed(whole_number(arguments, "seed", 0, 0))
    print(f"{ASKED_AS[way]} (as=chat or as=text chooses)", file=sys.stderr)
    if all_asked is not None:
        _batches(trained, all_asked, limit, batch_size, None if to is None else Path(to))
        return 0
    conversation = Conversation(trained, limit, system, way == "text")
    if prompt is not None:
        conversation.ask(prompt, _show)
        print()
        return 0
    return _chat(conversation)


def _drawn(arguments: dict[str, str]) -> tuple[float, float, int] | None:
    """Temperature, top_p and top_k where one is asked for; None: greedy. Raises ConfigError."""
    temperature = real_number(arguments, "temperature", 0.0, 1.0)
    top_p, top_k = real_number(arguments, "top_p", 0.0, 1.0), whole_number(arguments, "top_k", 0, 0)
    if not 0 < top_p <= 1:
        raise ConfigError(f"top_p={arguments['top_p']}: must be above 0 and at most 1")
    whole_number(arguments, "seed", 0, 0)
    if temperature == 0 or not {"temperature", "top_p", "top_k"} & arguments.keys():
        return None
    return temperature, top_p, top_k


def _way(given: str | None, folder: Path, system: str | None) -> str:
    """chat or text: what is asked for, or what the run's rows were. Raises ConfigError."""
    if given is not None and given not in ASKED_AS:
        raise ConfigError(f"as={given}: must be one of {', '.join(ASKED_AS)}{closest(given, ASKED_AS)}")
    way = given or (RunFolder(folder).manifest() or {}).get("asked_as", "chat")
    if way == "text" and system is not None:
        raise ConfigError("system= belongs to a chat, and this is asked as plain text: leave it out, or say as=chat")
    return way


def read_prompts(file: Path, system: str | None, as_text: bool = False) -> list[Asked]:
    """What a file asks: dialogues that end with a user's turn, or texts. Raises DataError with all bad lines."""
    data_file = DataFile(file, str(file), "jsonl" if file.suffix in (".jsonl", ".ndjson") else "txt", None)
    all_asked, problems = [], []
    for piece in read_pieces(data_file):
        for number, line in piece.lines():
            try:
                value = json_value(line) if data_file.kind == "jsonl" else text_of(line).rstrip("\r")
                asked = _asked(value, as_text)
            except ValueError as error:
                problems.append(f"{file}:{number}: {error}")
                continue
            if system is not None and asked[0]["role"] != "system":
                asked.insert(0, {"role": "system", "content": system})
            all_asked.append(asked)
    if problems:
        raise DataError(listing(problems[:10]))
    if not all_asked:
        raise DataError(f"prompts={file}: holds no prompt.")
    return all_asked


def _asked(value: Any, as_text: bool) -> Asked:
    """What a line asks; an expected answer at the end of a dialogue is left out. Raises ValueError."""
    if isinstance(value, dict) and isinstance(value.get("messages"), list):
        if as_text:
            raise ValueError("messages are asked through the chat template, and this run as plain text: say as=chat")
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
    return text if as_text else [{"role": "user", "content": text}]


def _batches(trained: Trained, all_asked: list[Asked], limit: int, batch_size: int, to: Path | None) -> None:
    """Writes {"messages" or "prompt", "answer"} a line, each batch as it is done: what is stopped keeps what it has."""
    from trainer.tracking.console import Screen

    screen = Screen()
    for asked in all_asked:
        trained.prompt(asked)  # what the template refuses is said before the first answer
    try:
        out = sys.stdout if to is None else to.open("x", encoding="utf-8")
    except OSError as error:
        raise StorageError(f"to={to}: cannot be written: {error.strerror}.") from None
    with screen.bar("answering", len(all_asked)) as bar:
        for start in range(0, len(all_asked), batch_size):
            batch = all_asked[start : start + batch_size]
            for asked, text in zip(batch, trained.answer_many(batch, limit), strict=True):
                line = {"prompt" if isinstance(asked, str) else "messages": asked, "answer": text}
                print(in_json(json.dumps(line, ensure_ascii=False)), file=out, flush=True)
            bar.at(start + len(batch))
    if to is not None:
        out.close()
        screen.say(f"{len(all_asked)} answers in {to}")


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
        print(visible(f"trainer: {error}"), file=sys.stderr, end="")
    print()
    if conversation.forgotten > before:
        print(f"({conversation.forgotten} oldest turns no longer fit the model and are left out)", file=sys.stderr)


def _show(piece: str) -> None:
    print(visible(piece), end="", flush=True)


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
