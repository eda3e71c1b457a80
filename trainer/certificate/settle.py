"""The quick part of a certificate, made at the start of a run on a model type that has none: what can be packed."""

from __future__ import annotations

import json
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from trainer.certificate.comparison import Measured, alone, rows, samples, together
from trainer.certificate.twin import plain_twin, twin_config
from trainer.errors import ModelError
from trainer.model import attention
from trainer.training.losses import Full

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

    from trainer.data.batches.packing import Packing

CERTIFIED = Path(__file__).with_name("certified.json")
"""Model types through `trainer adopt` in their default configuration (python -m tests.bench adopt writes it)."""


def certified() -> dict[str, dict[str, Any]]:
    """By model type, what the certificate says: "packing", "loss", "attention", "reason" where it is refused."""
    return json.loads(CERTIFIED.read_text(encoding="utf-8"))["types"]


def settle(packing: Packing, config: PretrainedConfig) -> Packing:
    """What the packing comes to for this text decoder.

    Raises ModelError for a model that no row gives its own loss, and where rows would be packed that must not be.
    """
    if certified().get(config.model_type, {}).get("packing"):
        return packing.settled(lambda: None)
    quick = _Quick(config)
    if quick.model is None:
        return packing.settled(lambda: None)  # what no twin can be made of is probed itself, once it is loaded
    wrong = quick.wrong(attention.choose_padded(config)[0], packed=False)
    if wrong is not None:
        raise ModelError(
            f"{config.model_type} cannot be trained here: on a tiny twin of it padded rows are not what each sample "
            f"gives alone: {wrong}. trainer adopt {config.model_type} has the whole certificate."
        )
    return packing.settled(quick.wrong_if_packed)


class _Quick:
    """A twin in memory, and what its samples give alone."""

    def __init__(self, config: PretrainedConfig):
        self.config = config

    @cached_property
    def model(self) -> PreTrainedModel | None:
        try:
            return plain_twin(twin_config(self.config))
        except Exception:  # a configuration of somebody's that does not shrink
            return None

    @cached_property
    def expected(self) -> Measured:
        return alone(self.model, samples(self.model.config.vocab_size))

    def wrong(self, implementation: str, packed: bool) -> str | None:
        """What differs from each sample alone; None where nothing does."""
        expected, model = self.expected, self.model
        try:
            model.set_attn_implementation(implementation)
            return expected.apart(together(model, Full(), rows(model, samples(model.config.vocab_size), packed)))
        except Exception as error:  # any line of an architecture that does not know such rows
            return f"{type(error).__name__}: {error}"

    def wrong_if_packed(self) -> str | None:
        wrong = self.wrong(attention.choose(self.config, torch.device("cpu"), torch.float32)[0], packed=True)
        if wrong is None:
            return None
        return f"samples of one row of a {self.config.model_type} model would see each other: {wrong}"
