"""A peer of the speed benchmark: a whole run in a process of its own, as its documentation writes one.

    python -m tests.bench.peers KIND SETTINGS.json

It takes the same samples in every step, from the same weights with the same LoRA, and prints what each step took.
This module needs no more than a peer's own environment has: another interpreter may run it.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from trainer.device.measure import Memory

Settings = dict[str, Any]
"""Written by speed.py: model (folder), samples (input_ids and labels), rows (sample numbers of each packed row),
row_tokens, steps, checkpointing, learning_rate, scratch."""


def _peft_model(settings: Settings):
    """The same base and the same LoRA, made with transformers and PEFT as their documentation says."""
    import peft
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    quantization = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32,
    )
    model = AutoModelForCausalLM.from_pretrained(
        settings["model"], quantization_config=quantization, dtype=torch.float32, device_map={"": "cpu"}
    )
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
    config = peft.LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    torch.manual_seed(0)
    return model, config


def _arguments(settings: Settings, kind: type, **fields: Any):
    """What every peer is told: full batches, a constant learning rate, fp32, nothing written."""
    recompute = settings["checkpointing"] == "full"
    return kind(
        output_dir=settings["scratch"],
        max_steps=settings["steps"],
        learning_rate=settings["learning_rate"],
        lr_scheduler_type="constant",
        weight_decay=0.0,
        bf16=False,
        gradient_checkpointing=recompute,
        gradient_checkpointing_kwargs={"use_reentrant": False} if recompute else None,
        report_to=[],
        save_strategy="no",
        logging_strategy="steps",
        logging_steps=1,
        disable_tqdm=True,
        use_cpu=True,
        dataloader_pin_memory=False,
        remove_unused_columns=False,
        **fields,
    )


def _run(trainer: Any) -> None:
    """Any transformers Trainer, whose steps are timed by a callback."""
    trainer.add_callback(_timing(lambda: trainer))
    trainer.train()


def _timing(trainer: Callable[[], Any]) -> Any:
    """The callback that prints what each step took; `trainer` finds the Trainer once it is made.

    The first step makes the optimizer's state and has its memory measured; what that costs is not in the others.
    """
    from transformers import TrainerCallback

    memory = Memory(torch.device("cpu"))

    class Timing(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            if state.global_step == 0:
                memory.__enter__()
                self.base = memory.read().allocated
            self.before = time.perf_counter(), time.process_time()

        def on_step_end(self, args, state, control, **kwargs):
            row = {"wall": time.perf_counter() - self.before[0], "cpu": time.process_time() - self.before[1]}
            if state.global_step == 1:
                row["peak"] = memory.read().peak - self.base
                memory.__exit__()
            print(json.dumps({**row, "loss": float(trainer().last_loss)}), file=sys.__stdout__, flush=True)

    return Timing()


def _with_loss(base: type) -> type:
    """A Trainer that remembers its step's loss: it hands losses to its log only after the callback."""

    class Remembering(base):
        last_loss, last_step = 0.0, -1

        def training_step(self, *args, **kwargs):
            loss = super().training_step(*args, **kwargs)
            if self.state.global_step != self.last_step:
                self.last_loss, self.last_step = 0.0, self.state.global_step
            self.last_loss = self.last_loss + loss.detach()
            return loss

    return Remembering


def _features(settings: Settings) -> list[dict[str, list[int]]]:
    return [{"input_ids": s["input_ids"], "labels": s["labels"]} for s in settings["samples"]]


