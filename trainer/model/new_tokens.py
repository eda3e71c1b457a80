"""Tokens that a model does not know yet: rows added to its embeddings, of which only the new ones train."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@torch.no_grad()
def grow(model: PreTrainedModel, new_ids: Sequence[int]) -> None:
    """Rows for tokens that the model has none for, beginning as the mean of all others, in the head too.

    A model whose tables are longer than its vocabulary has the rows already; they are left as they are.
    """
    if not new_ids:
        return
    before, needed = model.get_input_embeddings().weight.shape[0], max(new_ids) + 1
    if needed <= before:
        return
    # transformers' own start is a random draw around the mean; the mean itself needs no seed.
    model.resize_token_embeddings(needed, mean_resizing=False)
    for module in (model.get_input_embeddings(), model.get_output_embeddings()):
        if module is not None:
            mean = module.weight[:before].float().mean(dim=0)
            module.weight[before:] = mean.to(module.weight.dtype)


def trainable_rows(model: PreTrainedModel, new_ids: Sequence[int]) -> dict[str, Any]:
    """What PEFT needs to train these rows alone: the embedding's name and, where it is not tied, the head's."""
    if not new_ids:
        return {}
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    tables = [embedding]
    if head is not None and head.weight is not embedding.weight:
        tables.append(head)
    names = [name.rsplit(".", 1)[-1] for name, module in model.named_modules() if any(module is t for t in tables)]
    return {"trainable_token_indices": {name: list(new_ids) for name in names}}
