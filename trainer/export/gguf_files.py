"""GGUF files for llama.cpp: a merged model, or a LoRA adapter by itself. Through the gguf library, an extra.

Only architectures whose tensors the library's names cover one to one, with a byte-level BPE tokenizer that llama.cpp
knows; for the rest there is llama.cpp's own script. d: output features. k: input features. r: rank.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from peft.utils import CONFIG_NAME, SAFETENSORS_WEIGHTS_NAME
from safetensors.torch import load_file
from transformers import AutoTokenizer, PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from trainer.errors import ConfigError, ModelError

if TYPE_CHECKING:
    from gguf import GGUFWriter

    from trainer.export.merging import Merger

ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
"""transformers' model type: llama.cpp's architecture."""
SCRIPT = (
    "Merge to safetensors (without merge.format) and use llama.cpp's script: python convert_hf_to_gguf.py MERGED "
    "--outfile model.gguf --outtype f16"
)
LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+"
)
QWEN2_SPLIT = LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")
SPLITS = {LLAMA3_SPLIT: "llama-bpe", QWEN2_SPLIT: "qwen2"}
"""Expressions that cut text into words: llama.cpp's names of them (tokenizer.ggml.pre)."""


def check_library() -> None:
    """Raises ConfigError where it is absent."""
    if importlib.util.find_spec("gguf") is None:
        raise ConfigError("merge.format=gguf: needs the gguf library: pip install 'trainer[gguf]'")


def write_model(merger: Merger, result: Path, file: Path, dtype: torch.dtype) -> None:
    """A merged model in one file, tensor by tensor; vectors stay fp32. Raises ModelError for what it cannot hold."""
    import gguf

    config, kinds = merger.model.config, gguf.GGMLQuantizationType
    kind = {torch.float32: kinds.F32, torch.float16: kinds.F16, torch.bfloat16: kinds.BF16}[dtype]
    names = Names(config)
    writer = gguf.GGUFWriter(None, names.architecture)
    pre = pre_tokenizer(result)
    _describe(writer, config)
    writer.add_file_type({kinds.F32: 0, kinds.F16: 1, kinds.BF16: 32}[kind])
    _add_tokenizer(writer, result, config.vocab_size, pre)
    factors = rope_factors(config)
    if factors is not None:
        writer.add_tensor_info("rope_freqs.weight", factors.shape, factors.dtype, factors.nbytes)
    shapes = merger.sizes()
    for name, shape in shapes:
        own = kind if len(shape) > 1 else kinds.F32
        size = shape.numel() * (4 if own is kinds.F32 else 2)
        kept = np.dtype(np.float16 if own is kinds.F16 else np.float32)
        writer.add_tensor_info(names.of(name), tuple(shape), kept, size, raw_dtype=own)
    writer.write_header_to_file(file)
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    if factors is not None:
        writer.write_tensor_data(factors)
    for name, tensor in merger.tensors(torch.float32):
        values = names.ordered(name, tensor).numpy()
        writer.write_tensor_data(gguf.quants.quantize(values, kind if values.ndim > 1 else kinds.F32))
    writer.close()


