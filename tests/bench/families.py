"""Each model family through the QLoRA path on a tiny random model: how far packed is from alone, and reloaded from run.

    python -m tests.bench families

NF4, LoRA on all linear layers, packed, full checkpointing, three steps in fp32 on a CPU; the oracles are those of
tests/model/test_families.py: transformers without packing and without this trainer's attention, and peft alone.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import peft
import torch
from safetensors.torch import load_file

from tests.factories import packed_batch, padded_batch
from tests.model.test_families import CPU, FAMILIES, WINDOW, Family, Trial, plain_base, samples, trial_of
from tests.support import metrics
from trainer.config.compose import compose
from trainer.config.saved import load_run
from trainer.export.reload import load_trained
from trainer.model import attention
from trainer.model.loading import base as load


def main() -> None:
    """Prints a Markdown table, a row a family."""
    print("| family | attention | loss, step 1 to 3 | packed against alone | moved | reloaded against the run |")
    print("|---|---|---|---|---|---|")
    for family in FAMILIES:
        with tempfile.TemporaryDirectory() as folder:
            print(_row(family, trial_of(family, Path(folder))), flush=True)


@torch.no_grad()
def _row(family: Family, trial: Trial) -> str:
    run = compose(trial.overrides)
    model, config = run.config.model, load.load_config(run.config.model)
    chosen, _ = attention.choose(config, CPU, torch.float32)
    dtypes = run.config.precision.build(CPU)
    base = load.load_base(model, config, run.config.quant, dtypes, CPU, chosen).eval()
    tokens = samples(config.vocab_size, [WINDOW + 9, 5, 2 * WINDOW])
    packed = base(**packed_batch(tokens).inputs()).logits[0]
    plain = plain_base(trial)
    alone = torch.cat([plain(input_ids=padded_batch(tokens, i).input_ids, use_cache=False).logits[0] for i in range(3)])

    torch.manual_seed(run.config.seed)
    fresh = peft.get_peft_model_state_dict(run.config.adapter.attach(base))
    trained = load_file(trial.run_dir / "adapter" / "adapter_model.safetensors")
    moved = sum(not torch.equal(fresh[name], trained[name]) for name in fresh)

    ids = torch.arange(10, 40)[None]
    expected = peft.PeftModel.from_pretrained(plain, trial.run_dir / "adapter").eval()(ids, use_cache=False).logits
    ours = load_trained(load_run(trial.run_dir), trial.run_dir).model.eval()(input_ids=ids, use_cache=False).logits
    losses = [row["loss"] for row in metrics(trial.run_dir) if row["event"] == "train"]
    return (
        f"| {family.name} | {chosen} | {losses[0]:.3f} to {losses[-1]:.3f} | {_apart(packed, alone):.1e} "
        f"| {moved} of {len(fresh)} | {_apart(ours, expected):.1e} |"
    )


def _apart(one: torch.Tensor, other: torch.Tensor) -> float:
    """Largest difference of two logits, in parts of the largest logit."""
    return ((one - other).abs().max() / other.abs().max()).item()
