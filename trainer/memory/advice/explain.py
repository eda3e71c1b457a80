"""`plan explain=true`: the textbook's accounting beside ours, line by line, and where the textbook is off."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainer.memory.advice import textbook as book
from trainer.model.adapters import decoder_linears
from trainer.model.checkpointing import FullCheckpointing, NoCheckpointing
from trainer.units import GIB

if TYPE_CHECKING:
    from trainer.memory.predict.planner import Planner


CORRECTIONS = (
    "P/2 for a 4-bit base leaves out its scales (0.127 bits a weight) and the embeddings and head, which stay in bf16.",
    "Adapters here are fp32 masters with fp32 gradients: 4 + 4 bytes a trainable number, not 2 + 2.",
    "LoRA saves almost no activations: every layer still keeps its input. It removes gradients and optimizer state.",
    "With a frozen base there is no weight gradient, so full checkpointing costs a third of the arithmetic, not 1.3x.",
    "24 B T d L and 34 s b h are for models with GELU, biases and dropout; what a block keeps is traced here.",
    "2 L B T d is O(L). Segments of sqrt(L) keep fewer inputs, but a whole segment is alive in backward.",
    "All parameters in bf16: autocast keeps a bf16 copy of every fp32 master through a micro-batch, 2 bytes more each.",
    "The peak is static + the largest of the moments, not the sum of all parts.",
)


def comparison(planner: Planner) -> list[tuple[str, str, str]]:
    """(what, textbook, ours) in GiB, for this very configuration."""
    text = planner.model_config.get_text_config()
    layers, hidden = text.num_hidden_layers, text.hidden_size
    heads = getattr(text, "num_attention_heads", 1)
    batch, tokens = len(planner.shape.lengths), max(planner.shape.lengths)
    static = planner.static
    parameters, trainable = static.base_parameters, static.trainable
    none, full = planner.profile(NoCheckpointing()), planner.profile(FullCheckpointing())
    kept_none, kept_full = _kept(none, layers), _kept(full, layers)
    weights = sum(static.weights.values())
    quantised = sum(planner.skeleton.get_submodule(n).weight.numel() for n in decoder_linears(planner.skeleton))
    bf16 = planner.dtypes.compute.itemsize * (parameters - quantised)
    rows = [
        ("all parameters train: 16 P", book.full_mixed_precision(parameters), 16 * parameters),
        ("  with 8-bit Adam: 10 P", book.full_mixed_precision(parameters, book.ADAM_8BIT), round(10.03 * parameters)),
        ("LoRA: 2P + 10 theta", book.lora(parameters, trainable), 2 * parameters + 16 * trainable),
        (
            "QLoRA: P/2 + 10 theta",
            book.qlora(parameters, trainable),
            round(quantised * 4.127 / 8) + bf16 + 16 * trainable,
        ),
        ("this run: weights", book.qlora(parameters, 0) if static.weights["quantised weights"] else None, weights),
        ("this run: adapter, gradients, state", 10 * trainable, static.adapter + static.gradients + static.optimizer),
        ("activations, rule 24 B T d L", book.activations_rule(batch, tokens, hidden, layers), kept_none),
        (
            "  34 s b h a layer",
            layers * book.activations_layer(batch, tokens, hidden, heads, flash=True),
            kept_none,
        ),
        (
            "  34 s b h + 5 a s^2 b a layer",
            layers * book.activations_layer(batch, tokens, hidden, heads, flash=False),
            kept_none,
        ),
        ("full checkpointing: 2 L B T d", book.activations_checkpointed(batch, tokens, hidden, layers), kept_full),
        (
            "sqrt(L) inputs: 2 B T d",
            book.sqrt_stored_inputs(layers) * book.activations_checkpointed(batch, tokens, hidden, 1),
            None,
        ),
        ("logits, fp32: 4 B T V", book.logits(batch * tokens, text.vocab_size), None),
    ]
    return [(what, _gib(theirs), _gib(ours)) for what, theirs, ours in rows]


def _kept(profile, layers: int) -> int:
    """Bytes kept between forward and backward by all blocks."""
    middle = profile.forward[len(profile.forward) // 2].delta if profile.forward else profile.loss.delta
    return layers * middle


def _gib(size: int | None) -> str:
    return "-" if size is None else f"{size / GIB:.2f}"
