"""The prediction of one configuration: what every part of the program that asks about memory asks."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from transformers import PretrainedConfig

from trainer.device.find import Device
from trainer.memory.fit import fit, free_bytes
from trainer.memory.predict.moments import Prediction, predict, without_inputs
from trainer.memory.predict.optimizer_memory import OptimizerMemory, optimizer_memory
from trainer.memory.predict.profile import Profile, Shape
from trainer.memory.predict.standins import outline
from trainer.memory.predict.static import Static, count_static
from trainer.memory.predict.trace import planned_attention, trace
from trainer.model.checkpointing import Attention, Full, NoCheckpointing
from trainer.model.checkpointing import Auto as AutoCheckpointing
from trainer.model.loading.architecture import skeleton
from trainer.model.loading.base import planned_config
from trainer.model.offload.activations import IN_FLIGHT
from trainer.model.precision import Auto, Dtypes
from trainer.units import GIB

if TYPE_CHECKING:
    from trainer.config.schema import Config
    from trainer.model.checkpointing import Checkpointing
    from trainer.training.losses import Loss


CUDA_CONTEXT = GIB // 2
"""Assumed: CUDA's context and kernels take 0.35 to 0.8 GiB outside the allocator, by driver and libraries."""
SLACK = 0.02
"""Assumed share that the caching allocator reserves beyond what is allocated, with expandable segments."""


