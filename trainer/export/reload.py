"""A finished run back as a model that answers."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import peft
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedModel

from trainer.config.saved import Run
from trainer.config.schema import Config
from trainer.data.chat.encoder import Asked, Encoder
from trainer.data.chat.messages import BadRow
from trainer.data.data_settings import TrainOn
from trainer.device.find import find_device
from trainer.errors import DataError, ModelError
from trainer.export.answering import Sampling, Say, answer, answer_many, tidied
from trainer.memory.predict.planner import Planner
from trainer.model.adapters.weight_share import WeightShare
from trainer.model.attention import choose_padded
from trainer.model.loading.architecture import building
from trainer.model.loading.base import adapter_keys, load_base, load_config
from trainer.model.model_settings import Weights
from trainer.model.new_tokens import grow, keep_tables_apart
from trainer.model.offload.streamed_base import streamed_base
from trainer.model.precision import Dtypes


@dataclass
class Trained:
    """A trained model with its tokenizer."""

    model: PreTrainedModel
    encoder: Encoder
    end_tokens: list[int]
    dtypes: Dtypes
    adapted: peft.PeftModel | None = None
    """the PEFT model around `model`; None: every weight was trained"""
    weight_share: WeightShare | None = None
    """what took a part of the base's weights for the adapter"""

    sampling: Sampling | None = None
    """how answers are drawn; None: greedy"""

    def without_adapter(self) -> AbstractContextManager[None]:
        """The base as it was before training, within what quantising lost. Only where there is an adapter."""
        assert self.adapted is not None
        if self.weight_share is None:
            return self.adapted.disable_adapter()
        return self.weight_share.whole_again(self.adapted)

    @property
    def positions(self) -> int:
        """Tokens that a prompt and its answer may have together."""
        return self.model.config.max_position_embeddings

    def prompt(self, asked: Asked) -> list[int]:
        """Tokens up to where the answer starts. Raises DataError where the template refuses the messages."""
        try:
            return self.encoder.prompt(asked)
        except BadRow as error:
            raise DataError(f"{error}.") from None

    def answer(self, asked: Asked, max_new_tokens: int, say: Say | None = None) -> str:
        """The answer; `say` hears it piece by piece. Raises DataError where the template refuses."""
        prompt = self.prompt(asked)
        self._check_length(prompt, max_new_tokens)
        text = answer(
            self.model, self.encoder, prompt, self.end_tokens, max_new_tokens, self.dtypes, say, self.sampling
        )
        return tidied(asked, text)

    def answer_many(self, all_asked: Sequence[Asked], max_new_tokens: int) -> list[str]:
        """Answers of one batch."""
        prompts = [self.prompt(asked) for asked in all_asked]
        for prompt in prompts:
            self._check_length(prompt, max_new_tokens)
        texts = answer_many(
            self.model, self.encoder, prompts, self.end_tokens, max_new_tokens, self.dtypes, self.sampling
        )
        return [tidied(asked, text) for asked, text in zip(all_asked, texts, strict=True)]

    def _check_length(self, prompt: list[int], max_new_tokens: int) -> None:
        if len(prompt) + max_new_tokens > self.positions:
            raise DataError(
                f"the prompt has {len(prompt)} tokens; with max_new_tokens={max_new_tokens} that is more than the "
                f"model's {self.positions} positions. Shorten it, or lower max_new_tokens."
            )


def _base(config: Config, dtypes: Dtypes, device: torch.device, weight_share: WeightShare | None) -> PreTrainedModel:
    """The frozen base, streamed where the run streamed it: else it would not fit."""
    model_config = load_config(config.model)
    what = (config.model, model_config, config.quant, dtypes, device, choose_padded(model_config)[0])
    if not config.offload.streams:
        return load_base(*what, before=weight_share)
    needed = Planner(config, model_config, dtypes=dtypes).static.streamed
    return streamed_base(*what, config.offload.source(device, needed), before=weight_share)[0]


def find_result(folder: Path) -> Path:
    """A run's adapter/ or model/. Raises ModelError where it has none."""
    results = [folder / name for name in ("adapter", "model") if (folder / name).is_dir()]
    if not results:
        raise ModelError(
            f"run={folder}: has no result yet (no adapter/ or model/). Finish it first: trainer resume run={folder}"
        )
    return results[0]


def load_trained(run: Run, folder: Path) -> Trained:
    """The result in a run folder. Raises ModelError where the run has none."""
    config = run.config
    result = find_result(folder)
    device = find_device(config.device)
    dtypes = config.precision.build(device)
    with building(f"{result}: cannot be loaded"):
        tokenizer = AutoTokenizer.from_pretrained(result)
        end = GenerationConfig.from_pretrained(result).eos_token_id
    encoder = Encoder(tokenizer, TrainOn.assistant)
    encoder.template.check()  # before the weights are read
    if result.name == "adapter":
        if config.model.weights is Weights.random:
            raise ModelError(f"run={folder}: its base was random weights, which are not kept; it cannot answer.")
        weight_share = config.adapter.weight_share(config.quant, dtypes.compute, device)
        base = _base(config, dtypes, device, weight_share)
        # The adapter holds the rows of new tokens and not the tables around them.
        grow(base, tokenizer.convert_tokens_to_ids(config.model.new_tokens))
        with building(f"{result}: cannot be loaded"):
            # It puts the adapter's layers into base.
            adapted = peft.PeftModel.from_pretrained(base, result, key_mapping=adapter_keys(config.model))
        if weight_share is not None:
            weight_share.on_rest(adapted)
        keep_tables_apart(adapted)
        model = base
    else:
        adapted = weight_share = None
        model = AutoModelForCausalLM.from_pretrained(
            result,
            dtype=dtypes.compute,
            device_map={"": device},
            use_safetensors=True,
            trust_remote_code=config.model.trust_remote_code,
        )
        model.set_attn_implementation(choose_padded(model.config)[0])
    return Trained(model, encoder, end if isinstance(end, list) else [end], dtypes, adapted, weight_share)
