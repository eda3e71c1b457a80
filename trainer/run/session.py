"""One run from its configuration to its result: prepare, train, export. The order is the design's: everything that
can fail without the weights fails before the weights are touched.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from trainer.config.saved import Run
from trainer.config.schema import Config
from trainer.data.batches.batch import collate
from trainer.data.batches.loader import TrainingSteps, evaluation_batches
from trainer.data.batches.prefetch import PrefetchingSteps
from trainer.data.batches.streamed_steps import Index, StreamedSteps
from trainer.data.chat.templates import dress
from trainer.data.tokens.gather import check_losses, load_data
from trainer.data.tokens.row_stream import RowStream, StreamWindow
from trainer.data.tokens.tokenize import Counts, Tokens
from trainer.device.find import find_device
from trainer.device.measure import Memory
from trainer.errors import ModelError
from trainer.memory.predict.speed import recomputed_share
from trainer.memory.run_plan import RunMemory, plan_run
from trainer.model import attention
from trainer.model.fused.tiles import check_tiles, tile
from trainer.model.loading.architecture import skeleton
from trainer.model.loading.base import load_base, load_config, load_tokenizer
from trainer.model.new_tokens import grow
from trainer.model.offload.activations import Mover
from trainer.model.offload.block_stream import Source, Stream
from trainer.model.offload.streamed_base import streamed_base
from trainer.model.precision import Dtypes
from trainer.training.loop import Loop
from trainer.training.packing_probe import check_packing
from trainer.training.throughput import count_arithmetic
from trainer.training.train_settings import Train
from trainer.training.weights import total_parameters

if TYPE_CHECKING:
    from accelerate import Accelerator
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase


@dataclass
class Stages:
    """Seconds of each stage of a run, in order."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - started

    def sentence(self) -> str:
        return ", ".join(f"{name} {seconds:.1f} s" for name, seconds in self.seconds.items())


@dataclass
class Prepared:
    """Everything that exists before the weights do."""

    device: torch.device
    dtypes: Dtypes
    tokenizer: PreTrainedTokenizerBase
    config: PretrainedConfig
    skeleton: PreTrainedModel
    train_set: Tokens | RowStream
    held_out: Tokens | None
    counts: list[Counts]
    """one a source, of a stream for its first window; data.eval_path's comes last"""
    steps: TrainingSteps | StreamedSteps
    plan: RunMemory
    source: Source | None
    """where the frozen blocks are to lie, if not on the device"""


@dataclass
class Ready:
    """A run that can take its first step."""

    prepared: Prepared
    loop: Loop
    adapted: torch.nn.Module
    """the PEFT model around loop.model, or loop.model itself"""
    attention: str
    trainable_parameters: int
    total_parameters: int
    stream: Stream | None
    """what brings the frozen blocks"""
    mover: Mover | None
    """what keeps block inputs in host memory"""


def prepare(
    run: Run,
    stages: Stages,
    index: Index | None = None,
    step: int = 1,
    check_data: Callable[[Tokens | RowStream], None] = lambda train_set: None,
) -> Prepared:
    """Device, tokenizer, data and the model's shape. Raises TrainerError for all that a user can get wrong there.

    `step` is the first that will be trained; a stream goes there by its index, once `check_data` has let it
    pass: the way to the step may be long.
    """
    config = run.config
    device = find_device(config.device)
    dtypes = config.precision.build(device)
    config.loss.check(device)
    config.kernels.check(device)
    with stages.stage("tokenizer"):
        tokenizer = load_tokenizer(config.model)
        dress(tokenizer, config.data.chat_template, config.model.new_tokens)
    with stages.stage("data"):
        loaded = load_data(config.data, config.seed, tokenizer)
    held_out, counts = loaded.held_out, loaded.counts
    model_config = load_config(config.model)
    shape = skeleton(model_config, config.model.trust_remote_code)
    check_shape(config, shape)
    pin, new_ids = device.type == "cuda", tokenizer.convert_tokens_to_ids(config.model.new_tokens)

    def check(tokens: Tokens) -> None:
        _check_vocabulary(tokens, shape, new_ids)

    if held_out is not None:
        check(held_out)

    def check_window(window: StreamWindow) -> None:
        check_losses(config.data, window.counts)
        check(window.tokens)

    def steps_of(train: Train) -> PrefetchingSteps:
        return PrefetchingSteps(train_set, config.packing, train, config.seed, pin)

    train_set: Tokens | RowStream
    steps: TrainingSteps | StreamedSteps
    if loaded.train_set is None:
        with stages.stage("plan"):
            plan = plan_run(config, model_config, dtypes, None)
        with stages.stage("data"):
            train_set = RowStream(config.data, tokenizer, check_window)
            check_data(train_set)
            steps = StreamedSteps(train_set, config.packing, plan.train, config.seed, pin, index, step)
        counts = [*steps.first.counts, *counts]
    else:
        train_set = loaded.train_set
        check_data(train_set)
        check(train_set)
        steps = steps_of(config.train)
        with stages.stage("plan"):
            plan = plan_run(config, model_config, dtypes, steps)
        if plan.train is not config.train:  # checkpointing=auto made the micro-batch smaller
            steps = steps_of(plan.train)
    config.kernels.check_model(model_config, plan.policy)
    source = config.offload.source(device, plan.planner.elsewhere(plan.policy))
    return Prepared(device, dtypes, tokenizer, model_config, shape, train_set, held_out, counts, steps, plan, source)


