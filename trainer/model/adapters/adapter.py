"""What all adapters share, and what those share that PEFT attaches."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from trainer.errors import ModelError
from trainer.registry import Section, option

if TYPE_CHECKING:
    import peft
    import torch

    from trainer.model.adapters.weight_share import WeightShare
    from trainer.model.quant import Quant

MADE_BY_PEFT = "adapter_config.json", "adapter_model.safetensors"
"""What a folder that PEFT loads holds."""


@dataclass
class Adapter(Section, ABC):
    """Which parameters train."""

    trains_base: ClassVar[bool] = False
    """whether the weights of the base train themselves"""
    costs: ClassVar[str] = "another set of parameters trains"
    """what choosing it instead of another takes away"""

    @property
    def runs_fused(self) -> bool:
        """Whether the trainer's own functions take the place of the blocks' modules."""
        return False

    def variants(self) -> list[tuple[str, Adapter, str]]:
        """Other settings worth a look: the words that make them, the option with them, what they cost."""
        return []

    @abstractmethod
    def check(self, model: torch.nn.Module) -> None:
        """Raises ModelError if the option does not fit this model; `model` may be on the meta device."""

    def trained_whole(self, model: torch.nn.Module) -> list[str]:
        """Names in the settings by which frozen linear layers of the text decoder train whole."""
        return []

    def init_folder(self) -> Path | None:
        """The adapter that training begins from; None: a fresh one."""
        return None

    def weight_share(self, quant: Quant, compute_dtype: torch.dtype, device: torch.device) -> WeightShare | None:
        """What takes a part out of the base's weights while they are loaded; None: the base stays as it is."""
        return None

    @abstractmethod
    def attach(self, model: torch.nn.Module, new_ids: Sequence[int] = ()) -> torch.nn.Module:
        """The model with its trainable parameters, everything else frozen; the embeddings of new tokens train too."""


@option("adapter", "none")
@dataclass
class NoAdapter(Adapter):
    """All parameters train."""

    trains_base = True

    def check(self, model):
        pass

    def attach(self, model, new_ids=()):
        import torch

        for parameter in model.parameters():
            parameter.requires_grad_(True)
            parameter.data = parameter.data.to(torch.float32)
        return model


@dataclass
class PeftAdapter(Adapter):
    """A method of PEFT's, on the frozen base."""

    init_from: str | None
    """a run, or the folder of an adapter, whose weights training begins with; null: fresh ones"""

    shapes_update: ClassVar[tuple[str, ...]] = ("peft_type", "target_modules")
    """fields of PEFT's configuration that say what an adapter's weights mean"""
    grows: ClassVar[bool] = False
    """whether it can train rows of the embeddings"""

    def problems(self, config):
        if config.model.new_tokens and not self.grows:
            return ["model.new_tokens: their rows train with the adapters of the LoRA family only: use adapter=lora"]
        return []

    @abstractmethod
    def config(self, model: torch.nn.Module, new_ids: Sequence[int] = ()) -> peft.PeftConfig:
        """What PEFT attaches to this model. Raises ModelError where it does not fit."""

    def check(self, model):
        config = self.config(model)
        folder = self.init_folder()
        if folder is not None:
            _check_same(folder, config.to_dict(), self.shapes_update, f"adapter.init_from={self.init_from}")

    def attach(self, model, new_ids=()):
        import peft
        import torch

        from trainer.model.new_tokens import keep_tables_apart

        config = self.config(model, new_ids)
        model.requires_grad_(False)
        adapted = peft.get_peft_model(model, config)
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.to(torch.float32)
        keep_tables_apart(adapted)
        return adapted

    def init_folder(self):
        if self.init_from is None:
            return None
        folder = Path(self.init_from).expanduser()
        result = folder / "adapter"  # of a run
        return result if result.is_dir() else folder


def _check_same(folder: Path, ours: dict[str, Any], names: tuple[str, ...], asked: str) -> None:
    """Raises ModelError where a folder holds no adapter, or one whose weights mean something else."""
    missing = [name for name in MADE_BY_PEFT if not (folder / name).is_file()]
    if missing:
        raise ModelError(
            f"{asked}: {folder} has no {' and no '.join(missing)}. Name a run or the folder of an adapter."
        )
    try:
        theirs = json.loads((folder / MADE_BY_PEFT[0]).read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise ModelError(f"{asked}: {folder / MADE_BY_PEFT[0]} cannot be read: {error}.") from None
    other = [
        f"{name}={_plain(theirs.get(name))} (here {_plain(ours.get(name))})"
        for name in names
        if _plain(theirs.get(name)) != _plain(ours.get(name))
    ]
    if other:
        raise ModelError(f"{asked}: is another kind of adapter: {', '.join(other)}. Set this run's adapter.* to it.")


def _plain(value: Any) -> Any:
    """As it would be compared: sets in order, enums by their value, nothing as none."""
    if isinstance(value, (list, tuple, set)):
        value = sorted(value)
    return getattr(value, "value", value) or None
