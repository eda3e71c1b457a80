"""Options of the group `quant`: how the frozen base's linear weights are stored.

All use bitsandbytes. Embeddings, norms and the head stay in the dtype of `precision`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

from trainer.errors import ModelError
from trainer.ranges import NOT_NEGATIVE
from trainer.registry import Section, name_of, option

if TYPE_CHECKING:
    import torch
    from transformers import BitsAndBytesConfig


@dataclass
class Quant(Section, ABC):
    """How the decoder's linear weights are stored."""

    stores_4bit: ClassVar[bool] = False
    """whether bitsandbytes packs the weights in 4 bits"""
    keeps_copies: ClassVar[bool] = False
    """whether its layers hold copies of their weights, which cannot be fetched one block at a time"""
    rounding: ClassVar[float] = 0.0
    """relative error that the products' own rounding of inputs can make"""

    def problems(self, config):
        if config.adapter.trains_base:
            return ["adapter=none trains every weight, which a quantised base cannot: use quant=none"]
        return []

    costs: ClassVar[str] = "other bits a weight, another error"
    """what choosing it instead of another takes away"""
    loaded_as: ClassVar[str | None] = None
    """the attribute of a loaded base by which PEFT knows that its layers are quantised this way"""

    @abstractmethod
    def config(self, compute_dtype: torch.dtype) -> BitsAndBytesConfig | None:
        """What `from_pretrained` needs to quantise while loading; None leaves the weights as they are."""

    @abstractmethod
    def linear(self, linear: torch.nn.Linear, compute_dtype: torch.dtype, device: torch.device) -> torch.nn.Module:
        """The quantised twin of one linear layer, on `device`; used where weights are made, not loaded."""

    def standin(self, linear: torch.nn.Linear, compute_dtype: torch.dtype) -> torch.nn.Module:
        """What a plan traces in place of `linear`, which is on the meta device: the same bytes, the same operations.

        By default the quantised twin itself, made without values; a layer of the same size where that needs values.
        """
        from trainer.model.standins import without_values

        return without_values(self.linear, linear, compute_dtype)

    def check_experts(self, model: torch.nn.Module) -> None:
        """Raises ModelError where the stacked experts of a mixture would stay as they are; `model` may have no
        values."""
        from trainer.model.mixtures import decoder_experts

        if decoder_experts(model):
            raise ModelError(
                f"quant={name_of('quant', self)}: the experts of this {model.config.model_type} are stacked tensors, "
                "which it leaves in 16 bits. Use quant=nf4 or fp4, or quant=none."
            )

    def experts(self, experts: torch.nn.Module, compute_dtype: torch.dtype, device: torch.device) -> None:
        """Puts the quantised twins of stacked experts into their module; on the meta device, their shapes."""
        experts.to(device)

    def mark(self, base: torch.nn.Module) -> None:
        """Says on a base that `assemble` made what `from_pretrained` says on one that it quantises."""
        if self.loaded_as is not None:
            setattr(base, self.loaded_as, True)

    def check(self, whole: list[str]) -> None:
        """Raises ModelError where layers train whole (adapter.trained_whole) whose weights have too few bits for it."""
        if whole:
            raise ModelError(
                f"adapter.modules_to_save={whole}: trains layers whole that this run quantises, and a quantised weight "
                "has no gradient. Leave them out (LoRA trains beside them), or use quant=none."
            )


@option("quant", "none")
@dataclass
class NoQuant(Quant):
    """Weights stay in the dtype of `precision`."""

    def problems(self, config):
        return []

    costs = "no dequantisation"

    def check(self, whole):
        pass

    def check_experts(self, model):
        pass

    def config(self, compute_dtype):
        return None

    def linear(self, linear, compute_dtype, device):
        return linear.to(device)

    def standin(self, linear, compute_dtype):
        return linear


@dataclass
class FourBit(Quant):
    """4-bit blocks of 64 weights sharing one scale (absmax). QLoRA (Dettmers et al. 2023), section 3."""

    double_quant: bool
    """quantise the scales too: 0.127 instead of 0.5 bits a weight"""

    stores_4bit = True
    loaded_as = "is_loaded_in_4bit"

    def config(self, compute_dtype):
        from transformers import BitsAndBytesConfig

        return BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type=self.code,
            bnb_4bit_use_double_quant=self.double_quant,
            bnb_4bit_compute_dtype=compute_dtype,
        )

    def linear(self, linear, compute_dtype, device):
        import bitsandbytes as bnb

        quantised = bnb.nn.Linear4bit(
            linear.in_features,
            linear.out_features,
            bias=linear.bias is not None,
            compute_dtype=compute_dtype,
            compress_statistics=self.double_quant,
            quant_type=self.code,
            device="meta",
        )
        quantised.weight = bnb.nn.Params4bit(
            linear.weight.data,
            requires_grad=False,
            compress_statistics=self.double_quant,
            quant_type=self.code,
            module=quantised,
        )
        quantised.bias = linear.bias
        return quantised.to(device)

    def check_experts(self, model):
        from trainer.model.mixtures import check_experts

        check_experts(model, f"quant={name_of('quant', self)}")

    def experts(self, experts, compute_dtype, device):
        from trainer.model.experts import quantise

        quantise(experts, self.code, self.double_quant, compute_dtype, device)

    def standin(self, linear, compute_dtype):
        from trainer.model.standins import Standin4bit

        return Standin4bit(linear, self.code, self.double_quant, compute_dtype)


@option("quant", "nf4")
@dataclass
class NF4(FourBit):
    """Quantiles of a normal distribution: the least error for normally distributed weights."""

    code = "nf4"
    costs = "dequantises every weight 2-3 times a micro-batch"


@option("quant", "fp4")
@dataclass
class FP4(FourBit):
    """4-bit floating point: 1 sign, 2 exponent and 1 mantissa bits."""

    code = "fp4"
    costs = "as nf4, less exact"


@option("quant", "int8")
@dataclass
class Int8(Quant):
    """LLM.int8() (Dettmers et al. 2022): a scale a row, outlier columns of the input computed unquantised."""

    outlier_threshold: Annotated[float, NOT_NEGATIVE]
    """input columns whose absolute value exceeds this are computed unquantised"""

    keeps_copies = True
    rounding = 1 / 127
    """a row of inputs has 127 steps; which columns are outliers depends on the rows beside it"""
    costs = "half the saving of nf4, smaller error"
    loaded_as = "is_loaded_in_8bit"

    def config(self, compute_dtype):
        from transformers import BitsAndBytesConfig

        return BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=self.outlier_threshold)

    def linear(self, linear, compute_dtype, device):
        import bitsandbytes as bnb

        quantised = bnb.nn.Linear8bitLt(
            linear.in_features,
            linear.out_features,
            bias=linear.bias is not None,
            has_fp16_weights=False,
            threshold=self.outlier_threshold,
            device="meta",
        )
        quantised.weight = bnb.nn.Int8Params(linear.weight.data, requires_grad=False, has_fp16_weights=False)
        quantised.bias = linear.bias
        return quantised.to(device)

    def standin(self, linear, compute_dtype):
        from trainer.model.standins import Standin8bit

        return Standin8bit(linear)
