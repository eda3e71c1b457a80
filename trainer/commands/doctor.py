"""doctor: what this machine can do, and the fix of each problem."""

from __future__ import annotations

from trainer.errors import ConfigError

HELP = """trainer doctor

Looks at this machine: Python, torch and its CUDA against the driver, GPUs, bitsandbytes, kernels, the CPU's speed in
bf16, disk space, the hub, W&B and Hydra's plugins. Each row is ok, warn or problem; what can be better is followed by
its fix. Nothing is sent or downloaded, and no token or key is shown. The exit code is 0 whatever is found.
"""


def run(words: list[str]) -> int:
    if words:
        raise ConfigError(f"doctor takes no arguments, not {' '.join(words)}")
    from trainer.commands.checkup import CHECKS, PROBLEM, WARN, examine
    from trainer.tracking.console import Screen

    screen = Screen()
    rows = []
    with screen.bar("doctor", len(CHECKS)) as bar:
        for done, (part, check) in enumerate(CHECKS.items()):
            bar.at(done)
            rows += examine(part, check)
    cells = [(row.part, row.state, row.found + (f"\nfix: {row.fix}" if row.fix else "")) for row in rows]
    screen.columns("doctor", ("part", "state", "found"), cells)
    states = [row.state for row in rows]
    problems, warnings = states.count(PROBLEM), states.count(WARN)
    screen.say(f"{problems} problem{'s' * (problems != 1)}, {warnings} warning{'s' * (warnings != 1)}")
    return 0
