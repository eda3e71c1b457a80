"""recipes: the shelf, packaged and the user's own."""

from __future__ import annotations

from trainer.config.compose import recipes
from trainer.errors import ConfigError

HELP = """trainer recipes

Lists the recipes that come with the trainer and those in ./recipes: what each does, in its own words.
"""


def run(words: list[str]) -> int:
    if words:
        raise ConfigError(f"recipes takes no arguments, not {' '.join(words)}")
    shelf = recipes()
    width = max(len(name) for name in shelf)
    for name, recipe in shelf.items():
        comment = recipe.comment
        print(f"{name:<{width}}  {comment[0] if comment else '(no head comment)'}")
    return 0
