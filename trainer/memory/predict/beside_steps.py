"""What a run does beside its steps, on fake tensors: the evaluation of held-out rows, and answers at the end.

Neither keeps anything for backward: a block's workspace is there while it runs, however deep the model is. Saving and
export write tensors from where they lie; on a GPU they go through host memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import DynamicCache, PretrainedConfig

from trainer.errors import PlanError, TrainerError
from trainer.memory.predict.outline import Outline, outline
from trainer.memory.predict.profile import Shape
from trainer.memory.predict.recorder import Recorder
from trainer.memory.predict.trace import DEPTH, fake_batch, planned_attention, to_fakes
from trainer.model.fused.pieces import shortened
from trainer.model.live_storages import ROUNDING
from trainer.model.precision import Dtypes

if TYPE_CHECKING:
    from trainer.memory.predict.sections import Sections


@dataclass(frozen=True)
class HeldOut:
    """What a run does with its held-out rows, by sizes."""

    evaluation: Shape
    """the largest micro-batch of an evaluation"""
    answer_tokens: int
    """the longest prompt that is answered at the end, and its answer; 0: none is"""


def evaluation_bytes(
    config: Sections, model_config: PretrainedConfig, dtypes: Dtypes, device_type: str, shape: Shape
) -> int:
    """Most bytes in the evaluation of a micro-batch, beside the model's own. Raises PlanError."""
    chosen = planned_attention(shape.packed, model_config, device_type, dtypes.compute, config.model.attention)

    def run(model: Outline) -> Any:
        with dtypes.autocast():
            return config.loss.sum(model.base, fake_batch(shape, chosen))

    found = _run(config, model_config, dtypes, device_type, chosen, run, f"an evaluation of {shape.num_tokens} tokens")
    return found.peak


def answer_bytes(
    config: Sections, model_config: PretrainedConfig, dtypes: Dtypes, device_type: str, num_tokens: int
) -> int:
    """The same for one prompt with its answer, `num_tokens` together: keys and values of every block, and the work of
    a pass over them all, of which the last token's logits are made. Raises PlanError."""
    chosen = planned_attention(False, model_config, device_type, dtypes.compute)

    def run(model: Outline) -> Any:
        tokens = torch.empty((1, num_tokens), dtype=torch.int64)
        last = {"logits_to_keep": 1} if model.base._supports_logits_to_keep() else {}
        cache = DynamicCache(config=model.base.config)
        with dtypes.autocast() if device_type == "cuda" else nullcontext():  # as export.answering
            model.base(input_ids=tokens, use_cache=True, past_key_values=cache, **last)
        return cache

    found = _run(config, model_config, dtypes, device_type, chosen, run, f"answers of {num_tokens} tokens")
    return found.peak + (found.whole_depth - found.depth) * found.kept // found.depth


@dataclass(frozen=True)
class _Found:
    peak: int
    kept: int
    """of what the run returns"""
    depth: int
    """blocks that were run"""
    whole_depth: int


def _run(
    config: Sections,
    model_config: PretrainedConfig,
    dtypes: Dtypes,
    device_type: str,
    attention: str,
    run: Callable[[Outline], Any],
    what: str,
) -> _Found:
    """Runs the model without gradients; bytes above what it holds."""
    whole = model_config.get_text_config().num_hidden_layers
    depth = min(DEPTH, whole)
    model = outline(config, model_config, dtypes.compute, attention, depth)
    if not model.layers():
        depth, model = whole, outline(config, model_config, dtypes.compute, attention)
    recorder = Recorder(ROUNDING[device_type])
    with FakeTensorMode(allow_non_fake_inputs=True), shortened(), torch.no_grad():
        to_fakes(model)
        model.base.eval()
        recorder.hold_all(model)
        with recorder.storages, _named(what):
            before, _ = recorder.storages.mark()
            result = run(model)
            now, peak = recorder.storages.mark()
            del result
    return _Found(peak - before, now - before, depth, whole)


@contextmanager
def _named(what: str) -> Iterator[None]:
    """Says what could not be planned."""
    try:
        yield
    except TrainerError:
        raise
    except Exception as error:
        raise PlanError.of(what, error) from error
