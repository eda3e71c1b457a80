"""What users bring along: a folder of option YAMLs, and a module of option classes.

Both are named on the command line. A module is code, and runs only where the command line names it: a recipe or a run
folder, which may come from someone else, can say that it needs one and cannot load it.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
import traceback
from dataclasses import dataclass, field, is_dataclass
from pathlib import Path

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from trainer.config.schema import SECTIONS
from trainer.errors import ConfigError, closest, listing
from trainer.registry import OPTIONS
from trainer.resources import shipped

OPTIONS_FLAG, FOLDER_FLAGS = "--options", ("--config-dir", "-cd")
FLAGS = {
    OPTIONS_FLAG: "a Python file (my_options.py) or module (my_package.options)",
    **dict.fromkeys(FOLDER_FLAGS, "a folder that holds <group>/<name>.yaml"),
}


@dataclass
class Own:
    """What this process's command line brought along."""

    folders: list[Path] = field(default_factory=list)
    """--config-dir"""
    modules: list[str] = field(default_factory=list)
    """--options: absolute files and importable names"""
    module_of: dict[type, str] = field(default_factory=dict)
    """the module that each own option class came from"""

    def words(self) -> list[str]:
        """The flags that bring the same along in another process."""
        folders = [word for folder in self.folders for word in (FOLDER_FLAGS[0], str(folder))]
        return folders + [word for module in self.modules for word in (OPTIONS_FLAG, module)]


OWN = Own()
"""Like `OPTIONS`, of this process: it is filled from the command line, before the first look at an option."""


def own_folders() -> list[Path]:
    """Folders with the user's own options, the first of which wins."""
    folders = [*OWN.folders, Path.cwd() / "conf"]
    return [folder for folder in folders if folder.is_dir() and folder.resolve() != shipped("conf").resolve()]


def bring_along(words: list[str]) -> list[str]:
    """Takes the flags of this module from a command line; returns the other words. Raises ConfigError."""
    OWN.folders.clear()
    OWN.modules.clear()
    rest: list[str] = []
    remaining = iter(words)
    for word in remaining:
        name, equals, value = word.partition("=")
        if name not in FLAGS:
            rest.append(word)
            continue
        value = value if equals else next(remaining, "")
        if not value or value.startswith("-"):
            raise ConfigError(
                f"{name}: wants {FLAGS[name]}: {name} {'my_options.py' if name == OPTIONS_FLAG else 'DIR'}"
            )
        if name == OPTIONS_FLAG:
            load_options(value)
        elif not Path(value).is_dir():
            raise ConfigError(f"{name} {value}: there is no such folder")
        else:
            OWN.folders.append(Path(value).absolute())
    return rest


def load_options(word: str) -> None:
    """Imports a module of options: a file, or a name that can be imported, also from the current folder.

    Raises ConfigError with the place where it fails; nothing of it stays registered then.
    """
    is_file = word.endswith(".py") or "/" in word
    word = str(Path(word).absolute()) if is_file else word
    if word not in OWN.module_of.values():
        before = {group: dict(classes) for group, classes in OPTIONS.items()}
        try:
            classes = _registered_by(word, is_file)
        except BaseException:
            OPTIONS.clear()
            OPTIONS.update(before)
            raise
        OWN.module_of |= dict.fromkeys(classes, word)
    OWN.modules.append(word)


def _registered_by(word: str, is_file: bool) -> list[type]:
    """The option classes that importing a module registers."""
    known = {cls for classes in OPTIONS.values() for cls in classes.values()}
    try:
        _import_file(Path(word)) if is_file else _import_name(word)
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{OPTIONS_FLAG} {word}: {_place(error, word)}") from error
    new = [(g, n, cls) for g, classes in OPTIONS.items() for n, cls in classes.items() if cls not in known]
    problems = [problem for group, name, cls in new for problem in _class_problems(group, name, cls)]
    if not new:
        problems = [
            f'{OPTIONS_FLAG} {word}: registers no option. Write @option("group", "name") over @dataclass over a class '
            f"that extends its section. Groups: {', '.join(SECTIONS)}"
        ]
    if problems:
        raise ConfigError(listing(problems))
    return [cls for _, _, cls in new]


def _import_file(file: Path) -> None:
    if not file.is_file():
        raise FileNotFoundError("there is no such file")
    name = f"own_options_{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)


def _import_name(name: str) -> None:
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)  # last: what lies in the folder stands in for no library
    importlib.import_module(name)


def _place(error: BaseException, word: str) -> str:
    """What stopped an import, after the line of the user's code where it did."""
    what = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no reason given'}"
    if isinstance(error, SyntaxError) and error.filename:
        return f"cannot be imported: {error.filename}:{error.lineno}: {type(error).__name__}: {error.msg}"
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith("<frozen")]
    frames = [f for f in frames if f.filename not in (__file__, importlib.__file__)]
    own = [f for f in frames if Path(f.filename).is_relative_to(Path(word).parent if "/" in word else Path.cwd())]
    frame = (own or frames or [None])[-1]
    return f"cannot be imported: {f'{frame.filename}:{frame.lineno}: ' if frame else ''}{what}"


def _class_problems(group: str, name: str, cls: type) -> list[str]:
    """Why a class cannot be an option, at its line."""
    said = f'@option("{group}", "{name}")'
    if inspect.isclass(cls):
        said = f"{inspect.getsourcefile(cls)}:{inspect.getsourcelines(cls)[1]}: {said}"
    if group not in SECTIONS:
        return [f"{said}: no such group{closest(group, SECTIONS)}. Allowed: {', '.join(SECTIONS)}"]
    section = SECTIONS[group]
    if not (inspect.isclass(cls) and issubclass(cls, section)):
        return [f"{said}: must extend {section.__module__}.{section.__qualname__}"]
    if not is_dataclass(cls) or set(inspect.get_annotations(cls)) - set(cls.__dataclass_fields__):
        return [f"{said}: must be a dataclass: @dataclass stands below @option"]
    if inspect.isabstract(cls):
        return [f"{said}: lacks the method {', '.join(sorted(cls.__abstractmethods__))} of its section"]
    try:
        OmegaConf.structured(cls)
    except OmegaConfBaseException as error:
        return [f"{said}: a field has a type that no YAML can hold: {str(error).splitlines()[0]}"]
    return []
