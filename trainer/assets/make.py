"""Remakes the embedded default: `python -m trainer.assets.make`.

Writes the corpus, trains the tokenizer, pretrains the base with the trainer itself (recipe=pretrain_tiny), and says
how far the held-out loss is from the one of the base that was there before. --no-train stops before pretraining.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from safetensors.torch import load_file, save_file

from trainer.assets import corpus, tokenizer
from trainer.tracking.run_folder import versions

ASSETS = Path(__file__).parent
TINY = ASSETS / "tiny"
MADE = TINY / "made.json"
MAX_LENGTH = 1024
REMAKE_TOLERANCE = 0.02
"""Relative difference of held-out losses that another machine's rounding may cause."""


def main() -> int:
    corpus.write(ASSETS / "data")
    TINY.mkdir(exist_ok=True)
    files = [ASSETS / "data" / name for name in ("dialogues.jsonl", "stories.jsonl")]
    tokenizer.train(files, MAX_LENGTH).save_pretrained(TINY)
    print("corpus and tokenizer written")
    if "--no-train" in sys.argv:
        return 0
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        subprocess.run([sys.executable, "-m", "trainer", "recipe=pretrain_tiny", f"output_dir={run}"], check=True)
        return _keep(run)


def _keep(run: Path) -> int:
    """Copies the trained base into the assets; returns 1 if it differs from the one before by more than rounding."""
    import torch

    loss = json.loads((run / "summary.json").read_text())["eval_loss"]
    before = json.loads(MADE.read_text())["held_out_loss"] if MADE.exists() else None
    # bf16: half the size, and what a base is usually stored in.
    weights = {name: tensor.to(torch.bfloat16) for name, tensor in load_file(run / "model/model.safetensors").items()}
    save_file(weights, TINY / "model.safetensors", metadata={"format": "pt"})
    for name in ("config.json", "generation_config.json"):
        shutil.copy(run / "model" / name, TINY / name)
    MADE.write_text(json.dumps({"held_out_loss": loss, "versions": versions()}, indent=1) + "\n")
    print(f"held-out loss {loss:.4f}" + ("" if before is None else f", before {before:.4f}"))
    return int(before is not None and abs(loss - before) > REMAKE_TOLERANCE * before)


if __name__ == "__main__":
    sys.exit(main())
