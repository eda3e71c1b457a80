"""Options of the group `loss`: the sum of next-token cross-entropy over a micro-batch's targets.

Sums, never means: the loop divides by the targets of the whole optimizer step.
N: targets in the micro-batch. H: hidden size. V: vocabulary.
"""

from __future__ import annotations

import importlib.util
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

from trainer.errors import ConfigError, ModelError
from trainer.ranges import AT_LEAST_1
from trainer.registry import Section, name_of, option

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from trainer.data.batches.batch import MicroBatch
    from trainer.training.logits import LogitMap


@dataclass
class Loss(Section, ABC):
    """How the loss is computed; every option gives the same number."""

    costs: ClassVar[str] = "the same loss, no logits of all tokens"
    """what choosing it instead of another takes away"""

    def check(self, device: torch.device) -> None:
        """Raises ConfigError where the option cannot run on this device or its library is absent."""

    def check_model(self, model: PreTrainedModel) -> None:
        """Raises ModelError where the option would leave out something that this model does to its logits."""

    def head_rows(self, rows: int) -> int:
        """How many of a micro-batch's tokens the head multiplies at once."""
        return rows

    smooths: ClassVar[bool] = True
    """whether it knows label smoothing"""

    def problems(self, config):
        if config.train.label_smoothing == 0 or self.smooths:
            return []
        name = name_of("loss", self)
        return [f"train.label_smoothing: loss={name} cannot smooth labels in its kernel. Use loss=chunked"]

    @abstractmethod
    def sum(self, model: PreTrainedModel, batch: MicroBatch, smoothing: float = 0.0) -> torch.Tensor:
        """Scalar fp32: the summed cross-entropy of the batch's targets.

        `smoothing`: the share of each target's probability that all tokens of the vocabulary have in equal parts
        (Szegedy et al. 2016, section 7).
        """


@dataclass(frozen=True)
class Smoothed:
    """What a run with label smoothing trains on; its evaluations are of the loss itself."""

    loss: Loss
    smoothing: float

    def sum(self, model: PreTrainedModel, batch: MicroBatch) -> torch.Tensor:
        return self.loss.sum(model, batch, self.smoothing)


def training_loss(loss: Loss, smoothing: float) -> Loss | Smoothed:
    """What the loop adds up and differentiates."""
    return loss if smoothing == 0 else Smoothed(loss, smoothing)


@option("loss", "full")
@dataclass
class Full(Loss):
    """Logits of every token at once, 12 bytes x V a token at the peak: the reference."""

    costs = "logits of every token: the reference"

    def sum(self, model, batch, smoothing=0.0):
        import torch

        logits = model(**batch.inputs()).logits  # (B, T, V)
        return torch.nn.functional.cross_entropy(
            logits.flatten(0, 1).float(),
            batch.labels.flatten(),
            ignore_index=-100,
            reduction="sum",
            label_smoothing=smoothing,
        )


@dataclass
class TargetsOnly(Loss):
    """Only target tokens reach the head, and no tensor of all their logits ever exists."""

    def check_model(self, model):
        from trainer.training.logits import check_logit_map

        check_logit_map(model)

    def sum(self, model, batch, smoothing=0.0):
        from trainer.training.logits import logit_map

        hidden = model.get_decoder()(**batch.inputs()).last_hidden_state  # (B, T, H)
        hidden = hidden.flatten(0, 1)[batch.target_index]  # (N, H)
        labels = batch.labels.flatten()[batch.target_index]  # (N,)
        return self.head_sum(model.get_output_embeddings(), hidden, labels, logit_map(model.config), smoothing)

    @abstractmethod
    def head_sum(
        self,
        head: torch.nn.Module,
        hidden: torch.Tensor,
        labels: torch.Tensor,
        mapped: LogitMap,
        smoothing: float,
    ) -> torch.Tensor:
        """Summed cross-entropy of labels (N,) under mapped(head(hidden)) for hidden (N, H)."""


