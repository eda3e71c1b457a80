"""One peer's QLoRA steps on a saved 4-bit model, in a process of its own: it prints one JSON line.

    python -m tests.gpu.peer_steps KIND FOLDER TOKENS POLICY

KIND: trl or unsloth. The folder holds the model that our own steps ran on. Each step is one sample of TOKENS tokens,
so that all of them pack alike; POLICY is full (each peer's own checkpointing) or none. Only the peer's own packages
are imported here: it may run in their environment.
"""

from __future__ import annotations

import json
import sys
import time

import torch

STEPS = 4
"""The first warms up; the best of the others counts."""


class Clock:
    """Seconds of each step, device work included."""

    def __init__(self) -> None:
        from transformers import TrainerCallback

        clock, self.seconds, self.began = self, [], 0.0

        class Between(TrainerCallback):
            def on_step_begin(self, args, state, control, **kwargs):
                clock.began = clock.now()

            def on_step_end(self, args, state, control, **kwargs):
                clock.seconds.append(clock.now() - clock.began)

        self.callback = Between()

    @staticmethod
    def now() -> float:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter()


def trl_model(folder: str):
    """As TRL's documentation has it: the quantised model and a LoRA configuration."""
    import peft
    from transformers import AutoModelForCausalLM

    gpu = torch.cuda.is_available()
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, device_map={"": 0 if gpu else "cpu"}, attn_implementation="sdpa"
    )
    config = peft.LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    return model, config


def unsloth_model(folder: str, tokens: int, policy: str):
    """As unsloth's documentation has it."""
    from unsloth import FastLanguageModel

    model, _ = FastLanguageModel.from_pretrained(folder, max_seq_length=tokens, load_in_4bit=True)
    return FastLanguageModel.get_peft_model(
        model,
        r=16,
        lora_alpha=32,
        lora_dropout=0,
        use_gradient_checkpointing="unsloth" if policy == "full" else False,
    )


def main() -> None:
    kind, folder, tokens, policy = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4]
    if kind == "unsloth":  # before transformers and TRL: it changes both
        model, config = unsloth_model(folder, tokens, policy), None
    else:
        model, config = trl_model(folder)
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    vocabulary = min(len(tokenizer), model.config.vocab_size)
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(5, vocabulary, (tokens,), generator=generator).tolist() for _ in range(STEPS)]
    gpu, clock = torch.cuda.is_available(), Clock()
    arguments = SFTConfig(
        output_dir=f"{folder}/{kind}",
        max_steps=STEPS,
        max_length=tokens,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=1,
        gradient_checkpointing=policy == "full",
        gradient_checkpointing_kwargs={"use_reentrant": False} if policy == "full" else None,
        bf16=gpu,
        use_cpu=not gpu,
        optim="adamw_torch",
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )
    trainer = SFTTrainer(
        model=model,
        args=arguments,
        train_dataset=Dataset.from_list([{"input_ids": row} for row in rows]),
        peft_config=config,
        processing_class=tokenizer,
        callbacks=[clock.callback],
    )
    if gpu:
        torch.cuda.reset_peak_memory_stats()
    trainer.train()
    seconds = min(clock.seconds[1:])
    result = {"peer": kind, "tokens": tokens, "checkpointing": policy, "seconds": seconds}
    result["tokens_per_second"] = tokens / seconds
    if gpu:
        result["peak_allocated_gib"] = torch.cuda.max_memory_allocated() / 2**30
        result["peak_reserved_gib"] = torch.cuda.max_memory_reserved() / 2**30
    print(json.dumps(result), file=sys.__stdout__, flush=True)


if __name__ == "__main__":
    main()