def trainer_padded(settings: Settings) -> None:
    """transformers Trainer + PEFT, padded micro-batches of four samples."""
    import peft
    from transformers import Trainer, TrainingArguments

    model, config = _peft_model(settings)
    features = _features(settings)

    def collate(samples: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
        longest = max(len(s["input_ids"]) for s in samples)

        def padded(key: str, value: int) -> torch.Tensor:
            return torch.tensor([s[key] + [value] * (longest - len(s[key])) for s in samples])

        mask = [[1] * len(s["input_ids"]) + [0] * (longest - len(s["input_ids"])) for s in samples]
        return {
            "input_ids": padded("input_ids", 0),
            "labels": padded("labels", -100),
            "attention_mask": torch.tensor(mask),
        }

    size = min(4, len(features))
    arguments = _arguments(
        settings,
        TrainingArguments,
        per_device_train_batch_size=size,
        gradient_accumulation_steps=-(-len(features) // size),
    )
    _run(
        _with_loss(Trainer)(
            model=peft.get_peft_model(model, config), args=arguments, train_dataset=features, data_collator=collate
        )
    )


def trainer_flat(settings: Settings) -> None:
    """transformers Trainer + PEFT with transformers' own flattening collator, on the rows that ours packs."""
    import peft
    from transformers import DataCollatorWithFlattening, Trainer, TrainingArguments

    model, config = _peft_model(settings)
    features, flatten = _features(settings), DataCollatorWithFlattening()
    rows = [{"row": [features[i] for i in row]} for row in settings["rows"]]
    arguments = _arguments(
        settings, TrainingArguments, per_device_train_batch_size=1, gradient_accumulation_steps=len(rows)
    )
    _run(
        _with_loss(Trainer)(
            model=peft.get_peft_model(model, config),
            args=arguments,
            train_dataset=rows,
            data_collator=lambda batch: flatten(batch[0]["row"]),
        )
    )


def trl(settings: Settings, fp32_adapters: bool = False) -> None:
    """TRL's SFTTrainer with its own packing; it casts the adapters of a quantised base to bf16."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    model, config = _peft_model(settings)
    rows = [
        {"input_ids": s["input_ids"], "completion_mask": [int(y != -100) for y in s["labels"]]}
        for s in settings["samples"]
    ]
    arguments = _arguments(
        settings,
        SFTConfig,
        packing=True,
        max_length=settings["row_tokens"],
        completion_only_loss=True,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=len(settings["rows"]),
    )
    # Its padding-free rows carry position_ids, from which transformers' sdpa builds the block mask.
    trainer = _with_loss(SFTTrainer)(
        model=model,
        args=arguments,
        train_dataset=Dataset.from_list(rows),
        peft_config=config,
        processing_class=_tokenizer(settings),
    )
    if fp32_adapters:
        for parameter in trainer.model.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.float()
    _run(trainer)


def trl_fp32(settings: Settings) -> None:
    """The same with its adapters put back to fp32."""
    trl(settings, fp32_adapters=True)


def llamafactory(settings: Settings) -> None:
    """LLaMA-Factory's own training with its neat packing, on the rows that ours packs."""
    import types
    from importlib.machinery import ModuleSpec

    # It imports torchaudio for audio data; the builds of it that go with a CPU build of torch are not everywhere.
    module = types.ModuleType("torchaudio")
    module.__spec__ = ModuleSpec("torchaudio", None)
    sys.modules.setdefault("torchaudio", module)
    from datasets import Dataset, DatasetDict
    from llamafactory.train.sft import workflow
    from llamafactory.train.tuner import run_exp

    rows = []
    for row in settings["rows"]:
        samples = [settings["samples"][i] for i in row]
        padding = -sum(len(sample["input_ids"]) for sample in samples) % 8  # as its collator, which forgets positions
        made_of = {
            "input_ids": [sample["input_ids"] for sample in samples],
            "labels": [sample["labels"] for sample in samples],
            "position_ids": [range(len(sample["input_ids"])) for sample in samples],
            "attention_mask": [[number] * len(sample["input_ids"]) for number, sample in enumerate(samples, 1)],
        }
        fill = {"labels": -100}
        rows.append({key: sum(map(list, parts), []) + [fill.get(key, 0)] * padding for key, parts in made_of.items()})
    data = Path(settings["scratch"]) / "llamafactory_rows"
    DatasetDict({"train": Dataset.from_list(rows)}).save_to_disk(str(data))
    made = []

    class Remembering(_with_loss(workflow.CustomSeq2SeqTrainer)):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            made.append(self)

    workflow.CustomSeq2SeqTrainer = Remembering
    arguments = {
        "stage": "sft",
        "do_train": True,
        "model_name_or_path": settings["model"],
        "quantization_bit": 4,
        "quantization_method": "bnb",
        "double_quantization": True,
        "finetuning_type": "lora",
        "lora_target": "all",
        "lora_rank": 16,
        "lora_alpha": 32,
        "flash_attn": "sdpa",
        "template": "empty",
        "dataset": "tokenised",
        "tokenized_path": str(data),
        "cutoff_len": settings["row_tokens"],
        "neat_packing": True,
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": len(rows),
        "disable_gradient_checkpointing": settings["checkpointing"] != "full",
        "use_reentrant_gc": False,
        "infer_dtype": "float32",
        "max_steps": settings["steps"],
        "learning_rate": settings["learning_rate"],
        "lr_scheduler_type": "constant",
        "weight_decay": 0.0,
        "optim": "adamw_torch",
        "report_to": "none",
        "save_strategy": "no",
        "logging_steps": 1,
        "disable_tqdm": True,
        "use_cpu": True,
        "dataloader_pin_memory": False,
        "output_dir": str(Path(settings["scratch"]) / "llamafactory"),
    }
    run_exp(arguments, callbacks=[_timing(lambda: made[0])])


def _tokenizer(settings: Settings):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(settings["model"])


KINDS: dict[str, Callable[[Settings], None]] = {
    "trainer_padded": trainer_padded,
    "trainer_flat": trainer_flat,
    "trl": trl,
    "trl_fp32": trl_fp32,
    "llamafactory": llamafactory,
}


def main() -> None:
    """A peer's process."""
    kind, file = sys.argv[1:]
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - the libraries' own logs; ours goes to the real one
    KINDS[kind](json.loads(Path(file).read_text(encoding="utf-8")))


if __name__ == "__main__":
    main()