class Planner:
    """Predicts the memory of a configuration. Traces are made when first asked for and kept."""

    def __init__(
        self,
        config: Config,
        model_config: PretrainedConfig | None = None,
        shape: Shape | None = None,
        dtypes: Dtypes | None = None,
    ):
        self.config = config
        self.device_type = planned_device(config.device)
        self.dtypes = dtypes or planned_dtypes(config, self.device_type)
        self.model_config = model_config or planned_config(config.model)
        self.shape = shape or largest_shape(config)
        self._profiles: dict[tuple[str, int], Profile] = {}

    def with_tiles(self, mlp_tiles: int | str) -> Planner:
        """The same with the MLP in pieces."""
        config = replace(self.config, model=replace(self.config.model, mlp_tiles=mlp_tiles))
        return Planner(config, self.model_config, self.shape, self.dtypes)

    @property
    def depth(self) -> int:
        return self.model_config.get_text_config().num_hidden_layers

    @cached_property
    def model(self):
        """The whole model's shape with its adapter, on the meta device."""
        return outline(
            self.config,
            self.model_config,
            self.dtypes.compute,
            planned_attention(self.shape.packed, self.model_config, self.device_type, self.dtypes.compute),
        )

    @cached_property
    def skeleton(self):
        """The bare model on the meta device."""
        return skeleton(self.model_config)

    @cached_property
    def optimizer(self) -> OptimizerMemory:
        return optimizer_memory(self.config.optim, self.model.trainable(), self.device_type)

    @cached_property
    def static(self) -> Static:
        return count_static(self.model, self.optimizer, self.device_type, self.config.offload.streams)

    @property
    def accumulates(self) -> bool:
        return self.config.train.accumulation_steps > 1

    def profile(self, policy: Checkpointing, shape: Shape | None = None) -> Profile:
        """The traced blocks under a per-block policy."""
        shape = shape or self.shape
        key = (repr(policy), shape.num_tokens)
        if key not in self._profiles:
            self._profiles[key] = trace(
                self.config, self.model_config, self._trace_dtypes, self.device_type, shape, policy
            )
        return self._profiles[key]

    @property
    def _trace_dtypes(self) -> Dtypes:
        return replace(self.dtypes, device_type="cpu")  # fake tensors are on the CPU, whatever device is planned for

    def predict(self, policy: Checkpointing | None = None, tokens: int | None = None) -> Prediction:
        """The whole step under a policy (by default the configured one), at another micro-batch size if given."""
        policy = policy or self.policy
        return self.fold(policy, [self._profile_at(block, tokens) for block in policy.blocks(self.depth)], tokens)

    def fold(self, policy: Checkpointing, profiles: list[Profile], tokens: int | None = None) -> Prediction:
        """The whole step from a profile of each block."""
        static = self.static
        if policy.moves_inputs:
            size = self.input_bytes(tokens)
            kept = [keeps_input(block) for block in policy.blocks(self.depth)]
            profiles = [without_inputs(p, size) if k else p for p, k in zip(profiles, kept, strict=True)]
            static = replace(static, in_flight=IN_FLIGHT * size)
        return predict(static, profiles, self.optimizer.workspace, self.accumulates, policy.segment(self.depth))

    def input_bytes(self, tokens: int | None = None) -> int:
        """Of one block's input."""
        width = self.model_config.get_text_config().hidden_size * self.dtypes.compute.itemsize
        return (tokens or self.shape.num_tokens) * width

    def moved_inputs(self, policy: Checkpointing, tokens: int | None = None) -> int:
        """Bytes of block inputs that a policy keeps in host memory."""
        if not policy.moves_inputs:
            return 0
        kept = sum(keeps_input(block) for block in policy.blocks(self.depth))
        segment = policy.segment(self.depth)
        if segment is not None:
            kept = -(-self.depth // segment)
        return kept * self.input_bytes(tokens)

    def elsewhere(self, policy: Checkpointing, tokens: int | None = None) -> int:
        """Bytes that lie in host memory or on disk and come to the device when they are used."""
        return self.static.streamed + self.host_inputs(policy, tokens)

    def host_inputs(self, policy: Checkpointing, tokens: int | None = None) -> int:
        """Bytes of host memory that the moved inputs take."""
        inputs = self.moved_inputs(policy, tokens)
        if inputs and self.device_type == "cuda":  # torch's allocator of pinned memory rounds each up to a power of two
            size = self.input_bytes(tokens)
            inputs = inputs // size * 2 ** (size - 1).bit_length()
        return inputs

    @cached_property
    def host_limit(self) -> int | None:
        """Bytes of free host memory; None where another machine is planned for."""
        return free_bytes("cpu") if self.device_type == "cpu" or torch.cuda.is_available() else None

    def with_loss(self, loss: Loss) -> Prediction:
        """The step with another loss: the blocks as they are, the loss's own part from a trace of one block."""
        config = replace(self.config, loss=loss)
        one = trace(config, self.model_config, self._trace_dtypes, self.device_type, self.shape, Full(), depth=1)
        blocks = [self.profile(block) for block in self.policy.blocks(self.depth)]
        return self.fold(self.policy, [replace(b, loss=one.loss, loss_backward=one.loss_backward) for b in blocks])

    def _profile_at(self, policy: Checkpointing, tokens: int | None) -> Profile:
        profile = self.profile(policy)
        if tokens is None or tokens == profile.num_tokens:
            return profile
        return profile.at(tokens, self.profile(policy, self.shape.scaled(2 * self.shape.num_tokens)))

    @cached_property
    def policy(self) -> Checkpointing:
        """The configured policy; auto is resolved to one a block."""
        if isinstance(self.config.checkpointing, AutoCheckpointing):
            return fit(self, self.config.memory.budget_gib).policy
        return self.config.offload.policy(self.config.checkpointing)

    @property
    def profile_of_policy(self) -> Profile:
        """One block's trace under the policy that runs."""
        return self.profile(self.policy.blocks(self.depth)[0])

    def least(self) -> int:
        """Bytes of the device that this model and its adapter need at the very least: every block recomputed, one
        sample of data.max_length a micro-batch."""
        if self.profile_of_policy.whole:
            return self.needed(self.predict())
        longest = max(self.shape.lengths)
        return self.needed(self.predict(self.config.offload.policy(Full()), longest if self.shape.packed else None))

    def needed(self, prediction: Prediction) -> int:
        """Bytes of the device that a run takes: the allocator's peak, its slack, and CUDA's own."""
        return self.needed_bytes(prediction.peak)

    def needed_bytes(self, peak: int) -> int:
        """The same for an allocator's peak."""
        return peak if self.device_type == "cpu" else round(peak * (1 + SLACK)) + CUDA_CONTEXT

    def longest(self, budget: int) -> int:
        """Most tokens a micro-batch within a budget in bytes; 0 where none fits. A step of the length of one sample
        or of 64 tokens."""
        step = 64
        if self.needed(self.predict(tokens=step)) > budget:
            return 0
        low, high = step, 2 * step
        while self.needed(self.predict(tokens=high)) <= budget and high < 2**24:
            low, high = high, 2 * high
        while high - low > step:
            middle = (low + high) // 2 // step * step
            if self.needed(self.predict(tokens=middle)) <= budget:
                low = middle
            else:
                high = middle
        return low


def keeps_input(block: Checkpointing) -> bool:
    """Whether a block's policy saves the block's input alone, to run the block again."""
    return not isinstance(block, (NoCheckpointing, Attention))


def planned_device(device: Device) -> str:
    """cuda or cpu; believes the configuration without touching hardware."""
    if device is Device.auto:
        return "cuda" if torch.cuda.is_available() else "cpu"
    return device.value


def planned_dtypes(config: Config, device_type: str) -> Dtypes:
    """What the run computes in; a planned GPU is taken to have bf16."""
    if device_type == "cpu" or torch.cuda.is_available():
        return config.precision.build(torch.device(device_type))
    if isinstance(config.precision, Auto):
        return Dtypes(torch.bfloat16, "cuda")
    return replace(config.precision.build(torch.device("cpu")), device_type="cuda")


def largest_shape(config: Config) -> Shape:
    """The largest micro-batch that these settings allow, every token a target."""
    lengths = tuple(config.packing.largest(config.data.max_length, config.train))
    return Shape(lengths, sum(lengths) - len(lengths), config.packing.packed)
