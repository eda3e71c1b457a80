"""Ranges of values, and settings that exclude each other: each rule with what it refuses and what it lets pass."""

import ast
from dataclasses import dataclass, replace
from functools import cache
from typing import Annotated

import pytest

from trainer.config.compose import compose
from trainer.config.rules import broken_rules
from trainer.config.schema import SECTIONS, Config
from trainer.config.shelf import CONF, option_values, options, schema_of
from trainer.config.types import fields_of
from trainer.errors import ConfigError
from trainer.model.adapters import LoRA
from trainer.ranges import Range, ranges_of
from trainer.registry import OPTIONS

NAN, INF = float("nan"), float("inf")

# key: values just outside, values just inside, where no other rule stands in the way
EDGES = {
    "seed": ([-1, 2**32], [0, 2**32 - 1]),
    "data.eval_fraction": ([-0.01, 1.0, NAN], [0.0, 0.99]),
    "data.max_dropped_share": ([-0.01, 1.01, NAN], [0.0, 1.0]),
    "data.max_truncated_share": ([-0.01, 1.01, NAN], [0.0, 1.0]),
    "data.max_duplicate_share": ([-0.01, 1.01, NAN], [0.0, 1.0]),
    "data.workers": ([0, -1], [1, None]),
    "data.streaming_window": ([0, -1], [1, 10_000]),
    "data.max_length": ([1, 0, -5], [2, 64]),
    "model.rope_factor": ([0.99, 0.0, INF, NAN], [1.0]),
    "train.label_smoothing": ([-0.1, 1.0, NAN], [0.0, 0.9]),
    "train.neftune_alpha": ([-1.0, INF, NAN], [0.0, 15.0]),
    "train.skip_outliers": ([0.0, -1.0, INF, NAN], [None, 6.0]),
    "train.early_stopping_patience": ([0, -1], [None]),
    "train.embedding_learning_rate": ([0.0, -1.0, INF, NAN], [None, 1e-5]),
    "quant.outlier_threshold": ([-0.1, INF, NAN], [0.0, 6.0]),
    "adapter.r": ([0, -8], [1, 64]),
    "adapter.alpha": ([0.0, -1.0, INF, NAN], [0.1, 64.0]),
    "adapter.dropout": ([-0.1, 1.0, NAN], [0.0, 0.99]),
    "adapter.svd_iterations": ([0, -1], [1, 16, None]),
    "adapter.iterations": ([0, -1], [1, 5]),
    "adapter.learning_rate_ratio": ([0.0, -1.0, INF, NAN], [0.5, 16.0]),
    "optim.decay_exponent": ([0.0, -1.1, 0.8, NAN], [-1.0, -0.5]),
    "optim.clip_threshold": ([0.0, -1.0, INF, NAN], [0.1, 1.0]),
    "optim.rank": ([0, -1], [1, 128]),
    "optim.update_interval": ([0, -1], [1, 200]),
    "optim.scale": ([0.0, -1.0, INF, NAN], [0.25, 1.0]),
    "optim.momentum": ([-0.1, 1.0, NAN], [0.0, 0.95]),
    "optim.newton_schulz_steps": ([0, -1], [1, 10]),
    "checkpointing.k": ([0, -1], [1, 4]),
    "optim.learning_rate": ([0.0, -1e-4, 2e4, INF, NAN], [1e-12, 1.0, 1000.0]),
    "optim.weight_decay": ([-0.1, INF, NAN], [0.0, 0.1]),
    "optim.betas": ([[0.9], [0.9, 1.0], [-0.1, 0.9], [0.9, 0.99, 0.999], [], [0.9, NAN]], [[0.0, 0.0], [0.9, 0.95]]),
    "optim.eps": ([0.0, -1e-8, INF, NAN], [1e-16]),
    "schedule.warmup_steps": ([-1], [0, 100, None]),
    "schedule.warmup_ratio": ([-0.1, 1.0, NAN], [0.0, 0.5]),
    "schedule.final_ratio": ([-0.1, 1.1, NAN], [0.0, 1.0]),
    "schedule.decay_ratio": ([0.0, 1.1, NAN], [0.01, 1.0]),
    "loss.chunk_tokens": ([0, -1], [1, 4096]),
    "packing.window": ([0, -1], [1]),
    "memory.budget_gib": ([0.0, -1.0, NAN, INF], [0.5, None]),
    "memory.snapshot": ([-1], [0, 3, None]),
    "train.epochs": ([0, -1], [1]),
    "train.max_steps": ([0, -1], [1, None]),
    "train.accumulation_steps": ([0, -1], [1]),
    "train.micro_batch_tokens": ([1, 0, -1], [65536]),
    "train.micro_batch_size": ([0, -1], [1]),
    "train.max_grad_norm": ([0.0, -1.0, INF, NAN], [0.1, None]),
    "train.log_every": ([0, -1], [1]),
    "train.eval_every": ([-1], [0, 1]),
    "train.save_every": ([-1], [0, 1]),
    "train.keep_checkpoints": ([0, -1], [1]),
    "train.compare_prompts": ([-1], [0, 1]),
    "search.trials": ([0, -1], [1]),
    "search.parallel": ([0, -1], [1]),
    "search.random_trials": ([0, -1], [1]),
    "search.prune_after": ([0, -1], [1, None]),
}

