"""All of a run that needs no weights: what can fail without them fails here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from trainer.certificate.settle import settle
from trainer.config.saved import Run
from trainer.config.schema import Config
from trainer.data.batches.apart import Apart
from trainer.data.batches.loader import TrainingSteps
from trainer.data.batches.packing import Packing
from trainer.data.batches.prefetch import PrefetchingSteps
from trainer.data.batches.streamed_steps import Index, StreamedSteps
from trainer.data.chat.templates import dress
from trainer.data.tokens.audit import Audit, audit
from trainer.data.tokens.gather import Loaded, check_losses, load_data
from trainer.data.tokens.row_stream import RowStream, StreamWindow
from trainer.data.tokens.tokenize import Counts, Tokens
from trainer.device.find import find_device
from trainer.errors import ModelError
from trainer.memory.run_plan import RunMemory, plan_run, within_budget
from trainer.model.families import rotary_boundary
from trainer.model.fused.tiles import check_tiles
from trainer.model.loading.architecture import skeleton
from trainer.model.loading.base import decoder_in_whole, load_config, load_tokenizer
from trainer.model.mixtures import check_auxiliary_loss, check_not_cached
from trainer.model.offload.block_stream import BlockSource
from trainer.model.precision import Dtypes
from trainer.run.beginning import Beginning
from trainer.run.clock import Clock

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

    Plan = Callable[[TrainingSteps | None], RunMemory]


@dataclass
class Prepared:
    """Everything that exists before the weights do."""

    device: torch.device
    dtypes: Dtypes
    tokenizer: PreTrainedTokenizerBase
    today: str
    """what chat templates are told, YYYY-MM-DD"""
    config: PretrainedConfig
    skeleton: PreTrainedModel
    train_set: Tokens | RowStream
    held_out: Tokens | None
    counts: list[Counts]
    """one a source, of a stream for its first window; data.eval_path's comes last"""
    steps: TrainingSteps | StreamedSteps
    plan: RunMemory
    source: BlockSource | None
    """where the frozen blocks are to lie, if not on the device"""
    decoder_in_whole: str | None
    """what the text decoder is called where the model's folder is more than one"""

    def audit(self, config: Config) -> Audit:
        """Of the data, as `trainer data` has it."""
        loaded = Loaded(None if config.data.streaming else self.train_set, self.held_out, self.counts)
        row_tokens = self.plan.train.micro_batch_tokens if self.steps.packing.packed else None
        return audit(config.data, loaded, self.steps, row_tokens)

    def close(self) -> None:
        """Called when the run ends, however it does."""
        self.steps.close()
        if self.source is not None:
            self.source.close()


def prepare(run: Run, beginning: Beginning, clock: Clock) -> Prepared:
    """Device, tokenizer, data and the model's shape. Raises TrainerError for all that a user can get wrong there."""
    data = replace(run.config.data, today=beginning.day(run.config.data))
    config = replace(run.config, data=data)
    device = find_device(config.device)
    dtypes = config.precision.build(device)
    config.loss.check(device)
    config.kernels.check(device)
    with clock.stage("tokenizer"):
        tokenizer = load_tokenizer(config.model)
        dress(tokenizer, config.data.chat_template, config.model.new_tokens)
    with clock.stage("data"):
        loaded = load_data(config.data, config.seed, tokenizer)
    train_set, held_out, counts = loaded.train_set, loaded.held_out, loaded.counts
    model_config = load_config(config.model)
    shape = skeleton(model_config, config.model.trust_remote_code)
    check_shape(config, shape)
    config = replace(config, packing=settle(config.packing, model_config))
    boundary = rotary_boundary(model_config, config.data.max_length)
    packing = config.packing if boundary is None else Apart(config.packing, boundary)
    new_ids = tokenizer.convert_tokens_to_ids(config.model.new_tokens)
    num_rows = max([shape.get_input_embeddings().weight.shape[0], *(index + 1 for index in new_ids)])
    for tokens in (held_out, train_set):
        if tokens is not None:
            check_vocabulary(tokens, num_rows)

    def plan_of(steps: TrainingSteps | None) -> RunMemory:
        with clock.stage("plan"):
            return within_budget(
                config.memory, lambda: plan_run(config, model_config, dtypes, steps, held_out, packing)
            )

    steps: TrainingSteps | StreamedSteps
    if train_set is not None:
        beginning.check_same_data(train_set)
        steps, plan = _stored(config, train_set, packing, plan_of, pin=device.type == "cuda")
        beginning.check_not_past(steps.num_steps)
    else:
        beginning.check_not_past(config.train.max_steps)
        plan = plan_of(None)
        with clock.stage("data"):
            train_set = RowStream(config.data, tokenizer, lambda window: _check_window(config, window, num_rows))
            beginning.check_same_data(train_set)  # before the way to the first step, which may be long
            index, step = Index(beginning.run_dir / "stream.jsonl"), beginning.state.step + 1
            pin = device.type == "cuda"
            steps = StreamedSteps(train_set, packing, plan.train, config.seed, pin, index, step)
        counts = [*steps.first.counts, *counts]
    config.kernels.check_model(model_config, plan.policy)
    source = config.offload.source(device, plan.elsewhere)
    return Prepared(
        device=device,
        dtypes=dtypes,
        tokenizer=tokenizer,
        today=data.today,
        config=model_config,
        skeleton=shape,
        train_set=train_set,
        held_out=held_out,
        counts=counts,
        steps=steps,
        plan=plan,
        source=source,
        decoder_in_whole=decoder_in_whole(config.model),
    )


def check_shape(config: Config, shape: PreTrainedModel) -> None:
    """Raises ModelError where the settings do not fit the model, which may be on the meta device."""
    config.adapter.check(shape)
    config.offload.check(shape, config.adapter)
    config.quant.check(config.adapter.trained_whole(shape))
    config.quant.check_experts(shape)
    check_auxiliary_loss(shape)
    check_not_cached(shape, config.model.quantized_cache)
    check_tiles(shape, config.model.mlp_tiles)


def check_vocabulary(tokens: Tokens, num_rows: int) -> None:
    """Raises ModelError for a token that has no row among the model's embeddings."""
    highest = tokens.highest_token
    if highest >= num_rows:
        raise ModelError(
            f"the tokenizer gives token {highest}, but the model has embeddings for {num_rows} tokens only. "
            "Tokenizer and model do not belong together; for weights=random set model.architecture.vocab_size."
        )


def _check_window(config: Config, window: StreamWindow, num_rows: int) -> None:
    check_losses(config.data, window.counts)
    check_vocabulary(window.tokens, num_rows)


def _stored(
    config: Config, train_set: Tokens, packing: Packing, plan_of: Plan, pin: bool
) -> tuple[PrefetchingSteps, RunMemory]:
    """Steps of data that is not streamed, in the micro-batches of the plan that is made from them."""
    steps = PrefetchingSteps(train_set, packing, config.train, config.seed, pin)
    plan = plan_of(steps)
    if plan.train is not config.train:  # checkpointing=auto made the micro-batch smaller
        steps = PrefetchingSteps(train_set, packing, plan.train, config.seed, pin)
    return steps, plan
