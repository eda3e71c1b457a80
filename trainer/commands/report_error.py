"""A user's mistake on the screen: one block, no traceback."""

from __future__ import annotations

import sys
import traceback

from trainer.errors import TrainerError, visible


def report(error: TrainerError, debug: bool) -> int:
    """Prints the error to stderr; returns the exit code."""
    if debug:
        print(visible("".join(traceback.format_exception(error))), file=sys.stderr, end="")
    print(visible(f"trainer: {error.kind}: {error}"), file=sys.stderr)
    return error.exit_code
