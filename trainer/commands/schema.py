"""schema: the configuration as a JSON Schema, for editors."""

from __future__ import annotations

import json
from pathlib import Path

from trainer.atomic import write_atomically
from trainer.commands.arguments import key_values
from trainer.config.json_schema import recipe_schema
from trainer.errors import StorageError

HELP = """trainer schema [to=FILE]

Prints the JSON Schema of a recipe, made from the program's own types: with it an editor completes keys, shows what they
mean and underlines mistakes. to=FILE writes it there; a recipe names it in its first line:
# yaml-language-server: $schema=FILE
"""


def run(words: list[str]) -> int:
    target = key_values(words, ("to",)).get("to")
    text = json.dumps(recipe_schema(), indent=1, ensure_ascii=False) + "\n"
    if target is None:
        print(text, end="")
        return 0
    try:
        write_atomically(Path(target), text)
    except OSError as error:
        raise StorageError(f"to={target}: cannot be written: {error.strerror}.") from None
    print(f"written: {target}")
    return 0
