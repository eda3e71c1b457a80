"""Trainable weights to safetensors and back, for checkpoints and for the final result."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

import torch
from peft import PeftModel, get_peft_model_state_dict, set_peft_model_state_dict
from safetensors.torch import load_file, save_file

ADAPTER_FILE, MODEL_FILE = "adapter_model.safetensors", "model.safetensors"


def save_trainable(model: torch.nn.Module, folder: Path) -> None:
    """A PEFT adapter (plain PEFT loads the folder), or all parameters of a fully trained model."""
    if isinstance(model, PeftModel):
        model.save_pretrained(folder, save_embedding_layers=False)
        (folder / "README.md").unlink(missing_ok=True)  # PEFT's empty model card
    else:
        save_file({name: p.detach().contiguous() for name, p in model.named_parameters()}, folder / MODEL_FILE)


def load_trainable(model: torch.nn.Module, folder: Path) -> None:
    """Puts back what save_trainable wrote, bit for bit. Raises where it was not written for this model."""
    device = next(model.parameters()).device
    if isinstance(model, PeftModel):
        weights = load_file(folder / ADAPTER_FILE, device=str(device))
        wrong = weights.keys() ^ get_peft_model_state_dict(model, save_embedding_layers=False).keys()
        if wrong:  # PEFT itself loads what fits and leaves the rest as it was
            raise ValueError(f"{ADAPTER_FILE} is of another adapter: {sorted(wrong)[0]}")
        set_peft_model_state_dict(model, weights)
    else:
        weights = load_file(folder / MODEL_FILE, device=str(device))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(weights[name])


def all_finite(parameters: Iterable[torch.nn.Parameter]) -> bool:
    """Whether no weight is infinite or no number: one read of the device, no copy of any size."""
    largest = [torch.linalg.vector_norm(p.detach(), torch.inf) for p in parameters]
    return bool(torch.stack([size.float() for size in largest]).isfinite().all())


def trainable_hash(model: torch.nn.Module) -> str:
    """sha256 over the adapter's weights (or all parameters), by name: two runs with one seed agree."""
    if isinstance(model, PeftModel):
        tensors = get_peft_model_state_dict(model, save_embedding_layers=False)
    else:
        tensors = dict(model.named_parameters())
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(name.encode())
        digest.update(tensors[name].detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def total_parameters(model: torch.nn.Module) -> tuple[int, int]:
    """Trainable and all parameters; a 4-bit weight counts as the numbers it stands for."""
    trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    total = 0
    for parameter in model.parameters():
        quant_state = getattr(parameter, "quant_state", None)
        numbers = getattr(parameter, "stands_for", parameter.numel())  # of a stack of experts
        total += quant_state.shape.numel() if quant_state is not None else numbers
    return trainable, total
