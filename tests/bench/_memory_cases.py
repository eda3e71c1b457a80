"""Small configurations of every kind, which the memory benchmarks and tests share."""

from __future__ import annotations

BASE = [
    "model=tiny", "model.weights=random", "device=cpu", "precision=fp32", "model.architecture.vocab_size=2048",
    "model.architecture.hidden_size=128", "model.architecture.intermediate_size=384", "optim=adamw",
    "model.architecture.num_hidden_layers=6", "model.architecture.num_attention_heads=4",
    "model.architecture.num_key_value_heads=2", "train.micro_batch_tokens=512", "data.max_length=256",
    "train.accumulation_steps=2",
]  # fmt: skip
A = "model.architecture."
CONFIGURATIONS: dict[str, list[str]] = {
    "base: NF4, LoRA r=16, full checkpointing": [],
    "checkpointing none": ["checkpointing=none"],
    "depth 12": [f"{A}num_hidden_layers=12"],
    "depth 12, none": [f"{A}num_hidden_layers=12", "checkpointing=none"],
    "depth 2": [f"{A}num_hidden_layers=2"],
    "width 256": [f"{A}hidden_size=256", f"{A}intermediate_size=768", f"{A}head_dim=64"],
    "width 256, none": [f"{A}hidden_size=256", f"{A}intermediate_size=768", f"{A}head_dim=64", "checkpointing=none"],
    "8 heads, 8 KV heads": [f"{A}num_attention_heads=8", f"{A}num_key_value_heads=8", f"{A}head_dim=16"],
    "8 heads, 1 KV head, none": [
        f"{A}num_attention_heads=8", f"{A}num_key_value_heads=1", f"{A}head_dim=16", "checkpointing=none"
    ],
    "vocabulary 16,384": [f"{A}vocab_size=16384"],
    "vocabulary 16,384, full loss": [f"{A}vocab_size=16384", "loss=full"],
    "untied head": [f"{A}tie_word_embeddings=false", f"{A}vocab_size=8192"],
    "untied head, full loss, none": [f"{A}tie_word_embeddings=false", "loss=full", "checkpointing=none"],
    "1,536 tokens in samples of 512": ["train.micro_batch_tokens=1536", "data.max_length=512"],
    "64 tokens": ["train.micro_batch_tokens=64", "data.max_length=64"],
    "rank 64": ["adapter.r=64"],
    "rank 4 on q and v, none": ["adapter.r=4", "adapter.target_modules=[q_proj,v_proj]", "checkpointing=none"],
    "dropout 0.1, none": ["adapter.dropout=0.1", "checkpointing=none"],
    "no quantisation": ["quant=none"],
    "no quantisation, none": ["quant=none", "checkpointing=none"],
    "int8": ["quant=int8"],
    "int8, none": ["quant=int8", "checkpointing=none"],
    "FP4 without double quantisation": ["quant=fp4", "quant.double_quant=false"],
    "all parameters train": ["quant=none", "adapter=none"],
    "all parameters train, none, 8-bit state": ["quant=none", "adapter=none", "optim=adamw_8bit", "checkpointing=none"],
    "paged 32-bit state": ["optim=paged_adamw_32bit"],
    "8-bit state, no accumulation": ["optim=adamw_8bit", "train.accumulation_steps=1"],
    "no accumulation, all parameters": ["quant=none", "adapter=none", "train.accumulation_steps=1"],
    "padded, 4 samples of 128": ["packing=none", "train.micro_batch_size=4", "data.max_length=128"],
    "padded, none": ["packing=none", "train.micro_batch_size=4", "data.max_length=128", "checkpointing=none"],
    "every_k of 2": ["checkpointing=every_k", "checkpointing.k=2"],
    "every_k of 4 in 10 layers": ["checkpointing=every_k", "checkpointing.k=4", f"{A}num_hidden_layers=10"],
    "sqrt of 12 layers": ["checkpointing=sqrt", f"{A}num_hidden_layers=12"],
    "attention": ["checkpointing=attention"],
    "selective": ["checkpointing=selective"],
    "bf16": ["precision=bf16"],
    "bf16, none": ["precision=bf16", "checkpointing=none"],
    "bf16, all parameters train": ["precision=bf16", "quant=none", "adapter=none"],
    "bf16, all parameters train, none": ["precision=bf16", "quant=none", "adapter=none", "checkpointing=none"],
    "MLP in 7 pieces": ["model.mlp_tiles=7"],
    "MLP in 7 pieces, keep=linear": ["model.mlp_tiles=7", "checkpointing=selective", "checkpointing.keep=linear"],
    "block mask (Gemma 2)": [f"{A}model_type=gemma2", f"{A}head_dim=32"],
    "block mask (Gemma 2), 1,024 tokens, none": [
        f"{A}model_type=gemma2", f"{A}head_dim=32", "train.micro_batch_tokens=1024", "checkpointing=none"
    ],
}  # fmt: skip
