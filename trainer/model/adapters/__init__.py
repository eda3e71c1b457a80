"""Options of the group `adapter`: what is trained on top of the frozen base.

Whatever the option, trainable parameters are fp32 masters: a bf16 adapter would round small updates away.
"""

from trainer.model.adapters import from_weights, other_methods  # noqa: F401  (registers the options)
from trainer.model.adapters.adapter import Adapter
from trainer.model.adapters.lora import LoRA
from trainer.model.adapters.targets import decoder_linears, find_targets

__all__ = ["Adapter", "LoRA", "decoder_linears", "find_targets"]