TOO_MANY = {"adapter.r": 65536, "train.epochs": 10_000, "train.max_steps": 2**31 - 1, "data.max_length": 2**24}
"""Counts have an upper end: most of these."""

RANGES = ranges_of(Config) | {
    f"{group}.{name}": declared
    for group in (*SECTIONS, "train")
    for option in options(group)
    for name, declared in ranges_of(schema_of(group, option)).items()
}

NEEDS = {"galore_adamw": ("adapter=none", "quant=none")}
"""What an option goes with."""

ACTIVATIONS = "offload=activations"


@cache
def configuration(*words: str) -> Config:
    return compose(list(words)).config


def holding(key: str) -> Config:
    """A right configuration that has this setting: the first option of its group that does."""
    section, _, name = key.rpartition(".")
    if not section or section == "train":
        return configuration()
    option = next(o for o in options(section) if name in option_values(section, o))
    default = type(getattr(configuration(), section))
    return (
        configuration() if name in fields_of(default) else configuration(f"{section}={option}", *NEEDS.get(option, ()))
    )


def with_value(config: Config, key: str, value) -> Config:
    section, _, name = key.rpartition(".")
    if not section:
        return replace(config, **{name: value})
    return replace(config, **{section: replace(getattr(config, section), **{name: value})})


def broken(*changes: tuple[str, object], words: tuple[str, ...] = (), trains: bool = True) -> list[str]:
    config = configuration(*words)
    for key, value in changes:
        config = with_value(config, key, value)
    return broken_rules(config, trains)


def test_every_range_has_its_edges_here():
    assert set(EDGES) == set(RANGES)


def test_every_number_has_a_range():
    """A number whose every value made sense would be news."""
    ranged = set(RANGES)
    for group in (*SECTIONS, "train"):
        for name, field in (p for o in options(group) for p in fields_of(schema_of(group, o)).items()):
            if {int, float} & {field.type, *getattr(field.type, "__args__", ())}:
                assert f"{group}.{name}" in ranged


@pytest.mark.parametrize(("key", "value"), [(key, v) for key, (bad, _) in EDGES.items() for v in bad], ids=str)
def test_outside_a_range_is_refused_by_its_full_key(key, value):
    problems = broken_rules(with_value(holding(key), key, value))
    (problem,) = [p for p in problems if p.startswith(f"{key}=") and "must be" in p]
    assert problem == f"{key}={value}: {RANGES[key].words}"


@pytest.mark.parametrize(("key", "most"), TOO_MANY.items())
def test_counts_have_an_upper_end(key, most):
    for value in (most + 1, 10**20):
        problems = broken_rules(with_value(holding(key), key, value))
        assert [p.startswith(f"{key}={value}: must be at most {most}") for p in problems if p.startswith(key)] == [True]
    assert not any(key in problem and "at most" in problem for problem in broken((key, most)))


