"""What each technique brings to a 70B at B=1, T=2048, one upon the other: in the textbook's numbers and in ours."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from trainer.device.find import Device
from trainer.memory.advice import textbook as book
from trainer.memory.predict.moments import Prediction, predict
from trainer.memory.predict.outline import shallower
from trainer.memory.predict.planner import Planner
from trainer.memory.predict.static import Static
from trainer.model.checkpointing import FullCheckpointing, NoCheckpointing
from trainer.model.loading.base import planned_config
from trainer.model.model_settings import Weights
from trainer.model.offload.block_stream import SLOTS
from trainer.units import GIB

if TYPE_CHECKING:
    from trainer.memory.advice.whatif import Options
    from trainer.memory.predict.sections import Sections
    from trainer.model.checkpointing import Checkpointing

MODEL, TOKENS, RANK = "llama3_70b", 2048, 16
COMMON = {"precision": "bf16", "packing": "best_fit", "loss": "chunked", "offload": "none"}


@dataclass(frozen=True)
class Rung:
    """One technique more. GiB."""

    technique: str
    book_static: float
    book_activations: float
    static: float
    """weights, adapter, gradients, optimizer state"""
    activations: float
    """what forward and backward take above that at their highest"""
    peak: float
    """of the whole step; an optimizer's own temporaries can be the highest"""


def stack(config: Sections, options: Options) -> list[Rung]:
    """From full fine-tuning to a streamed base. The adapter's and the loss's own settings are those of `config`."""
    full = _Deep(config, options, quant="none", adapter="none", optim="adamw")
    eight_bit = _Deep(config, options, quant="none", adapter="none", optim="adamw_8bit")
    lora = _Deep(config, options, quant="none", adapter="lora", optim="adamw_8bit")
    qlora = _Deep(config, options, quant="nf4", adapter="lora", optim="adamw_8bit")
    streamed = _Deep(config, options, quant="nf4", adapter="lora", optim="adamw_8bit", offload="base_cpu")
    layers, hidden, parameters = full.layers, full.hidden, full.static.base_parameters
    theta = book.lora_parameters(layers, 4, hidden, RANK)
    kept = book.activations_rule(1, TOKENS, hidden, layers)
    inputs = book.activations_checkpointed(1, TOKENS, hidden, layers)
    rungs = [
        ("full, mixed precision", book.full_mixed_precision(parameters), kept, full.predict(NoCheckpointing())),
        ("+ checkpointing", book.full_mixed_precision(parameters), inputs, full.predict(FullCheckpointing())),
        (
            "+ 8-bit states",
            book.full_mixed_precision(parameters, book.ADAM_8BIT),
            inputs,
            predict(eight_bit.static, full.profiles(FullCheckpointing()), eight_bit.workspace, accumulates=True),
        ),
        (f"+ LoRA r={RANK}", book.lora(parameters, theta), inputs, lora.predict(FullCheckpointing())),
        ("+ QLoRA", book.qlora(parameters, theta), inputs, qlora.predict(FullCheckpointing())),
        (
            f"+ streamed base, {SLOTS} blocks held",
            book.qlora(SLOTS * parameters // layers, theta),
            inputs,
            predict(streamed.static, qlora.profiles(FullCheckpointing()), streamed.workspace, accumulates=True),
        ),
    ]
    return [_rung(*rung) for rung in rungs]


def _rung(name: str, theirs: int, live: int, ours: Prediction) -> Rung:
    step = max(moment.peak for moment in ours.moments if moment.name != "optimizer step")
    return Rung(name, theirs / GIB, live / GIB, ours.static.total / GIB, step / GIB, ours.peak / GIB)


class _Deep:
    """The 70B on a GPU under some options, from two and four of its layers: everything is linear in depth."""

    SHALLOW, MORE = 2, 4

    def __init__(self, config: Sections, options: Options, **names: str):
        changes: dict[str, Any] = {group: options[group][name] for group, name in {**COMMON, **names}.items()}
        if names["adapter"] == "lora":
            changes["adapter"] = replace(changes["adapter"], r=RANK)
        model = replace(options["model"][MODEL], weights=Weights.random)
        data = replace(config.data, max_length=TOKENS)
        train = replace(config.train, micro_batch_tokens=TOKENS, accumulation_steps=2)  # gradients stay, as in a sum
        config = replace(config, model=model, data=data, train=train, device=Device.cuda, **changes)
        whole = planned_config(model)
        self.layers, self.hidden = whole.num_hidden_layers, whole.hidden_size
        self._planners = [Planner(config, shallower(whole, depth)) for depth in (self.SHALLOW, self.MORE)]
        few, more = (planner.static for planner in self._planners)
        sizes = {f.name: self._line(getattr(few, f.name), getattr(more, f.name)) for f in fields(Static)}
        self.static = Static(**sizes)
        self.workspace = self._line(*(planner.optimizer.workspace for planner in self._planners))

    def _line(self, few: Any, more: Any) -> Any:
        """A size at full depth, on the line through two depths."""
        if isinstance(few, dict):
            return {name: self._line(size, more[name]) for name, size in few.items()}
        return few + (more - few) * (self.layers - self.SHALLOW) // (self.MORE - self.SHALLOW)

    def profiles(self, policy: Checkpointing) -> list:
        """One a block."""
        return [self._planners[1].profile(policy)] * self.layers

    def predict(self, policy: Checkpointing) -> Prediction:
        return predict(self.static, self.profiles(policy), self.workspace, accumulates=True)
