"""The program: a command word, then key=value words. Imports no torch; each command imports what it needs."""

from __future__ import annotations

import importlib
import os
import signal
import sys
import traceback
from collections.abc import MutableMapping
from contextlib import suppress

from trainer import __version__
from trainer.commands.report_error import report
from trainer.device.driver import kernel_module_loaded
from trainer.errors import ConfigError, OutOfMemoryError, TrainerError, closest, visible

COMMANDS = {
    "train": "fine-tune (the default)",
    "data": "audit the data as it would be trained on; show=N prints samples",
    "plan": "predict memory and speed, before any download",
    "adopt": "prove on a tiny twin what of a model can be trained here: adopt MODEL",
    "recipes": "list the recipes",
    "resume": "continue a stopped run: run=DIR",
    "import": "a recipe from an axolotl, LLaMA-Factory, torchtune or TRL configuration: import FILE",
    "schema": "the JSON Schema of a recipe, for editors: to=FILE",
    "generate": 'answer a prompt with a trained run: run=DIR prompt="..."',
    "report": "one page with plots of a run or a sweep: run=DIR",
    "why": "what went wrong in a run, and the rows behind it: run=DIR",
    "replay": "remake a step bit for bit and rank its rows: run=DIR step=N",
    "evaluate": "loss and perplexity, source by source, of base and adapter: run=DIR [data.path=FILE]",
    "merge": "the adapter in the base's weights, with a receipt: run=DIR [to=DIR]",
    "doctor": "what this machine can do, and the fix of each problem",
}
SPINS = 5000
"""Turns of a pause instruction: most operations follow one another within them, and a busy core loses little."""
HELP_FLAGS = ("-h", "--help")


def main() -> int:
    """Entry point; returns the exit code of the contract."""
    waiting_threads(os.environ)
    # On a CPU oneDNN and torch's layer over it keep 1,024 compiled primitives each. Packed rows come in many shapes:
    # bf16 filled both. 0.31 GiB at the quickstart's peak against 0.05 with 64, and a fifth more CPU time.
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "64")
    os.environ.setdefault("LRU_CACHE_CAPACITY", "64")
    # Growing segments instead of fixed ones: less of a card's memory is lost to fragments.
    if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ and kernel_module_loaded():
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    signal.signal(signal.SIGTERM, _terminated)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as nohup has it
        signal.signal(signal.SIGHUP, _terminated)
    words = sys.argv[1:]
    debug = "debug=true" in [word.lower() for word in words]
    try:
        return dispatch(words)
    except TrainerError as error:
        return report(error, debug)
    except KeyboardInterrupt:
        print("trainer: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        return 141
    except Exception as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing is not None and missing.split(".")[0] != "trainer":
            where = "./launch.sh takes the same words and runs them in its environment (source .venv/bin/activate)"
            return report(ConfigError(f"this Python ({sys.executable}) has no {missing}: {where}"), debug)
        if _out_of_memory(error):
            first = (str(error).strip() or type(error).__name__).splitlines()[0]
            text = f"{first}. Nothing is lost; give the program more memory, or a smaller model or less data"
            return report(OutOfMemoryError(text), debug)
        print(visible(traceback.format_exc()), file=sys.stderr, end="")
        print("trainer: this is a bug, not your mistake: please report it with the lines above", file=sys.stderr)
        return 1


def _out_of_memory(error: Exception) -> bool:
    """Outside a run's loading and training, which give advice; torch's own errors are none where it is not loaded."""
    if "torch" not in sys.modules:
        return isinstance(error, MemoryError)
    from trainer.device.measure import is_out_of_memory

    return is_out_of_memory(error)


def waiting_threads(environment: MutableMapping[str, str]) -> None:
    """How an OpenMP thread waits for work, where the user does not say: it spins for SPINS turns, then sleeps.

    GNU's library, which torch has on Linux, spins 300,000 turns on an idle machine: beside any other busy process
    every operation then takes a time slice. Never to spin costs a wake-up every operation (tests/bench/RESULTS.md).
    Others' (KMP_BLOCKTIME) have no setting shorter than a millisecond. Read when torch loads, so it is set before.
    """
    if "OMP_WAIT_POLICY" not in environment:
        environment.setdefault("GOMP_SPINCOUNT", str(SPINS))


def dispatch(words: list[str]) -> int:
    """Finds the command and runs it."""
    if "--version" in words:
        print(f"trainer {__version__}")
        return 0
    if any(word.startswith(("--options", "--config-dir", "-cd")) for word in words):
        from trainer.config.own import bring_along

        words = bring_along(words)
    name, rest = "train", words
    if words and not words[0].startswith(("-", "+", "~")) and "=" not in words[0]:
        name, rest = words[0], words[1:]
        if name not in COMMANDS and name.endswith((".yaml", ".yml")):
            stem = name.replace("\\", "/").rpartition("/")[2].rpartition(".")[0]
            raise ConfigError(
                f"{name}: a file is no command. Put it into ./recipes/ and say recipe={stem}; another trainer's "
                f"configuration becomes a recipe with: trainer import {name}"
            )
        if name not in COMMANDS:
            raise ConfigError(
                f"{name}: no such command{closest(name, COMMANDS)}. Commands: {', '.join(COMMANDS)}. "
                "Settings are written key=value."
            )
    if any(word in HELP_FLAGS for word in rest):
        if name == "train" and (not words or words[0] != "train"):
            from trainer.commands.help import text

            print(text(COMMANDS))
        else:
            print(_module(name).HELP)
        return 0
    return _module(name).run(rest)


def _terminated(signum: int, frame: object) -> None:
    """SIGTERM or SIGHUP where nothing can be lost yet; a run in progress has its own handler."""
    with suppress(OSError):  # the terminal may be what ended
        print("trainer: terminated", file=sys.stderr)
    raise SystemExit(128 + signum)


def _module(name: str):
    return importlib.import_module(f"trainer.commands.{name}")


if __name__ == "__main__":
    sys.exit(main())
