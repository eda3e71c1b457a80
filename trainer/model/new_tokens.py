"""Tokens that a model does not know yet: rows added to its embeddings, of which only the new ones train."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from peft.tuners.trainable_tokens import TrainableTokensLayer
    from transformers import PreTrainedModel


def planned_ids(model: PreTrainedModel, new_tokens: Sequence[str]) -> list[int]:
    """Ids as if the table had a row for none of the tokens: what a plan takes, which reads no tokenizer."""
    first = model.get_input_embeddings().weight.shape[0]
    return list(range(first, first + len(new_tokens)))


def table_of(module: torch.nn.Module) -> torch.nn.Parameter:
    """The weight of an embedding or head, under PEFT's layer of trained rows, whose own `weight` is a merged copy."""
    adapter = getattr(module, "token_adapter", None)
    return module.weight if adapter is None else adapter.get_base_layer().weight


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
            module.weight.copy_(with_mean_rows(module.weight[:before], needed))


def with_mean_rows(table: torch.Tensor, rows: int) -> torch.Tensor:
    """A table (V, H) as (rows, H): each further row the mean of those that were there."""
    mean = table.float().mean(dim=0).to(table.dtype)
    return torch.cat([table, mean.expand(rows - len(table), -1)])


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


def keep_tables_apart(adapted: torch.nn.Module) -> None:
    """Gives PEFT's layers of trained rows a forward that makes no copy of their table; same numbers, same file.

    PEFT puts the rows into a copy of the whole table in each forward pass, whose gradient is as large again.
    """
    from peft.tuners.trainable_tokens import TrainableTokensLayer

    for module in adapted.modules():
        if isinstance(module, TrainableTokensLayer):
            module.forward = _apart(module)


@dataclass(frozen=True)
class NewRows:
    """Rows of a table that train, beside the table that does not."""

    table: torch.nn.Module
    rows: torch.nn.Parameter
    """(k, H), fp32"""
    ids: list[int]
    """k places in the table"""


def new_rows(layer: torch.nn.Module) -> NewRows | None:
    """Those that count in a pass now; None for another module, and where PEFT has switched them off or merged them."""
    from peft.tuners.trainable_tokens import TrainableTokensLayer

    if not isinstance(layer, TrainableTokensLayer):  # or PEFT's wrapper around one
        adapter = getattr(layer, "token_adapter", None)
        return None if adapter is None else new_rows(adapter)
    if layer.disable_adapters or layer.merged or len(layer.active_adapters) != 1:
        return None
    (name,) = layer.active_adapters
    return NewRows(layer.get_base_layer(), layer.trainable_tokens_delta[name], layer.token_indices[name])


def _apart(layer: TrainableTokensLayer) -> Callable[..., torch.Tensor]:
    own = layer.forward

    def forward(x: torch.Tensor, *args, **kwargs) -> torch.Tensor:
        new = None if args or kwargs else new_rows(layer)
        if new is None:
            return own(x, *args, **kwargs)
        if isinstance(new.table, torch.nn.Embedding):
            return _embed(layer, x, new.rows, new.ids)
        return _project(layer, x, new.rows, new.ids)

    return forward


def _embed(layer: TrainableTokensLayer, tokens: torch.Tensor, rows: torch.Tensor, ids: list[int]) -> torch.Tensor:
    """(..., H) for tokens (...): the table's, and rows (k, H) where a token is one of k ids."""
    ordered, order = torch.tensor(ids, device=tokens.device).sort()
    place = torch.searchsorted(ordered, tokens).clamp_max(len(ids) - 1)
    found = layer.base_layer(tokens)
    own = torch.nn.functional.embedding(order[place], rows.to(found.dtype))
    scale = getattr(layer.get_base_layer(), "embed_scale", None)  # Gemma's embeddings multiply what they find
    if scale is not None:
        own = own * scale.to(own.dtype)
    return torch.where((ordered[place] == tokens)[..., None], own, found)


def _project(layer: TrainableTokensLayer, hidden: torch.Tensor, rows: torch.Tensor, ids: list[int]) -> torch.Tensor:
    """Logits (..., V) of hidden states (..., H): the head's, and those of rows (k, H) in the places of k ids."""
    head = layer.get_base_layer()
    index = torch.tensor(ids, device=hidden.device)
    bias = None if head.bias is None else head.bias[index]
    own = torch.nn.functional.linear(hidden, rows.to(head.weight.dtype), bias)
    return layer.base_layer(hidden).index_copy_(-1, index, own)  # a product keeps nothing of what it gave
