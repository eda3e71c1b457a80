"""Runs in the peers' own interpreter: cases as JSON on standard input, their predictions in bytes on standard output.

CUDA's context and other overheads that the peers add as a constant are left out: the real peak is an allocator's.
"""

import json
import sys

MIB, GIB = 2**20, 2**30


def fitcheck(case):
    """fitcheck-llm's public estimate."""
    from fitcheck import ModelConfig, TrainingConfig, estimate, get_gpu

    model = ModelConfig(name="case", **case["model"])
    training = TrainingConfig(
        precision=case["precision"],
        quantization=case["quant"],
        double_quant=case["quant"] == "nf4",
        optimizer="adam8bit" if case["eight_bit"] else "adamw",
        batch_size=case["samples"],
        seq_len=case["length"],
        lora_rank=case["rank"],
        lora_targets=case["targets"],
        grad_checkpoint=case["checkpointing"],
        flash_attn=True,
    )
    report = estimate(model, training, get_gpu("case", vram_mib=80_000))
    return (report.total_mib - report.overhead_mib) * MIB


def soup(case):
    """soup-cli's profile, before it rounds to 0.01 GB."""
    from soup_cli.utils import profiler

    billions = case["model"]["num_params"] / 1e9
    arch = profiler.get_model_arch("case", billions)
    bits = {"nf4": "4bit", "int8": "8bit", "none": "none"}[case["quant"]]
    size = profiler.estimate_model_memory(billions, bits) * 1e9
    if case["rank"] is None:
        trainable = case["model"]["num_params"]
        size += 2 * trainable
    else:
        trainable = profiler.estimate_trainable_params(billions, case["rank"], arch["hidden_size"])
        size += profiler.estimate_lora_memory(billions, case["rank"], 2 * case["rank"]) * GIB
    size += profiler.estimate_optimizer_memory(trainable, "adamw_8bit" if case["eight_bit"] else "adamw") * GIB
    activations = profiler.estimate_activation_memory(
        case["samples"], case["length"], arch["hidden_size"], arch["num_layers"], case["checkpointing"]
    )
    return size + activations * GIB


def main():
    found = []
    for case in json.load(sys.stdin):
        row = {}
        for name, predict in (("fitcheck-llm", fitcheck), ("soup-cli", soup)):
            try:
                row[name] = predict(case)
            except ImportError:
                row[name] = None
        found.append(row)
    from importlib.metadata import PackageNotFoundError, version

    versions = {}
    for name in ("fitcheck-llm", "soup-cli"):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = None
    print(json.dumps({"versions": versions, "rows": found}))


main()
