"""The prediction of one configuration: what every part of the program that asks about memory asks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import PretrainedConfig

from trainer.device.find import Device
from trainer.device.measure import free_bytes
from trainer.device.workspace import PRIMITIVES, Workspace, cublas_bytes
from trainer.errors import PlanError, TrainerError
from trainer.memory.predict.beside_steps import HeldOut, answer_bytes, evaluation_bytes
from trainer.memory.predict.libraries import tried_products
from trainer.memory.predict.moments import Prediction, predict, without_inputs
from trainer.memory.predict.outline import Outline, outline
from trainer.memory.predict.profile import Profile, Shape
from trainer.memory.predict.static import Static, count_static
from trainer.memory.predict.trace import planned_attention, trace
from trainer.model.checkpointing import FullCheckpointing, NoCheckpointing
from trainer.model.loading.architecture import skeleton
from trainer.model.loading.base import planned_config
from trainer.model.offload.activations import IN_FLIGHT
from trainer.model.precision import Dtypes
from trainer.registry import name_of
from trainer.training.optimizer_memory import OptimizerMemory
from trainer.units import GIB

if TYPE_CHECKING:
    from trainer.memory.predict.sections import Sections
    from trainer.model.checkpointing import Checkpointing


CUDA_CONTEXT = GIB // 2
"""Assumed: CUDA's context and kernels take 0.35 to 0.8 GiB outside the allocator, by driver and libraries."""
SLACK = 0.02
"""Assumed share that the caching allocator reserves beyond what is allocated, with expandable segments."""