def test_an_option_of_somebody_elses_answers_for_itself():
    """Its range and its problem with another option, declared in its own class and nowhere else."""

    @dataclass
    class Gated(LoRA):
        gate: Annotated[float | None, Range(lambda v: v > 0.5, "must be above 0.5")]

        def problems(self, config):
            return ["adapter=gated wants a 4-bit base"] * (not config.quant.stores_4bit)

    values = vars(configuration().adapter)
    assert broken(("adapter", Gated(**values, gate=0.6))) == broken(("adapter", Gated(**values, gate=None))) == []
    assert broken(("adapter", Gated(**values, gate=0.5))) == ["adapter.gate=0.5: must be above 0.5"]
    assert broken(("adapter", Gated(**values, gate=0.6)), words=("quant=int8",)) == ["adapter=gated wants a 4-bit base"]


def test_the_rules_name_no_technique():
    """No module of trainer/config asks what an option is."""
    names = {cls.__name__ for group in OPTIONS.values() for cls in group.values()} - {"Data", "Model", "MemoryOptions"}
    for file in sorted((CONF.parent / "trainer/config").glob("*.py")):
        known = {node.id for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Name)}
        assert not known & names, file


@pytest.mark.parametrize(("key", "value"), [(key, v) for key, (_, good) in EDGES.items() for v in good], ids=str)
def test_inside_a_range_passes(key, value):
    assert broken_rules(with_value(holding(key), key, value)) == []


def test_a_row_must_hold_the_longest_sample():
    (problem,) = broken(("train.micro_batch_tokens", 511), ("data.max_length", 512))
    assert "train.micro_batch_tokens=511 is below data.max_length=512" in problem
    assert broken(("train.micro_batch_tokens", 512), ("data.max_length", 512)) == []
    assert broken(("train.micro_batch_tokens", 511), ("data.max_length", 512), words=("packing=none",)) == []


def test_all_parameters_train_only_unquantised():
    for quant in options("quant"):
        problems = broken(("adapter", configuration("adapter=none", "quant=none").adapter), words=(f"quant={quant}",))
        assert (problems == []) == (quant == "none")
        assert all("adapter=none" in p and "use quant=none" in p for p in problems)


def test_data_and_model_must_be_named():
    (problem,) = broken(("data.path", None))
    assert problem.startswith("data.path is missing") and "data=quickstart" in problem
    (problem,) = broken(("model.path", None))
    assert problem.startswith("model.path is missing") and "local folder or a hub id" in problem
    weights = type(configuration().model.weights)
    assert broken(("model.path", None), ("model.weights", weights.random)) == []


@pytest.mark.parametrize("format", ["messages", "alpaca", "prompt_completion"])
def test_only_text_can_be_split(format):
    data = configuration().data
    split = ("data.over_length", type(data.over_length).split)
    (problem,) = broken(split, ("data.format", type(data.format)[format]))
    assert "data.over_length=split cuts plain text" in problem and f"data.format={format}" in problem
    for right in ("auto", "text"):
        assert broken(split, ("data.format", type(data.format)[right])) == []


def test_a_stream_needs_an_end_and_what_is_held_out_beside_it():
    streaming, steps = ("data.streaming", True), ("train.max_steps", 100)
    both = broken(streaming, ("train.max_steps", None), ("data.eval_fraction", 0.1))
    assert len(both) == 2 and "needs train.max_steps" in both[0] and "data.eval_fraction=0.1" in both[1]
    bare = (streaming, ("train.max_steps", None), ("data.eval_fraction", 0.1), ("train.epochs", 0))
    assert broken(*bare, trains=False) == ["train.epochs=0: must be 1 or more"]  # an audit reads one window
    assert broken(streaming, steps, ("data.eval_fraction", 0.0)) == []
    assert broken(streaming, steps, ("data.eval_fraction", 0.1), ("data.eval_path", "held_out.jsonl")) == []


@pytest.mark.parametrize("value", ["", [], None, 5, ["q_proj", ""], ["q_proj", 3], {"a": 1}])
def test_targets_are_an_expression_or_a_list_of_names(value):
    (problem,) = broken(("adapter.target_modules", value))
    assert problem.startswith("adapter.target_modules=") and "all-linear" in problem


@pytest.mark.parametrize("value", ["all-linear", ".*q_proj", ["q_proj"], ["q_proj", "mlp.up_proj"]])
def test_right_targets_pass(value):
    assert broken(("adapter.target_modules", value)) == []


