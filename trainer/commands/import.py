"""import: the configuration of another trainer as a recipe, with what became of each of its keys."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

from trainer.atomic import write_atomically
from trainer.commands.arguments import key_values
from trainer.config.compose import compose
from trainer.config.own import OWN
from trainer.config.peers import DIFFERS, IDLE, MAPPED, NONE, PEERS, Imported, import_file, recipe_text
from trainer.errors import ConfigError, StorageError, closest
from trainer.redact import redacted
from trainer.tracking.console import Screen

HELP = """trainer import FILE [to=recipe.yaml] [from=axolotl|llama_factory|torchtune|trl]

Makes a recipe of a configuration of axolotl, LLaMA-Factory, torchtune or TRL, recognised by its keys, and shows what
became of each key: what mapped, what differs in meaning, what has no counterpart. to= names the file, which must not
exist; without it ./recipes/NAME.yaml is written, which recipe=NAME picks.
"""


def run(words: list[str]) -> int:
    files = [word for word in words if "=" not in word and not word.startswith("-")]
    arguments = key_values([word for word in words if word not in files], ("to", "from"))
    if len(files) != 1:
        raise ConfigError(f"import takes one FILE, not {len(files)}: trainer import axolotl.yaml [to=recipe.yaml]")
    peer = arguments.get("from")
    if peer is not None and peer not in PEERS:
        raise ConfigError(f"from={peer}: no such trainer{closest(peer, PEERS)}. Allowed: {', '.join(PEERS)}")
    file = Path(files[0])
    found = import_file(file, peer)
    target = Path(arguments.get("to") or Path("recipes") / f"{_name(file.stem)}.yaml")
    if target.suffix != ".yaml" or _name(target.stem) != target.stem:
        raise ConfigError(f"to={target}: a recipe is NAME.yaml, with letters, digits and _ in its name")
    if target.exists():
        raise StorageError(f"to={target}: is there already, and is not overwritten. Choose another name")
    text = redacted(recipe_text(found, file.name, target.stem))
    problem = _problem(text, target.stem)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(target, text)
    except OSError as error:
        raise StorageError(f"to={target}: cannot be written: {error.strerror}.") from None
    _show(found, file, target)
    if problem is not None:
        raise ConfigError(f"{target}: is written, and does not compose yet: {problem}")
    return 0


def _name(stem: str) -> str:
    return re.sub(r"\W+", "_", stem, flags=re.ASCII).strip("_") or "imported"


def _problem(text: str, name: str) -> str | None:
    """What is wrong with the recipe, or None: it is composed as recipe=NAME would be."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "recipe" / f"{name}.yaml"
        place.parent.mkdir()
        place.write_text(text, encoding="utf-8")
        OWN.folders.insert(0, Path(folder))
        try:
            compose([f"recipe={name}"])
        except ConfigError as error:
            return str(error).replace(str(place), f"{name}.yaml")
        finally:
            OWN.folders.pop(0)
    return None


def _show(found: Imported, file: Path, target: Path) -> None:
    screen = Screen()
    screen.say(f"{file}: a configuration of {found.peer}", style="bold")
    for verdict in (MAPPED, DIFFERS, NONE, IDLE):
        rows = [row for row in found.rows if row.verdict == verdict]
        if not rows:
            continue
        cells = [(row.key, _short(row.value), _ours(row.ours), row.says) for row in rows]
        screen.columns(f"{verdict}: {len(rows)}", (found.peer, "value", "here", "because"), cells)
    if found.empty:
        screen.say(f"without a value, so as {found.peer} has it by default: {', '.join(found.empty)}")
    told = {key for row in found.rows for key in row.ours}
    silent = {key: value for key, value in {**found.picks, **found.settings}.items() if key not in told}
    screen.say(f"where the file is silent, as {found.peer} does: {_ours(silent)}")
    if found.picks["data"] == "quickstart":
        screen.say("no data are named that can be found: say data.path=, or the embedded data are trained on", "yellow")
    place = f"recipe={target.stem}" if target.parent.resolve() == Path("recipes").resolve() else "moved to ./recipes"
    screen.say(f"written: {target} ({place}). See what it takes: trainer plan recipe={target.stem}")


def _ours(settings: dict[str, object]) -> str:
    return " ".join(f"{key}={'null' if value is None else value}" for key, value in settings.items())


def _short(value: object, most: int = 60) -> str:
    text = " ".join(str(value).split())
    return text if len(text) <= most else f"{text[: most - 1]}…"
