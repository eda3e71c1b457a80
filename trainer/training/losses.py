"""Options of the group `loss`: the sum of next-token cross-entropy over a micro-batch's targets.

Sums, never means: the loop divides by the targets of the whole optimizer step.
N: targets in the micro-batch. H: hidden size. V: vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainer.config.registry import option

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from trainer.data.batch import MicroBatch


@dataclass
class Loss(ABC):
    """How the loss is computed; every option gives the same number."""

    @abstractmethod
    def sum(self, model: PreTrainedModel, batch: MicroBatch) -> torch.Tensor:
        """Scalar fp32: the summed cross-entropy of the batch's targets."""


@option("loss", "full")
@dataclass
class Full(Loss):
    """Logits of every token at once, 12 bytes x V a token at the peak: the reference."""

    def sum(self, model, batch):
        import torch

        logits = model(**batch.inputs()).logits  # (B, T, V)
        return torch.nn.functional.cross_entropy(
            logits.flatten(0, 1).float(), batch.labels.flatten(), ignore_index=-100, reduction="sum"
        )


@option("loss", "chunked")
@dataclass
class Chunked(Loss):
    """Only target tokens reach the head, a chunk at a time; logits are computed again in backward."""

    chunk_tokens: int
    """target tokens in one chunk of logits"""

    def sum(self, model, batch):
        hidden = model.get_decoder()(**batch.inputs()).last_hidden_state  # (B, T, H)
        hidden = hidden.flatten(0, 1)[batch.target_index]  # (N, H)
        labels = batch.labels.flatten()[batch.target_index]  # (N,)
        return self.head_sum(model.get_output_embeddings(), hidden, labels)

    def head_sum(self, head: torch.nn.Module, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Summed cross-entropy of labels (N,) under head(hidden) for hidden (N, H)."""
        import torch
        from torch.nn import functional as F
        from torch.utils.checkpoint import checkpoint

        if type(head) is torch.nn.Linear and hasattr(F, "linear_cross_entropy"):
            # torch >= 2.13. It fails on mixed dtypes, also under autocast, and its own sum is off in bf16:
            # cast the hidden states, take each token's loss, sum in fp32.
            losses = F.linear_cross_entropy(
                hidden.to(head.weight.dtype),
                head.weight,
                labels,
                linear_bias=head.bias,
                reduction="none",
                options=torch.nn.LinearCrossEntropyOptions(batch_chunk_size=self.chunk_tokens),
            )
            return losses.float().sum()

        def chunk_sum(h: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return F.cross_entropy(head(h).float(), y, reduction="sum")

        total = hidden.new_zeros((), dtype=torch.float32)
        for h, y in zip(hidden.split(self.chunk_tokens), labels.split(self.chunk_tokens), strict=True):
            total = total + checkpoint(chunk_sum, h, y, use_reentrant=False)
        return total