@pytest.mark.parametrize("offload", ["base_cpu", "base_disk"])
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["adapter=none", "quant=none"], "adapter=none trains them"),
        (["quant=int8"], "LLM.int8() keeps its own copies: use quant=nf4"),
        (["quant=nf4", "model.quantized_cache=true"], "leave out model.quantized_cache=true"),
    ],
    ids=" ".join,
)
def test_what_cannot_be_streamed(offload, words, said):
    assert configuration(*words)
    with pytest.raises(ConfigError) as refused:
        compose([*words, f"offload={offload}"])
    assert f"offload={offload}" in str(refused.value) and said in str(refused.value)


@pytest.mark.parametrize("tiles", [0, -1, "many", None, 1.5, True, [2]])
def test_tiles_are_a_number_or_auto(tiles):
    (problem,) = broken(("model.mlp_tiles", tiles))
    assert problem.startswith("model.mlp_tiles=") and "auto, or a number of 1 or more" in problem
    assert broken(("model.mlp_tiles", "auto")) == broken(("model.mlp_tiles", 8)) == []


@pytest.mark.parametrize("kernels", ["compiled", "liger"])
def test_tiles_need_the_trainers_own_mlp(kernels):
    words = (f"kernels={kernels}", "adapter.fused=false")
    assert broken(words=words) == []
    (problem,) = broken(("model.mlp_tiles", "auto"), words=words)
    assert "model.mlp_tiles=1 or kernels=torch" in problem


@pytest.mark.parametrize("policy", options("checkpointing"))
def test_only_inputs_of_recomputed_blocks_can_be_moved(policy):
    problems = broken(("checkpointing", configuration(f"checkpointing={policy}").checkpointing), words=(ACTIVATIONS,))
    refused = policy in ("none", "attention")
    assert [("offload=activations" in p and "checkpointing=full" in p) for p in problems] == [True] * refused


@pytest.mark.parametrize("revision", [None, "main", "v1.0", "0123abc", "G" * 40])
def test_foreign_code_needs_a_commit(revision):
    (problem,) = broken(("model.trust_remote_code", True), ("model.revision", revision))
    assert problem.startswith("model.trust_remote_code=true") and "must be a commit" in problem


def test_foreign_code_of_a_commit_passes():
    assert broken(("model.trust_remote_code", True), ("model.revision", "0123456789abcdef" * 2 + "01234567")) == []


@pytest.mark.parametrize("kernels", ["compiled", "liger"])
def test_kernels_and_fused_functions_exclude_each_other(kernels):
    with pytest.raises(ConfigError, match="add adapter.fused=false"):
        compose(["data.path=x", f"kernels={kernels}"])
    compose(["data.path=x", f"kernels={kernels}", "adapter.fused=false"])


@pytest.mark.parametrize("policy", ["attention", "selective"])
def test_compiled_blocks_are_kept_or_recomputed_whole(policy):
    words = ["data.path=x", "kernels=compiled", "adapter.fused=false"]
    with pytest.raises(ConfigError, match="cut through a block"):
        compose([*words, f"checkpointing={policy}"])
    compose([*words, "checkpointing=full"])
    with pytest.raises(ConfigError, match="Use offload=none"):
        compose([*words, "checkpointing=full", "offload=activations"])


def test_every_broken_rule_is_told_at_once():
    words = ["seed=-1", "optim.eps=0", "train.micro_batch_tokens=8", "adapter=none", "data.path=null"]
    with pytest.raises(ConfigError) as refused:
        compose(words)
    lines = str(refused.value).splitlines()
    assert lines[0] == "5 problems:" and len(lines) == 6
    assert refused.value.exit_code == 2


def test_inductors_modes_are_inductors():
    words = ["data.path=x", "kernels=compiled", "adapter.fused=false", "kernels.mode=max-autotune-no-cudagraphs"]
    assert compose(words).config.kernels.mode.value == "max-autotune-no-cudagraphs"
    with pytest.raises(ConfigError, match="is one of inductor's: use kernels.backend=inductor"):
        compose([*words, "kernels.backend=aot_eager"])
    with pytest.raises(ConfigError, match="kernels.mode=max-autotun"):
        compose([*words[:-1], "kernels.mode=max-autotun"])