class Planner:
    """Predicts the memory of a configuration. What is traced is kept, also for the configurations made from it."""

    def __init__(
        self,
        config: Sections,
        model_config: PretrainedConfig | None = None,
        shape: Shape | None = None,
        dtypes: Dtypes | None = None,
        held_out: HeldOut | None = None,
    ):
        self.config = config
        self.device_type = planned_device(config.device)
        self.dtypes = dtypes or planned_dtypes(config, self.device_type)
        self.model_config = model_config or planned_config(config.model)
        self.shape = shape or largest_shape(config)
        self.held_out = held_out
        """null: none, or as the settings allow: micro-batches of no more than training's, no higher than a step"""
        self.libraries = Workspace(0, cublas_bytes() if self.device_type == "cuda" else 0)
        """on a CPU that of `with_libraries`"""
        self._found: dict[str, Any] = {}

    def with_libraries(self, micro_batches: int = PRIMITIVES) -> Planner:
        """The same plan, with the workspace that libraries take on this CPU for the model's products, which are tried,
        in a run of so many micro-batches. Raises PlanError."""
        if self.device_type == "cpu":
            shapes = [self.shape] if self.held_out is None else [self.shape, self.held_out.evaluation]
            rows, compute = max(shape.num_tokens for shape in shapes), self.dtypes.compute
            self.libraries = tried_products(self.model, self.config.loss, rows, compute, micro_batches)
        return self

    def changed(self, **sections: Any) -> Planner:
        """The plan of the configuration with other sections; traces are shared where they are the same."""
        config = replace(self.config, **sections)
        new, mine = largest_shape(config), largest_shape(self.config)

        def changed(shape: Shape) -> Shape:
            if new == mine:
                return shape
            if shape == mine:
                return new
            # The data's own: about as much more or less, in samples of its length.
            return replace(shape, packed=new.packed).scaled(new.num_tokens * shape.num_tokens // mine.num_tokens)

        held_out = self.held_out
        if held_out is not None:
            held_out = replace(held_out, evaluation=changed(held_out.evaluation))
        planner = Planner(config, self.model_config, changed(self.shape), self.dtypes, held_out)
        planner._found, planner.libraries = self._found, self.libraries
        return planner

    def _once(self, find: Callable[[], Any], *of: Any) -> Any:
        """What depends on these values alone, found once."""
        key = repr(of)
        if key not in self._found:
            self._found[key] = find()
        return self._found[key]

    @property
    def _architecture(self) -> tuple[Any, ...]:
        """What the model's shape depends on."""
        config = self.config
        return config.model, config.quant, config.adapter, self.dtypes.compute, self._attention

    @property
    def _attention(self) -> str:
        asked = self.config.model.attention
        return planned_attention(self.shape.packed, self.model_config, self.device_type, self.dtypes.compute, asked)

    @property
    def depth(self) -> int:
        return self.model_config.get_text_config().num_hidden_layers

    @cached_property
    def model(self) -> Outline:
        """The whole model's shape with its adapter, on the meta device."""
        return self._once(
            lambda: outline(self.config, self.model_config, self.dtypes.compute, self._attention), self._architecture
        )

    @cached_property
    def skeleton(self):
        """The bare model on the meta device."""
        return self._once(lambda: skeleton(self.model_config), "skeleton")

    @cached_property
    def optimizer(self) -> OptimizerMemory:
        """Of the configured optimizer. Raises PlanError where it can neither be traced nor measured."""
        optim = self.config.optim
        try:
            return optim.memory(self.model.trainable(), self.device_type)
        except TrainerError:
            raise
        except Exception as error:
            raise PlanError.of(f"optim={name_of('optim', optim)}", error) from error

    @cached_property
    def static(self) -> Static:
        return count_static(self.model, self.optimizer, self.device_type, self.config.offload.streams)

    @property
    def accumulates(self) -> bool:
        return self.config.train.accumulation_steps > 1

    def profile(self, policy: Checkpointing, shape: Shape | None = None) -> Profile:
        """The traced blocks under a per-block policy."""
        shape = shape or self.shape
        of = (self._architecture, self.config.loss, self.dtypes, self.device_type, self.accumulates, shape, policy)
        return self._once(lambda: self._trace(policy, shape), of)

    def _trace(self, policy: Checkpointing, shape: Shape, counter: FlopCounterMode | None = None) -> Profile:
        dtypes = replace(self.dtypes, device_type="cpu")  # fake tensors are on the CPU, whatever is planned for
        return trace(self.config, self.model_config, dtypes, self.device_type, shape, policy, counter)

    def counted_again(self, policy: Checkpointing) -> float:
        """Share of the blocks' forward arithmetic that a policy runs again, from operations counted in its trace."""

        def count(traced: Checkpointing) -> int:
            counter = FlopCounterMode(display=False)
            self._trace(traced, self.shape, counter)
            return counter.get_total_flops()

        none, full, mine = (count(traced) for traced in (NoCheckpointing(), FullCheckpointing(), policy))
        return (mine - none) / (full - none)

    def predict(self, policy: Checkpointing | None = None, tokens: int | None = None) -> Prediction:
        """The whole step under a policy (by default the configured one), at another micro-batch size if given."""
        policy = policy or self.policy
        return self.fold(policy, [self._profile_at(block, tokens) for block in policy.blocks(self.depth)], tokens)

    def fold(self, policy: Checkpointing, profiles: list[Profile], tokens: int | None = None) -> Prediction:
        """The whole step from a profile of each block."""
        host, one_pool = self.host(policy, tokens), self.device_type == "cpu"
        static = replace(self.static, libraries=self.libraries.needed, host=host if one_pool else 0)
        if policy.moves_inputs:
            size = self.input_bytes(tokens)
            kept = [block.recomputes_blocks for block in policy.blocks(self.depth)]
            profiles = [without_inputs(p, size) if k else p for p, k in zip(profiles, kept, strict=True)]
            static = replace(static, in_flight=IN_FLIGHT * size)
        workspace, segment = self.optimizer.workspace, policy.segment(self.depth)
        found = predict(static, profiles, workspace, self.accumulates, segment, self.between_steps(tokens))
        return replace(found, host=0 if one_pool else host)

    def between_steps(self, tokens: int | None = None) -> dict[str, int]:
        """Bytes that evaluation and answers take, with micro-batches of so many tokens if given."""
        if self.held_out is None:
            return {}
        evaluation, answer_tokens = self.held_out.evaluation, self.held_out.answer_tokens
        if tokens is not None and evaluation.packed and tokens < evaluation.num_tokens:  # rows become as short as that
            evaluation = evaluation.scaled(max(tokens, *evaluation.lengths))
        dtypes = replace(self.dtypes, device_type="cpu")  # as for steps
        what = (self.config, self.model_config, dtypes, self.device_type)
        of = (self._architecture, dtypes, self.device_type)
        found = {
            "evaluation": self._once(lambda: evaluation_bytes(*what, evaluation), of, self.config.loss, evaluation)
        }
        if answer_tokens:
            found["answers"] = self._once(lambda: answer_bytes(*what, answer_tokens), of, answer_tokens)
        return found

    def input_bytes(self, tokens: int | None = None) -> int:
        """Of one block's input."""
        width = self.model_config.get_text_config().hidden_size * self.dtypes.compute.itemsize
        return (tokens or self.shape.num_tokens) * width

    def moved_inputs(self, policy: Checkpointing, tokens: int | None = None) -> int:
        """Bytes of block inputs that a policy keeps in host memory."""
        if not policy.moves_inputs:
            return 0
        kept = sum(block.recomputes_blocks for block in policy.blocks(self.depth))
        segment = policy.segment(self.depth)
        if segment is not None:
            kept = -(-self.depth // segment)
        return kept * self.input_bytes(tokens)

    def elsewhere(self, policy: Checkpointing, tokens: int | None = None) -> int:
        """Bytes that lie in host memory or on disk and come to the device when they are used."""
        return self.static.streamed + self.host_inputs(policy, tokens)

    def host(self, policy: Checkpointing, tokens: int | None = None) -> int:
        """Bytes of host memory that offloading takes: streamed blocks, or the stages that they are read through from a
        disk to a GPU, and moved inputs."""
        blocks = self.static.streamed
        if self.config.offload.from_disk:
            blocks = self.static.slots if self.device_type == "cuda" else 0
        return blocks + self.host_inputs(policy, tokens)

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

    def _profile_at(self, policy: Checkpointing, tokens: int | None) -> Profile:
        profile = self.profile(policy)
        if tokens is None or tokens == profile.num_tokens:
            return profile
        return profile.at(tokens, self.profile(policy, self.shape.scaled(2 * self.shape.num_tokens)))

    @property
    def policy(self) -> Checkpointing:
        """The policy that runs; auto has been resolved (`memory.fit.resolved`)."""
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
        return self.needed(
            self.predict(self.config.offload.policy(FullCheckpointing()), longest if self.shape.packed else None)
        )

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


def planned_device(device: Device) -> str:
    """cuda or cpu; believes the configuration without touching hardware."""
    if device is Device.auto:
        return "cuda" if torch.cuda.is_available() else "cpu"
    return device.value


def planned_dtypes(config: Sections, device_type: str) -> Dtypes:
    """What the run computes in; a planned GPU is taken to have bf16."""
    if device_type == "cpu" or torch.cuda.is_available():
        return config.precision.build(torch.device(device_type))
    return config.precision.planned(device_type)


def largest_shape(config: Sections) -> Shape:
    """The largest micro-batch that these settings allow, every token a target."""
    lengths = tuple(config.packing.largest(config.data.max_length, config.train))
    return Shape(lengths, sum(lengths) - len(lengths), config.packing.packed)
