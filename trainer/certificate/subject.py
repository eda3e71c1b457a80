"""What the checks are made on: a model's twin in a folder, as transformers loads it and as a run does."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PretrainedConfig, PreTrainedModel

from trainer.certificate.comparison import Measured, alone, samples
from trainer.certificate.twin import give_values, twin_config
from trainer.config.compose import compose
from trainer.data.batches.packing import NoPacking
from trainer.data.tokens.tokenize import TokenSet
from trainer.export.result import fit_whole
from trainer.model import attention
from trainer.model.families import in_whole, text_config
from trainer.model.loading.architecture import building, skeleton
from trainer.model.loading.base import load_base, load_config
from trainer.model.precision import Dtypes
from trainer.model.quant import NoQuant
from trainer.training.losses import Chunked
from trainer.training.weights import save_trainable

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from trainer.config.schema import Config
    from trainer.model.quant import Quant
    from trainer.training.losses import Loss

FP32, CPU = Dtypes(torch.float32, "cpu"), torch.device("cpu")


@dataclass
class Choices:
    """How the model is to be trained: the checks change what does not hold into what does."""

    loss: Loss
    attention: str
    """of padded rows"""
    packed_attention: str | None = None
    """null: samples do not share a row"""
    checkpointing: list[str] = field(default_factory=list)
    """policies that give the gradients of none"""
    said: dict[str, str] = field(default_factory=dict)
    """setting: why it was chosen instead of the usual one"""


@dataclass
class Subject:
    """A twin and the settings of a run on it."""

    kind: str
    folder: Path
    config: Config
    whole: PretrainedConfig
    """of the folder"""
    text: PretrainedConfig
    """of the text decoder that trains"""
    choices: Choices
    tokenizer: PreTrainedTokenizerBase | None = None
    """the model's own"""

    @cached_property
    def tokens(self) -> TokenSet:
        return samples(self.text.vocab_size)

    @property
    def renamed(self) -> dict[str, str] | None:
        """How names of the whole model become the text decoder's."""
        return text_config(self.whole, self.kind)[1]

    def plain(self) -> PreTrainedModel:
        """The folder as transformers loads it: fp32, eager."""
        documented = AutoModelForCausalLM if in_whole(self.whole) is None else whole_class(self.whole)
        return documented.from_pretrained(self.folder, dtype=torch.float32, attn_implementation="eager").eval()

    def ours(self, attention: str | None = None, quant: Quant | None = None) -> PreTrainedModel:
        """The base as a run loads it, in fp32; not quantised unless asked for."""
        quant, attention = quant or NoQuant(), attention or self.choices.attention
        return load_base(self.config.model, self.text, quant, FP32, CPU, attention).eval()

    def adapted(self, attention: str | None = None) -> torch.nn.Module:
        """The base with an adapter whose both halves are at work."""
        adapted = self.config.adapter.attach(self.ours(attention))
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in adapted.parameters():
                if parameter.requires_grad:
                    parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
        return adapted.eval()

    def plain_adapted(self, adapted: torch.nn.Module) -> PeftModel:
        """The same adapter out of its files, by PEFT alone on what transformers loads."""
        with tempfile.TemporaryDirectory() as folder:
            save_trainable(adapted, Path(folder))
            outside = in_whole(self.whole)
            if outside is not None:
                fit_whole(Path(folder), adapted, outside)
            return PeftModel.from_pretrained(self.plain(), folder, is_trainable=True).eval()

    @cached_property
    def expected(self) -> Measured:
        """Loss and gradients of each sample alone by transformers; of the text decoder's parameters, by its names."""
        return alone(self.plain(), self.tokens, self.renamed)


def whole_class(config: PretrainedConfig) -> type:
    """The class by which a folder that holds more than a text decoder is loaded."""
    known = AutoModelForImageTextToText._model_mapping
    return AutoModelForImageTextToText if type(config) in known else AutoModelForCausalLM


@contextmanager
def subject_of(
    config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase | None = None, name: str | None = None
) -> Iterator[Subject]:
    """The twin of a configuration, written as its authors would have; gone at the end.

    Raises ModelError where it is refused by name, or no twin of it can be made.
    """
    kind = name or config.model_type
    text_config(config, kind)
    with building(f"{kind}: no twin of this configuration can be built"), tempfile.TemporaryDirectory() as folder:
        whole = twin_config(config)
        model_class = AutoModelForCausalLM if in_whole(whole) is None else whole_class(whole)
        torch.manual_seed(0)
        model = model_class.from_config(whole, dtype=torch.float32, attn_implementation="eager")
        give_values(model)
        model.save_pretrained(folder)
        del model
        settings = compose([f"model.path={folder}", "device=cpu", "precision=fp32", "quant=nf4", "adapter=lora"]).config
        settings = replace(settings, packing=NoPacking(), adapter=replace(settings.adapter, r=4))
        text = load_config(settings.model)
        skeleton(text)
        choices = Choices(Chunked(16), attention.choose_padded(text)[0])
        yield Subject(kind, Path(folder), settings, whole, text, choices, tokenizer)
