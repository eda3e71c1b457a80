"""python -m tests.bench NAME: runs the benchmark tests/bench/NAME.py, which has a function main()."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

NAMES = sorted(
    file.stem for file in Path(__file__).parent.glob("*.py") if not file.stem.startswith("_") and file.stem != "peers"
)


def main() -> int:
    if len(sys.argv) < 2 or sys.argv[1] not in NAMES:
        print(f"python -m tests.bench NAME, where NAME is one of: {', '.join(NAMES)}", file=sys.stderr)
        return 2
    name = sys.argv.pop(1)
    importlib.import_module(f"tests.bench.{name}").main()
    return 0


if __name__ == "__main__":
    sys.exit(main())
