"""generate: an answer from a finished run, through the same template and tokenizer path as training."""

from __future__ import annotations

from trainer.commands.arguments import key_values, run_argument
from trainer.errors import ConfigError

ARGUMENTS = ("prompt", "max_new_tokens")

HELP = """trainer generate run=DIR prompt="..." [max_new_tokens=256]

Answers the prompt with the run's adapter on its base (or with its model). Greedy: the same prompt, the same answer.
"""


def run(words: list[str]) -> int:
    folder, saved = run_argument(words, ARGUMENTS)
    arguments = key_values(words, ("run", *ARGUMENTS))
    if not arguments.get("prompt"):
        raise ConfigError('prompt="..." is missing: what should be answered?')
    limit = arguments.get("max_new_tokens", "256")
    if not limit.isdigit() or int(limit) < 1:
        raise ConfigError(f"max_new_tokens={limit}: must be a whole number above 0")
    from trainer.export.reload import load_trained

    trained = load_trained(saved, folder)
    print(trained.answer([{"role": "user", "content": arguments["prompt"]}], int(limit)))
    return 0
