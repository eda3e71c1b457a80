"""The workspace that libraries take on this CPU for a model's products, which are tried."""

from __future__ import annotations

import torch

from trainer.device.workspace import Product, Workspace, products_workspace
from trainer.memory.predict.outline import Outline
from trainer.model.precision import cpu_has_bf16
from trainer.training.losses import Loss


def tried_products(model: Outline, loss: Loss, rows: int, compute: torch.dtype, micro_batches: int) -> Workspace:
    """For micro-batches of up to `rows` tokens, as many as the run has: each may have a length of its own."""
    head = model.base.get_output_embeddings()
    products = [
        Product(
            rows=loss.head_rows(rows) if module is head else rows,
            inputs=module.in_features,
            outputs=module.out_features,
            trained=module.weight.requires_grad,
            is_head=module is head,
        )
        for module in model.adapted.modules()
        if isinstance(module, torch.nn.Linear)
    ]
    return products_workspace(products, compute, micro_batches, cpu_has_bf16())
