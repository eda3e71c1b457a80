"""CPU time that the training loop adds to a step of a one-layer model, over a bare loop on batches made before.

    python -m tests.bench overhead

Both loops run in one process, interleaved a hundred steps at a time; process CPU time counts the thread that makes
batches too.
"""

from __future__ import annotations

import json
import statistics
import time

import torch
from accelerate import Accelerator

from tests.factories import FP32, llama, random_tokens
from trainer.config.compose import compose
from trainer.data.batches.prefetch import PrefetchingSteps
from trainer.device.measure import Memory
from trainer.model.attention import PACKED
from trainer.training.loop import Loop, train
from trainer.training.loss_scaling import LossScaling
from trainer.training.outliers import Outliers
from trainer.training.state import State, rng_state
from trainer.training.throughput import count_arithmetic

STEPS, ROUNDS = 100, 7


def main() -> None:
    """Prints milliseconds a step of both loops and their difference: the median of the rounds, and the spread."""
    torch.set_num_threads(1)
    config = compose(
        ["data.path=x", "precision=fp32", "schedule=constant", f"train.max_steps={STEPS}", "train.accumulation_steps=1",
         "train.micro_batch_tokens=64", "data.max_length=32", "optim=adamw"]
    ).config  # fmt: skip
    tokens = random_tokens([16, 12, 20, 9, 30, 25, 7, 13] * 8)
    device = torch.device("cpu")
    model = llama(PACKED, num_hidden_layers=1).train()
    parameters = list(model.parameters())
    optimizer = config.optim.build(parameters)
    rows = []
    with Memory(device) as memory:
        for _ in range(ROUNDS):
            steps = PrefetchingSteps(tokens, config.packing, config.train, 0, pin=False)
            loop = Loop(
                model=model,
                parameters=parameters,
                optimizer=optimizer,
                schedule=config.schedule,
                loss=config.loss,
                steps=steps,
                dtypes=FP32,
                accelerator=Accelerator(cpu=True),
                arithmetic=count_arithmetic(model, 0, True),
                recomputed=0.0,
                memory=memory,
                max_grad_norm=1.0,
                outliers=Outliers(None),
                scaling=LossScaling(torch.float32),
                peak_learning_rate=1e-4,
            )
            began = time.process_time()
            train(loop, State(), rng_state(device), lambda state, grad_norm: None, lambda: None)
            own = time.process_time() - began

            batches = [steps.step(step)[0] for step in range(1, STEPS + 1)]
            began = time.process_time()
            for batch in batches:
                loss = config.loss.sum(model, batch) / batch.num_targets
                loss.backward()
                torch.nn.utils.clip_grad_norm_(parameters, 1.0).item()
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            rows.append((own / STEPS * 1e3, (time.process_time() - began) / STEPS * 1e3))
    added = [own - bare for own, bare in rows[1:]]
    result = {
        "loop_ms": statistics.median(own for own, _ in rows[1:]),
        "bare_ms": statistics.median(bare for _, bare in rows[1:]),
        "added_ms": statistics.median(added),
        "added_ms_range": [min(added), max(added)],
        "steps": STEPS,
        "rounds": ROUNDS - 1,
    }
    print(json.dumps(result))
