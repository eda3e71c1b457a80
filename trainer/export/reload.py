"""A finished run back as a model that answers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import peft
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedModel

from trainer.config.saved import Run
from trainer.data.chat import Encoder
from trainer.data.formats import BadRow
from trainer.data.options import TrainOn
from trainer.errors import DataError, ModelError
from trainer.export.generate import answer
from trainer.model.load import load_base, load_config
from trainer.model.new_tokens import grow
from trainer.model.options import Weights
from trainer.model.precision import Dtypes
from trainer.training.session import find_device


@dataclass
class Trained:
    """A trained model with its tokenizer."""

    model: PreTrainedModel
    encoder: Encoder
    end_tokens: list[int]
    dtypes: Dtypes

    def answer(self, messages: list[dict[str, str]], max_new_tokens: int) -> str:
        """The greedy answer. Raises DataError where the template refuses the messages."""
        try:
            return answer(self.model, self.encoder, messages, self.end_tokens, max_new_tokens, self.dtypes)
        except BadRow as error:
            raise DataError(str(error)) from None


def load_trained(run: Run, folder: Path) -> Trained:
    """The result in a run folder. Raises ModelError where the run has none."""
    config = run.config
    results = [folder / name for name in ("adapter", "model") if (folder / name).is_dir()]
    if not results:
        raise ModelError(
            f"run={folder}: has no result yet (no adapter/ or model/). Finish it first: trainer resume run={folder}"
        )
    result = results[0]
    device = find_device(config.device)
    dtypes = config.precision.build(device)
    if result.name == "adapter":
        if config.model.weights is Weights.random:
            raise ModelError(f"run={folder}: its base was random weights, which are not kept; it cannot answer.")
        base = load_base(config.model, load_config(config.model), config.quant, dtypes, device, "sdpa")
        # The adapter holds the rows of new tokens and not the tables around them.
        grow(base, AutoTokenizer.from_pretrained(result).convert_tokens_to_ids(config.model.new_tokens))
        peft.PeftModel.from_pretrained(base, result)  # puts the adapter's layers into base
        model = base
    else:
        model = AutoModelForCausalLM.from_pretrained(result, dtype=dtypes.compute, device_map={"": device})
    tokenizer = AutoTokenizer.from_pretrained(result)
    end = GenerationConfig.from_pretrained(result).eos_token_id
    return Trained(model, Encoder(tokenizer, TrainOn.assistant), end if isinstance(end, list) else [end], dtypes)
