"""Options of the group `kernels`: what computes the decoder's blocks, set up after adapter and checkpointing."""

from __future__ import annotations

import importlib.util
import os
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING

from trainer.errors import ConfigError, ModelError
from trainer.registry import Section, option

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedModel

    from trainer.data.batches.batch import MicroBatch
    from trainer.device.measure import Memory
    from trainer.model.checkpointing import Checkpointing
    from trainer.model.precision import Dtypes

    SummedLoss = Callable[[PreTrainedModel, MicroBatch], torch.Tensor]
    """Sum of the loss over a micro-batch's targets."""

COMPILERS = ("g++", "clang++", "c++")
SAVED_TOLERANCE = 1.05, 256 * 1024
"""Factor, and bytes beside it: a C allocator counts Python's own objects too."""


@dataclass
class Kernels(Section, ABC):
    """What computes the decoder's blocks; every option gives the same numbers."""

    def problems(self, config):
        problems = []
        if config.adapter.runs_fused:
            problems.append(
                "kernels=compiled and kernels=liger take the place of the trainer's own functions: add "
                "adapter.fused=false"
            )
        if config.model.mlp_tiles != 1:
            problems.append(
                "kernels=compiled and kernels=liger bring an MLP of their own, which does not run in pieces: use "
                "model.mlp_tiles=1 or kernels=torch"
            )
        return problems

    def check(self, device: torch.device) -> None:
        """Raises ConfigError where this device or installation cannot do it. Before anything is loaded."""

    def check_model(self, config: PretrainedConfig, policy: Checkpointing) -> None:
        """Raises ModelError or ConfigError for an architecture or policy that it does not do. Before the weights."""

    @abstractmethod
    def install(self, base: PreTrainedModel) -> None:
        """Sets the blocks of the adapted model up, which have their checkpointing policy."""

    def verify(
        self, base: PreTrainedModel, summed_loss: SummedLoss, dtypes: Dtypes, batch: MicroBatch, memory: Memory
    ) -> None:
        """Raises ModelError where the blocks as set up keep more for backward than their policy says."""

    def graphs(self) -> int | None:
        """Graphs compiled so far in this process; None where nothing is compiled."""
        return None

    def describe(self) -> str:
        """For the table at the start; empty where there is nothing to tell."""
        return ""


@option("kernels", "torch")
@dataclass
class Torch(Kernels):
    """PyTorch's own kernels, and the trainer's functions on top (adapter.fused)."""

    def problems(self, config):
        return []

    def install(self, base):
        pass


class Backend(Enum):
    inductor = "inductor"
    aot_eager = "aot_eager"


MODES = ("default", "reduce-overhead", "max-autotune-no-cudagraphs")
Mode = Enum("Mode", {name: name for name in MODES})
"""torch's own names."""


