"""merge: a run's adapter in the weights of its base, as a model that plain transformers loads, with a receipt."""

from __future__ import annotations

from enum import Enum
from pathlib import Path

from trainer.commands.arguments import one_of, real_number, run_argument, whole_number
from trainer.errors import ConfigError
from trainer.libraries import loading
from trainer.units import GIB

BASE, DTYPE, SHARD, ROWS, LIMIT = "merge.base", "merge.dtype", "merge.shard_gib", "merge.rows", "merge.max_kl"
FORMAT, QUANTIZE = "merge.format", "merge.quantize"
ARGUMENTS = ("to", FORMAT, QUANTIZE, BASE, DTYPE, SHARD, ROWS, LIMIT)
MAX_KL = 0.02
"""nats a target: rounding to bf16 stays a hundred times below, a wrong merge far above"""

HELP = f"""trainer merge run=DIR [to=DIR] [merge.base=original|dequantized] [merge.dtype=bf16|fp16|fp32]
               [merge.shard_gib=1] [merge.rows=8] [merge.max_kl={MAX_KL}] [device=cpu]
       trainer merge run=DIR merge.format=gguf|gguf_adapter [to=FILE] [merge.dtype=fp16] [merge.quantize=Q4_K_M]

Writes the run's adapter into the weights of its base: a folder (to=, else DIR/merged) that plain transformers loads,
with tokenizer, chat template and generation settings. One layer at a time, so that no more than a shard and a layer is
in memory.

  merge.base       what is merged into. original: the base as its files have it. dequantized: what the run's
                   quantisation made of it, which is what the adapter was trained against. Without it, that one
  merge.dtype      of the weights; without it, that of the base's own
  merge.shard_gib  size of a file
  merge.rows       held-out rows on which the merged model is compared with the adapter, which loads both, one after
                   the other; 0 leaves the comparison out
  merge.max_kl     KL divergence, nats a target, above which nothing is left and the exit code is 4; without it
                   {MAX_KL}, or none where another base than the trained one was asked for

  merge.format     gguf: the merged model as one file for llama.cpp, without a comparison (llama, mistral, qwen2 and
                   qwen3 models); gguf_adapter: the LoRA alone, for a GGUF of its base. pip install 'trainer[gguf]'
  merge.quantize   a type of llama.cpp's, through its llama-quantize where that is on the PATH

merge_receipt.json in the folder has the differences, losses and memory.
"""


class Form(Enum):
    """What is written."""

    safetensors = "safetensors"
    gguf = "gguf"
    gguf_adapter = "gguf_adapter"


class Float(Enum):
    """Names of dtypes, as `precision` has them."""

    bf16 = "bfloat16"
    fp16 = "float16"
    fp32 = "float32"


def run(words: list[str]) -> int:
    folder, saved, arguments = run_argument(words, ARGUMENTS)
    rows = whole_number(arguments, ROWS, 0, 8)
    shard_gib, max_kl = real_number(arguments, SHARD, 1e-6, 1.0), real_number(arguments, LIMIT, 0.0)
    dtype = one_of(Float, DTYPE, arguments[DTYPE]).value if DTYPE in arguments else None
    form = one_of(Form, FORMAT, arguments.get(FORMAT, "safetensors"))
    if QUANTIZE in arguments and form is not Form.gguf:
        raise ConfigError(f"{QUANTIZE}={arguments[QUANTIZE]}: belongs to merge.format=gguf")
    with loading():
        import torch

        from trainer.export.gguf_files import check_library, quantize
        from trainer.export.merge import Wanted, adapter_to_gguf, merge, to_gguf
        from trainer.export.merging import Onto, in_effect
        from trainer.tracking.console import Screen, quiet_libraries

    trained = in_effect(saved.config)
    onto = one_of(Onto, BASE, arguments[BASE]) if BASE in arguments else trained
    if max_kl is None and onto is trained:
        max_kl = MAX_KL
    names = {Form.safetensors: "merged", Form.gguf: "merged.gguf", Form.gguf_adapter: "adapter.gguf"}
    target = Path(arguments.get("to") or folder / names[form])
    if form is not Form.safetensors:
        check_library()
    dtype = None if dtype is None else getattr(torch, dtype)
    wanted = Wanted(target, onto, dtype, int(shard_gib * GIB), rows, max_kl)
    screen = Screen()
    quiet_libraries(screen)
    if form is Form.gguf_adapter:
        adapter_to_gguf(saved, folder, target, screen)
    elif form is Form.gguf:
        to_gguf(saved, folder, wanted, screen)
        if QUANTIZE in arguments:
            screen.say(f"quantised: {quantize(target, arguments[QUANTIZE])}")
    else:
        merge(saved, folder, wanted, screen)
    return 0