@option("loss", "chunked")
@dataclass
class Chunked(TargetsOnly):
    """Logits of a chunk at a time, on any device; a frozen head gets no gradient."""

    chunk_tokens: Annotated[int, AT_LEAST_1]
    """target tokens in one chunk of logits"""

    def head_rows(self, rows):
        return min(rows, self.chunk_tokens)

    def head_sum(self, head, hidden, labels, mapped, smoothing):
        import torch
        from torch.nn import functional as F
        from torch.utils.checkpoint import checkpoint

        from trainer.model.new_tokens import new_rows
        from trainer.training.frozen_head import frozen_head_sum

        new = new_rows(head)
        table = head if new is None else new.table
        if type(table) is torch.nn.Linear and not any(p.requires_grad for p in table.parameters()):
            what = (hidden.to(table.weight.dtype), table.weight, table.bias, labels, self.chunk_tokens, mapped)
            own = () if new is None else (new.rows, new.ids)
            return frozen_head_sum(*what, *own, smoothing=smoothing)

        if type(head) is torch.nn.Linear and mapped.plain and not smoothing and hasattr(F, "linear_cross_entropy"):
            # torch >= 2.13; smoothed labels it does not take in chunks. It fails on mixed dtypes, also under autocast,
            # and its own sum is off in bf16:
            # cast the hidden states, take each token's loss, sum in fp32.
            losses = F.linear_cross_entropy(
                hidden.to(head.weight.dtype),
                head.weight,
                labels,
                linear_bias=head.bias,
                reduction="none",
                # compact is torch's own choice on CUDA; its choice for bf16 on a CPU casts the whole head to fp32.
                options=torch.nn.LinearCrossEntropyOptions(batch_chunk_size=self.chunk_tokens, acc_policy="compact"),
            )
            return losses.float().sum()

        def chunk_sum(h: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return F.cross_entropy(mapped(head(h).float()), y, reduction="sum", label_smoothing=smoothing)

        total = hidden.new_zeros((), dtype=torch.float32)
        for h, y in zip(hidden.split(self.chunk_tokens), labels.split(self.chunk_tokens), strict=True):
            total = total + checkpoint(chunk_sum, h, y, use_reentrant=False)
        return total


@dataclass
class GpuKernel(TargetsOnly):
    """A library's CUDA kernel for a linear head, whose logits it can cap."""

    def check(self, device):
        if device.type != "cuda":
            raise ConfigError(f"loss={self.name}: its kernels need a GPU. On a CPU use loss=chunked.")
        if importlib.util.find_spec(self.module) is None:
            raise ConfigError(
                f"loss={self.name}: the package {self.package} is not installed. Install it, or use loss=chunked."
            )

    def head_sum(self, head, hidden, labels, mapped, smoothing):
        import torch

        if type(head) is not torch.nn.Linear:
            raise ModelError(
                f"loss={self.name}: the output head is a {type(head).__name__}; this kernel takes a plain linear "
                "layer only. Use loss=chunked."
            )
        bias = head.bias
        if mapped.scale != 1.0:  # the kernels know no scale; of a linear head it can be the input's
            hidden, bias = hidden * mapped.scale, None if bias is None else bias * mapped.scale
        return self.kernel_sum(hidden.to(head.weight.dtype), head.weight, bias, labels, mapped.cap, smoothing)

    @abstractmethod
    def kernel_sum(
        self,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        labels: torch.Tensor,
        cap: float | None,
        smoothing: float,
    ) -> torch.Tensor:
        """The sum for hidden states (N, H) in the dtype of weight (V, H); cap as LogitMap's."""


@option("loss", "liger")
@dataclass
class LigerLoss(GpuKernel):
    """Liger's fused linear cross-entropy (Hsu et al. 2024): gradients are made in the forward pass, by chunks."""

    name, module, package = "liger", "liger_kernel", "liger-kernel"

    def kernel_sum(self, hidden, weight, bias, labels, cap, smoothing):
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

        summed = LigerFusedLinearCrossEntropyLoss(reduction="sum", softcap=cap, label_smoothing=smoothing)
        return summed(weight, hidden, labels, bias).float()


@option("loss", "cut_cross_entropy")
@dataclass
class CutCrossEntropy(GpuKernel):
    """Apple's Cut Cross-Entropy (Wijmans et al. 2024): logits never leave the kernel."""

    name, module, package = "cut_cross_entropy", "cut_cross_entropy", "cut-cross-entropy"
    smooths = False

    def kernel_sum(self, hidden, weight, bias, labels, cap, smoothing):
        from cut_cross_entropy import linear_cross_entropy

        if bias is not None:
            raise ModelError("loss=cut_cross_entropy: its kernel knows no bias in the output head. Use loss=chunked.")
        # Each token's loss, summed in fp32; "auto" skips gradients below the dtype's resolution only.
        losses = linear_cross_entropy(hidden, weight, labels, softcap=cap, reduction="none", filter_eps="auto")
        return losses.float().sum()