@option("kernels", "compiled")
@dataclass
class Compiled(Kernels):
    """torch.compile block by block, inside the checkpointing policy: what it keeps and runs again is decided outside
    of the compiled code. Row lengths are dynamic; blocks of one kind share their code."""

    backend: Backend
    """inductor generates code (Triton on a GPU, C++ on a CPU); aot_eager only traces, to tell their troubles apart"""

    mode: Mode
    """of inductor: reduce-overhead replays CUDA graphs, one for each row length and block; max-autotune-no-cudagraphs
    tries several kernels for each matrix product, which takes minutes"""

    def problems(self, config):
        problems = super().problems(config)
        if self.mode.value != "default" and self.backend is not Backend.inductor:
            problems.append(f"kernels.mode={self.mode.value} is one of inductor's: use kernels.backend=inductor")
        if config.checkpointing.cuts_blocks:
            problems.append(
                "kernels=compiled: checkpointing=attention and selective cut through a block, which compiled code "
                "cannot keep. Use checkpointing=full or none"
            )
        if config.offload.moves:
            problems.append("kernels=compiled: what offload moves, it moves inside a block. Use offload=none")
        return problems

    def check(self, device):
        if self.backend is Backend.aot_eager:
            return
        if device.type == "cuda" and importlib.util.find_spec("triton") is None:
            raise ConfigError("kernels=compiled: inductor needs the package triton on a GPU. Use kernels=torch.")
        if device.type == "cpu" and cpp_compiler() is None:
            raise ConfigError(
                f"kernels=compiled: inductor needs a C++ compiler on a CPU; none of {', '.join(COMPILERS)} is on PATH, "
                "and CXX does not name one. Install g++, or use kernels=torch."
            )

    def check_model(self, config, policy):
        if any(block.cuts_blocks for block in policy.blocks(config.get_text_config().num_hidden_layers)):
            raise ConfigError(
                "kernels=compiled: checkpointing policies that cut through a block (attention, selective, and auto "
                "where it picks selective) cannot be kept in compiled code. Use checkpointing=full or none."
            )

    def install(self, base):
        import torch

        for block in blocks(base):
            forward = type(block).forward  # wrapped from transformers 5.24 on, to be checkpointed
            plain = getattr(forward, "__wrapped__", forward)
            compiled = torch.compile(plain, backend=self.backend.value, dynamic=True, mode=self.mode.value)
            policy = block._gradient_checkpointing_func if block.gradient_checkpointing else _call
            # transformers hands the block's own pass to this function, with its arguments bound, and the hidden states.
            # It is called in training only: evaluation and generation run as they are.
            block.gradient_checkpointing = True
            block._gradient_checkpointing_func = partial(_run_compiled, policy, compiled)

    def verify(self, base, summed_loss, dtypes, batch, memory):
        import torch

        was_training = base.training
        base.train()
        with torch.compiler.set_stance("force_eager"):
            eager = _kept_bytes(base, summed_loss, dtypes, batch, memory)
        compiled = _kept_bytes(base, summed_loss, dtypes, batch, memory)
        base.train(was_training)
        factor, slack = SAVED_TOLERANCE
        if compiled > factor * eager + slack:
            raise ModelError(
                f"kernels=compiled: the compiled blocks keep {compiled / 2**20:.1f} MiB for the backward pass of "
                f"{batch.num_tokens} tokens where their checkpointing policy keeps {eager / 2**20:.1f} MiB: the policy "
                "is lost in compiled code. Use kernels=torch."
            )

    def graphs(self):
        from torch._dynamo.utils import counters

        return counters["stats"]["unique_graphs"]

    def describe(self):
        mode = "" if self.mode.value == "default" else f", {self.mode.value}"
        return f"blocks compiled by {self.backend.value}{mode}"


@option("kernels", "liger")
@dataclass
class LigerKernels(Kernels):
    """Liger's Triton kernels (Hsu et al. 2024) for norms, rotary embedding and SwiGLU, as transformers applies them."""

    def check(self, device):
        if device.type != "cuda":
            raise ConfigError("kernels=liger: its kernels need a GPU. On a CPU use kernels=torch.")
        if importlib.util.find_spec("liger_kernel") is None:
            raise ConfigError(
                "kernels=liger: the package liger-kernel is not installed. Install it, or use kernels=torch."
            )

    def check_model(self, config, policy):
        from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN as KNOWN

        if config.model_type not in KNOWN:
            raise ModelError(
                f"kernels=liger: the installed liger-kernel has nothing for model type {config.model_type}. "
                "Use kernels=torch."
            )

    def install(self, base):
        from transformers.integrations.liger import apply_liger_kernel

        chosen = {"rope": True, "rms_norm": True, "swiglu": True}
        # The loss is the group loss's business: Liger would replace the model's forward for it.
        apply_liger_kernel(base, {**chosen, "cross_entropy": False, "fused_linear_cross_entropy": False})

    def describe(self):
        return "Liger's norm, rotary embedding and SwiGLU"


def cpp_compiler() -> str | None:
    """The C++ compiler that inductor finds: the one that CXX names, else one of the usual."""
    names = [os.environ["CXX"]] if os.environ.get("CXX") else COMPILERS
    return next((found for name in names if (found := shutil.which(name)) is not None), None)


def blocks(base: PreTrainedModel) -> list[torch.nn.Module]:
    """The decoder's blocks. Raises ModelError where transformers knows none."""
    from trainer.model.checkpointing import NoCheckpointing, blocks_of

    return blocks_of(base, NoCheckpointing())


def _call(function, *args):
    return function(*args)


def _run_compiled(policy, compiled, call: partial, *args):
    """What the policy does with a block, on the compiled forward instead of the block's own.

    transformers 5.24 binds the block as an argument of its forward; 5.17 binds its __call__ to it.
    """
    bound = call.args or (call.func.__self__,)
    return policy(partial(compiled, *bound, **call.keywords), *args)


def _kept_bytes(base, summed_loss: SummedLoss, dtypes: Dtypes, batch: MicroBatch, memory: Memory) -> int:
    """Bytes between a micro-batch's forward and backward pass, in the second of two: the first compiles."""
    kept = 0
    for _ in range(2):
        before = memory.read().allocated
        with dtypes.autocast():
            total = summed_loss(base, batch)
        kept = memory.read().allocated - before
        total.backward()
        base.zero_grad(set_to_none=True)
    return kept