def write_adapter(config: PretrainedConfig, result: Path, file: Path) -> None:
    """A run's LoRA as llama.cpp's --lora takes it. Raises ModelError for what that format cannot hold."""
    import gguf

    settings = json.loads((result / CONFIG_NAME).read_text(encoding="utf-8"))
    weights = load_file(result / SAFETENSORS_WEIGHTS_NAME)
    prefix, pairs = "base_model.model.", {}
    for key, tensor in weights.items():
        name, _, part = key.removeprefix(prefix).removesuffix(".weight").rpartition(".lora_")
        if part not in ("A", "B") or settings.get("use_dora"):
            raise ModelError(
                f"merge.format=gguf_adapter: a GGUF adapter holds LoRA pairs only, and this one has {key}"
                f"{' (DoRA)' if settings.get('use_dora') else ''}. merge.format=gguf writes the merged model."
            )
        pairs.setdefault(name, {})[part] = tensor
    names = Names(config)
    writer = gguf.GGUFWriter(file, names.architecture)
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    # llama.cpp scales by alpha / r; rank-stabilised LoRA by alpha / sqrt(r).
    alpha = settings["lora_alpha"] * (settings["r"] ** 0.5 if settings.get("use_rslora") else 1.0)
    writer.add_float32("adapter.lora.alpha", alpha)
    for name, pair in pairs.items():
        a, b = pair["A"].float(), names.ordered(f"{name}.weight", pair["B"].float())  # (r, k), (d, r)
        for part, tensor in (("a", a), ("b", b)):
            writer.add_tensor(f"{names.of(f'{name}.weight')}.lora_{part}", tensor.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


class Names:
    """transformers' names of a model's tensors as llama.cpp's, and its order of a head's rows."""

    def __init__(self, config: PretrainedConfig):
        import gguf

        if config.model_type not in ARCHITECTURES:
            raise ModelError(
                f"merge.format=gguf: {config.model_type} is not among {', '.join(ARCHITECTURES)}. {SCRIPT}"
            )
        self.config, self.architecture = config, ARCHITECTURES[config.model_type]
        kind = next(k for k, name in gguf.MODEL_ARCH_NAMES.items() if name == self.architecture)
        self._map = gguf.get_tensor_name_map(kind, config.num_hidden_layers)

    def of(self, name: str) -> str:
        found = self._map.get_name(name, try_suffixes=(".weight", ".bias"))
        if found is None:
            raise ModelError(f"merge.format=gguf: llama.cpp has no name for {name}. {SCRIPT}")
        return found

    def ordered(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor (d, ...) with the rows of queries and keys as llama.cpp's llama turns them: pairs side by side."""
        heads = {"q_proj": self.config.num_attention_heads, "k_proj": self.config.num_key_value_heads}
        number = heads.get(name.split(".")[-2])
        if self.architecture != "llama" or number is None:
            return tensor
        halves = tensor.reshape(number, 2, tensor.shape[0] // number // 2, *tensor.shape[1:])
        return halves.swapaxes(1, 2).reshape(tensor.shape).contiguous()


def _describe(writer: GGUFWriter, config: PretrainedConfig) -> None:
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head)
    writer.add_value_length(head)
    writer.add_rope_dimension_count(head)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)


def rope_factors(config: PretrainedConfig) -> np.ndarray | None:
    """(head / 2,) by which Llama 3.1 divides the rotary frequencies; None where they are plain."""
    kind = config.rope_parameters.get("rope_type", "default")
    if kind == "default":
        return None
    if kind != "llama3":
        raise ModelError(f"merge.format=gguf: rope_type={kind} is not written here. {SCRIPT}")
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    scaled, _ = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
    plain = config.rope_parameters["rope_theta"] ** (-torch.arange(0, head, 2, dtype=torch.float32) / head)
    return (plain / scaled).numpy().astype(np.float32)


def pre_tokenizer(folder: Path) -> str:
    """llama.cpp's name for how this tokenizer cuts text into words. Raises ModelError for one that is not known."""
    read = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    cut = read.get("pre_tokenizer") or {}
    steps = cut.get("pretokenizers", [cut])
    kinds = [step.get("type") for step in steps]
    found = None
    if read["model"]["type"] == "BPE" and kinds[-1] == "ByteLevel" and not steps[-1].get("add_prefix_space"):
        if kinds == ["ByteLevel"]:
            found = "gpt-2"
        elif kinds == ["Digits", "ByteLevel"] and steps[0]["individual_digits"]:
            found = "smollm"
        elif kinds == ["Split", "ByteLevel"]:
            found = SPLITS.get(steps[0]["pattern"].get("Regex"))
    if found is None:
        raise ModelError(f"merge.format=gguf: {folder}/tokenizer.json is none that is written here. {SCRIPT}")
    return found


def _add_tokenizer(writer: GGUFWriter, folder: Path, rows: int, pre: str) -> None:
    import gguf

    tokenizer = AutoTokenizer.from_pretrained(folder)
    words = {index: word for word, index in tokenizer.get_vocab().items()}
    added, kinds = tokenizer.added_tokens_decoder, gguf.TokenType
    types: list[Any] = []
    for index in range(rows):
        if index in added:
            types.append(kinds.CONTROL if added[index].special else kinds.USER_DEFINED)
        else:
            types.append(kinds.NORMAL if index in words else kinds.UNUSED)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list([words.get(index, f"[PAD{index}]") for index in range(rows)])
    writer.add_token_types(types)
    gguf.SpecialVocab(folder, load_merges=True, n_vocab=rows).add_to_gguf(writer)


def quantize(file: Path, kind: str) -> Path:
    """The file in another of llama.cpp's types, through its own tool, beside it. Raises ConfigError without one."""
    target = file.with_name(f"{file.stem}-{kind.lower()}.gguf")
    tool = shutil.which("llama-quantize")
    if tool is None:
        raise ConfigError(
            f"merge.quantize={kind}: llama-quantize, llama.cpp's tool, is not on the PATH. {file} is there; where the "
            f"tool is: llama-quantize {file} {target} {kind}"
        )
    done = subprocess.run([tool, str(file), str(target), kind], capture_output=True, text=True)
    if done.returncode:
        raise ConfigError(f"merge.quantize={kind}: {(done.stderr.strip() or done.stdout.strip()).splitlines()[-1]}")
    return target
