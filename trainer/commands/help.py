"""The program's help: commands, groups with options, recipes, examples; read from conf/ and recipes/."""

from __future__ import annotations

from trainer.config.schema import SECTIONS
from trainer.config.shelf import options, recipes

EXAMPLES = (
    ("recipe=quickstart", "two minutes on a CPU, no download"),
    ("recipe=quickstart data.path=my.jsonl", "your own rows"),
    ("recipe=qlora_llama3_8b adapter.r=32 optim=adamw_8bit", "change values, pick options"),
    ("recipe=quickstart sweep=learning_rate", "a prepared sweep"),
    ("-m recipe=quickstart adapter.r=8,16,32", "your own sweep"),
    ("recipe=quickstart --cfg job", "print the composed configuration"),
)
OWN = (
    ("conf/<group>/<name>.yaml", "an option of yours, in the folder you work in; picked with group=name"),
    ("--config-dir DIR, -cd DIR", "more such folders"),
    ("--options FILE.py", "classes of yours; or an importable module. Code: it is named here, never in a recipe"),
)


def text(commands: dict[str, str]) -> str:
    """The whole page."""
    lines = ["trainer: fine-tunes Hugging Face causal language models on one GPU, or slowly on a CPU.", ""]
    lines += ["usage: python -m trainer [COMMAND] [key=value ...] [Hydra flags]", ""]
    lines += _section("commands (COMMAND --help says more)", commands.items())
    lines += _section("groups: pick one with group=option", ((g, ", ".join(options(g))) for g in (*SECTIONS, "sweep")))
    lines += _section(
        "recipes: start from one with recipe=NAME",
        ((name, (recipe.comment or [""])[0]) for name, recipe in recipes().items()),
    )
    lines += _section("examples: python -m trainer ...", EXAMPLES)
    lines += _section("your own options", OWN)
    lines.append("Every value of an option stands in conf/<group>/<option>.yaml; --cfg job prints them all.")
    return "\n".join(lines)


def _section(title: str, rows) -> list[str]:
    rows = list(rows)
    width = max(len(name) for name, _ in rows)
    return [title, *(f"  {name:<{width}}  {meaning}" for name, meaning in rows), ""]