def check_shape(config: Config, shape: PreTrainedModel) -> None:
    """Raises ModelError where the settings do not fit the model, which may be on the meta device."""
    config.adapter.check(shape)
    config.offload.check(shape, config.adapter)
    config.quant.check(shape, config.adapter)
    check_tiles(shape, config.model.mlp_tiles)


def build(run: Run, prepared: Prepared, memory: Memory, stages: Stages) -> Ready:
    """Weights, adapter, checkpointing and optimizer; ends with the packing probe."""
    config, device, dtypes = run.config, prepared.device, prepared.dtypes
    chosen, why = "sdpa", "padded rows"
    if config.packing.packed:
        chosen, why = attention.choose(prepared.config, device, dtypes.compute)
    with stages.stage("weights"):
        torch.manual_seed(config.seed)
        base, stream = _load(config, prepared, chosen)
    memory.at("weights loaded")
    with stages.stage("adapter"):
        torch.manual_seed(config.seed)
        new_ids = prepared.tokenizer.convert_tokens_to_ids(config.model.new_tokens)
        grow(base, new_ids)
        adapted = config.adapter.attach(base, new_ids)
        tile(base, config.model.mlp_tiles)
        prepared.plan.policy.apply(base)
        config.kernels.install(base)
        parameters = [p for p in adapted.parameters() if p.requires_grad]
        optimizer = config.optim.build(parameters)
    memory.at("adapter attached")
    accelerator = _accelerator(run, device)
    trainable, total = total_parameters(adapted)
    base_trains = trainable == total
    loop = Loop(
        model=base,
        parameters=parameters,
        optimizer=optimizer,
        schedule=config.schedule,
        loss=config.loss,
        steps=prepared.steps,
        dtypes=dtypes,
        accelerator=accelerator,
        arithmetic=count_arithmetic(prepared.skeleton, 0 if base_trains else trainable, base_trains),
        recomputed=recomputed_share(prepared.plan.planner, prepared.plan.policy),
        memory=memory,
        max_grad_norm=config.train.max_grad_norm,
        peak_learning_rate=config.optim.learning_rate,
    )
    with stages.stage("packing probe"):
        vocab_size = prepared.config.get_text_config().vocab_size
        check_packing(base, config.loss, dtypes, vocab_size, config.packing.packed, config.quant.rounding)
    if config.kernels.graphs() is not None:
        with stages.stage("compilation"):
            batch = collate(*prepared.steps.fullest(), config.packing.packed).to(device)
            config.kernels.verify(base, config.loss, dtypes, batch, memory)
    mover = getattr(prepared.plan.policy, "mover", None)
    return Ready(prepared, loop, adapted, f"{chosen} ({why})", trainable, total, stream, mover)


def _load(config: Config, prepared: Prepared, attention: str) -> tuple[PreTrainedModel, Stream | None]:
    """The frozen base, on the device or streamed to it."""
    what = (config.model, prepared.config, config.quant, prepared.dtypes, prepared.device, attention)
    if prepared.source is None:
        return load_base(*what), None
    return streamed_base(*what, prepared.source)


def held_out_batches(prepared: Prepared, run: Run):
    """A function that makes the held-out micro-batches, or None without held-out data."""
    if prepared.held_out is None:
        return None
    return lambda: evaluation_batches(prepared.held_out, run.config.packing, prepared.plan.train)


def _check_vocabulary(tokens: Tokens, shape: PreTrainedModel, new_ids: list[int]) -> None:
    rows = max([shape.get_input_embeddings().weight.shape[0], *(index + 1 for index in new_ids)])
    highest = tokens.highest_token
    if highest >= rows:
        raise ModelError(
            f"the tokenizer gives token {highest}, but the model has embeddings for {rows} tokens only. "
            "Tokenizer and model do not belong together; for weights=random set model.architecture.vocab_size."
        )


def _accelerator(run: Run, device: torch.device) -> Accelerator:
    return run.config.engine.build(cpu=device.type == "cpu")
