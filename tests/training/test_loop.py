"""The loop against a plain one written out, and against transformers' Trainer with PEFT."""

from __future__ import annotations

import math
import traceback
import weakref
from dataclasses import dataclass, field
from functools import cache

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from torch.utils._python_dispatch import TorchDispatchMode

from tests.factories import FP32, llama, padded_batch, random_tokens, summed_loss
from tests.support import metrics, train_here
from trainer.config.compose import compose
from trainer.data.batches.loader import TrainingSteps
from trainer.device.measure import Memory
from trainer.errors import NonFiniteError
from trainer.model.attention import PACKED
from trainer.training.checkpoint import load_state
from trainer.training.loop import Loop, train
from trainer.training.loss_scaling import LossScaling
from trainer.training.losses import Full
from trainer.training.outliers import Outliers
from trainer.training.state import State, rng_state
from trainer.training.throughput import count_arithmetic

LENGTHS = [9, 30, 4, 17, 25, 6, 12, 21]


@dataclass
class Trace:
    """What happened in each step."""

    losses: list[float] = field(default_factory=list)
    gradients: list[dict[str, torch.Tensor]] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    learning_rates: list[float] = field(default_factory=list)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)


@cache
def composed(*overrides: str):
    return compose(["data.path=x.jsonl", "precision=fp32", "data.max_length=64", *overrides]).config


def run_loop(tokens, overrides, optimizer=None, spoil=None, loss=None) -> Trace:
    """All parameters of a tiny Llama through trainer.training.loop; `spoil(step, model)` runs before each clip."""
    config = composed(*overrides)
    model = llama(PACKED if config.packing.packed else "sdpa")
    parameters = list(model.parameters())
    steps = TrainingSteps(tokens, config.packing, config.train, config.seed)
    trace = Trace()
    optimizer = (optimizer or (lambda p: torch.optim.SGD(p, lr=0.0)))(parameters)
    optimizer.register_step_pre_hook(
        lambda *_: trace.gradients.append({n: p.grad.clone() for n, p in model.named_parameters()})
    )

    def after_step(state: State, grad_norm: float) -> None:
        if state.step:
            trace.losses.append(float(state.window.loss_sum) / state.window.num_targets)
            trace.grad_norms.append(grad_norm)
            trace.learning_rates.append(optimizer.param_groups[0]["lr"])
            state.window = type(state.window)()

    loop = Loop(
        model=model,
        parameters=parameters,
        optimizer=optimizer,
        schedule=config.schedule,
        loss=loss or config.loss,
        steps=steps,
        dtypes=FP32,
        accelerator=Accelerator(cpu=True),
        arithmetic=count_arithmetic(model, 0, True),
        recomputed=0.0,
        memory=Memory(torch.device("cpu")),
        max_grad_norm=config.train.max_grad_norm,
        outliers=Outliers(config.train.skip_outliers),
        scaling=LossScaling(torch.float32),
        peak_learning_rate=config.optim.learning_rate,
    )
    train(loop, State(), rng_state(torch.device("cpu")), after_step, lambda: None)
    trace.weights = {n: p.detach().clone() for n, p in model.named_parameters()}
    return trace


def written_out(tokens, indices, steps=1, lr=0.0, max_norm=1.0) -> Trace:
    """The same by hand: the mean over all targets of these samples, each alone through the plain forward."""
    model = llama("eager")
    trace = Trace()
    for _ in range(steps):
        model.zero_grad()
        batches = [padded_batch(tokens, int(i)) for i in indices]
        count = sum(batch.num_targets for batch in batches)
        total = sum(summed_loss(model(input_ids=b.input_ids, use_cache=False).logits, b.labels) for b in batches)
        (total / count).backward()
        trace.losses.append(total.item() / count)
        norm = math.sqrt(sum(p.grad.double().square().sum().item() for p in model.parameters()))
        trace.grad_norms.append(norm)
        with torch.no_grad():
            for p in model.parameters():
                p.grad *= min(1.0, max_norm / (norm + 1e-6))
        trace.gradients.append({n: p.grad.clone() for n, p in model.named_parameters()})
        with torch.no_grad():
            for p in model.parameters():
                p -= lr * p.grad
    trace.weights = {n: p.detach().clone() for n, p in model.named_parameters()}
    return trace


def assert_same(one: Trace, other: Trace, step: int = 0, tolerance: float = 1e-5) -> None:
    assert one.losses[step] == pytest.approx(other.losses[step], abs=tolerance)
    assert one.grad_norms[step] == pytest.approx(other.grad_norms[step], rel=1e-4)
    for name, gradient in one.gradients[step].items():
        assert (gradient - other.gradients[step][name]).abs().max() <= tolerance, name
    for name, weight in one.weights.items():
        assert (weight - other.weights[name]).abs().max() <= tolerance, name


ONE_STEP = ["train.max_steps=1", "schedule=constant", "schedule.warmup_steps=0", "optim.learning_rate=0.1"]


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.0)  # the loop sets the rate


@pytest.mark.parametrize("loss", ["full", "chunked"])
@pytest.mark.parametrize(("size", "accumulation"), [(8, 1), (4, 2), (2, 4), (1, 8)])
def test_a_step_is_the_mean_over_its_targets_however_it_is_divided(size, accumulation, loss):
    """L1: 1 x 8 = 2 x 4 = 8 x 1 in loss, gradients and weights, each equal to the step written out."""
    tokens = random_tokens(LENGTHS)
    shape = [f"train.micro_batch_size={size}", f"train.accumulation_steps={accumulation}", f"loss={loss}"]
    got = run_loop(tokens, ["packing=none", *shape, *ONE_STEP], sgd)
    assert_same(got, written_out(tokens, range(8), lr=0.1))


@pytest.mark.parametrize(("row_tokens", "accumulation"), [(124, 1), (64, 8)])
def test_a_packed_step_equals_the_padded_one(row_tokens, accumulation):
    tokens = random_tokens(LENGTHS)
    shape = [f"train.micro_batch_tokens={row_tokens}", f"train.accumulation_steps={accumulation}"]
    got = run_loop(tokens, ["packing=best_fit", *shape, *ONE_STEP], sgd)
    padded = run_loop(tokens, ["packing=none", "train.micro_batch_size=8", *ONE_STEP], sgd)
    assert_same(got, padded)
    assert_same(got, written_out(tokens, range(8), lr=0.1))


def test_a_short_last_window_is_a_plain_batch_of_what_it_holds():
    """L2: 10 samples, accumulation 4, one sample a micro-batch: the third step is the mean over its two."""
    tokens = random_tokens([*LENGTHS, 13, 28])
    overrides = ["packing=none", "train.micro_batch_size=1", "train.accumulation_steps=4", "train.epochs=1"]
    got = run_loop(tokens, [*overrides, "optim.learning_rate=1e-30"])  # the weights stay for the comparison
    assert len(got.losses) == 3
    order = np.random.default_rng([0, 0]).permutation(10)
    for step, part in enumerate([order[:4], order[4:8], order[8:]]):
        expected = written_out(tokens, part)
        assert got.losses[step] == pytest.approx(expected.losses[0], abs=1e-5)
        for name, gradient in got.gradients[step].items():
            assert (gradient - expected.gradients[0][name]).abs().max() <= 1e-5, name


def test_gradients_are_clipped_to_the_total_norm_and_not_without_one():
    tokens = random_tokens(LENGTHS)
    shape = ["packing=none", "train.micro_batch_size=8", *ONE_STEP]
    for limit in (0.05, None):
        got = run_loop(tokens, [*shape, f"train.max_grad_norm={'null' if limit is None else limit}"], sgd)
        expected = written_out(tokens, range(8), lr=0.1, max_norm=limit or math.inf)
        assert expected.grad_norms[0] > 0.05
        assert_same(got, expected)


@pytest.mark.parametrize("schedule", ["linear", "cosine", "wsd"])
@pytest.mark.parametrize(("samples", "accumulation", "epochs"), [(10, 4, 3), (8, 3, 2), (5, 8, 4)])
def test_planned_steps_are_the_real_ones_and_the_schedule_ends_where_it_says(schedule, samples, accumulation, epochs):
    """P5."""
    tokens = random_tokens([5] * samples)
    overrides = ["packing=none", "train.micro_batch_size=1", f"train.accumulation_steps={accumulation}"]
    overrides += [f"train.epochs={epochs}", f"schedule={schedule}", "optim.learning_rate=0.01"]
    got = run_loop(tokens, [*overrides, "schedule.warmup_steps=2", "schedule.final_ratio=0.1"])
    assert len(got.losses) == epochs * math.ceil(samples / accumulation)
    assert got.learning_rates[-1] == pytest.approx(0.001, rel=1e-6)
    assert min(got.learning_rates) > 0
    assert got.learning_rates[0] == pytest.approx(0.01 / 3)


def poisoned(steps: set[int]):
    """An SGD over parameters of which one gets a NaN gradient in these steps (from 1), whatever the loss says."""

    def build(parameters):
        calls = {"backward": 0}

        def spoil(parameter):
            calls["backward"] += 1
            if calls["backward"] in steps:
                parameter.grad[0, 0] = float("nan")

        next(p for p in parameters if p.ndim == 2).register_post_accumulate_grad_hook(spoil)
        return torch.optim.AdamW(parameters, lr=0.0, weight_decay=0.1)

    return build


FIVE_STEPS = ["packing=none", "train.micro_batch_size=2", "train.accumulation_steps=1", "schedule=constant"]


def test_a_step_with_a_nan_gradient_changes_no_weight():
    """L4: the loss is finite, the gradient is not. AdamW would move weights even on a zeroed gradient."""
    tokens = random_tokens(LENGTHS)
    overrides = [*FIVE_STEPS, "optim.learning_rate=0.01", "schedule.warmup_steps=0"]
    three = run_loop(tokens, [*overrides, "train.max_steps=2"], poisoned(set()))
    spoilt = run_loop(tokens, [*overrides, "train.max_steps=3"], poisoned({3}))
    assert math.isnan(spoilt.grad_norms[2]) and math.isfinite(spoilt.losses[2])
    for name, weight in spoilt.weights.items():
        assert torch.equal(weight, three.weights[name]), name
    assert len(spoilt.gradients) == 2, "the optimizer stepped on the spoilt gradient"


def test_five_spoilt_steps_in_a_row_stop_the_run():
    tokens = random_tokens(LENGTHS)
    overrides = [*FIVE_STEPS, "train.max_steps=12"]
    with pytest.raises(NonFiniteError, match="5 steps in a row"):
        run_loop(tokens, overrides, poisoned({3, 4, 5, 6, 7}))
    run_loop(tokens, overrides, poisoned({1, 2, 3, 4, 6, 7, 8, 9, 11, 12}))  # never five in a row


@pytest.fixture
def spoil_gradients(monkeypatch):
    """Puts a NaN into one gradient of chosen steps of a whole run."""
    from trainer.training import loop as module

    real = torch.nn.utils.clip_grad_norm_
    calls = {"step": 0}

    def install(steps):
        def clip(parameters, limit):
            calls["step"] += 1
            if calls["step"] in steps:
                parameters[0].grad[0, 0] = float("nan")
            return real(parameters, limit)

        monkeypatch.setattr(module.torch.nn.utils, "clip_grad_norm_", clip)

    return install


def test_a_skipped_step_is_counted_and_said(base_overrides, tmp_path, spoil_gradients, capsys):
    spoil_gradients({3})
    summary = train_here([*base_overrides, "train.max_steps=4"], tmp_path / "run")
    assert summary["skipped_steps"] == 1 and summary["steps"] == 4
    (row,) = metrics(tmp_path / "run", "skipped")
    assert row["step"] == 3
    assert "step 3: skipped" in capsys.readouterr().out
    rows = metrics(tmp_path / "run")
    assert [r["step"] for r in rows] == [1, 2, 3, 4]
    assert rows[2]["grad_norm"] is None and rows[2]["loss"] is not None


def test_a_run_that_became_non_finite_stops_with_6_and_saves_no_bad_weight(base_overrides, tmp_path, spoil_gradients):
    spoil_gradients(set(range(4, 100)))
    run = tmp_path / "run"
    with pytest.raises(NonFiniteError) as error:
        train_here([*base_overrides, "train.max_steps=20", "train.save_every=1", "train.keep_checkpoints=20"], run)
    assert error.value.exit_code == 6
    from safetensors.torch import load_file

    folders = sorted((run / "checkpoints").glob("step-*"))
    weights = {f.name: load_file(f / "adapter_model.safetensors") for f in folders}
    assert list(weights) == [f"step-{n:08d}" for n in range(1, 8)]
    good = weights["step-00000003"]
    for name in ("step-00000004", "step-00000007"):
        assert all(torch.equal(weights[name][key], good[key]) for key in good)
        assert all(tensor.isfinite().all() for tensor in weights[name].values())
    assert load_state(folders[-1]).skipped_steps == 4
    import json

    summary = json.loads((run / "summary.json").read_text())
    assert summary["status"] == "failed" and "5 steps in a row" in summary["error"]
    assert not (run / "adapter").exists()


@pytest.mark.parametrize("adapter", ["lora", "none"])
def test_ten_steps_equal_transformers_trainer(adapter, tiny, chats, base_overrides, tmp_path):
    """The same padded batches in the same order, fp32: losses and final weights within 1e-5."""
    import peft
    from transformers import Trainer, TrainingArguments

    from tests.factories import load
    from trainer.data.tokens.tokenize import load_tokens
    from trainer.model.loading.base import load_tokenizer

    shape = ["packing=none", "train.micro_batch_size=3", "train.accumulation_steps=2", "train.max_steps=10"]
    rate = 1e-3
    overrides = [*base_overrides, *shape, f"adapter={adapter}", f"optim.learning_rate={rate}", "seed=3"]
    # eps 1e-6: with AdamW's 1e-8 the sign of a gradient of rounding size decides where its weight goes.
    overrides += ["optim.weight_decay=0.1", "optim.eps=1e-6", "checkpointing=none"]
    ours = tmp_path / "ours"
    train_here([*overrides, "track=local"], ours)

    config = compose(overrides).config
    tokens, _ = load_tokens(config.data, config.data.path, "data.path", load_tokenizer(config.model))
    steps = TrainingSteps(tokens, config.packing, config.train, config.seed)
    ordered = [micro_batch for step in range(1, 11) for micro_batch in steps.sample_indices(step)]
    # The epoch's last step has one micro-batch only (8 samples = 3 + 3 + 2): the same count for both, so pad with
    # empty micro-batches that Trainer divides by no target of.
    windows = [steps.sample_indices(step) for step in range(1, 11)]
    assert {len(window) for window in windows} == {1, 2} and sum(map(len, windows)) == len(ordered)

    # One item a micro-batch slot: the indices of its samples, None where the window is short.
    slots = [{"indices": window[i] if i < len(window) else None} for window in windows for i in range(2)]

    def collator(items):
        (item,) = items
        if item["indices"] is None:
            ids = torch.zeros(1, 2, dtype=torch.int64)
            return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": torch.full_like(ids, -100)}
        samples = [tokens.sample(i) for i in item["indices"]]
        width = max(len(ids) for ids, _ in samples)
        batch = {name: torch.zeros(len(samples), width, dtype=torch.int64) for name in ("input_ids", "attention_mask")}
        batch["labels"] = torch.full((len(samples), width), -100)
        for row, (ids, is_target) in enumerate(samples):
            batch["input_ids"][row, : len(ids)] = torch.from_numpy(ids.astype(np.int64))
            batch["attention_mask"][row, : len(ids)] = 1
            batch["labels"][row, : len(ids)] = torch.from_numpy(np.where(is_target, ids, -100).astype(np.int64))
        return batch

    class InOrder(Trainer):
        def _get_train_sampler(self, *_):
            return torch.utils.data.SequentialSampler(self.train_dataset)

    model = load(tiny.path)
    if adapter == "lora":
        torch.manual_seed(3)
        lora = peft.LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
        model = peft.get_peft_model(model, lora)
    theirs = InOrder(
        model,
        TrainingArguments(
            str(tmp_path / "theirs"),
            per_device_train_batch_size=1,
            gradient_accumulation_steps=2,
            max_steps=10,
            learning_rate=rate,
            lr_scheduler_type="constant",
            weight_decay=0.1,
            adam_epsilon=1e-6,
            max_grad_norm=1.0,
            logging_steps=1,
            report_to=[],
            use_cpu=True,
            save_strategy="no",
            optim="adamw_torch",
            disable_tqdm=True,
            remove_unused_columns=False,
            seed=3,
        ),
        train_dataset=slots,
        data_collator=collator,
    )
    theirs.train()

    rows = [row for row in theirs.state.log_history if "loss" in row]
    ours_rows = metrics(ours)
    assert len(rows) == len(ours_rows) == 10
    for mine, other in zip(ours_rows, rows, strict=True):
        assert mine["loss"] == pytest.approx(other["loss"], abs=1e-5)
        assert mine["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-4)
    assert ours_rows[-1]["loss"] < ours_rows[0]["loss"] - 0.1, "nothing was learnt: the comparison proves little"

    from safetensors.torch import load_file

    if adapter == "lora":
        got = load_file(ours / "adapter" / "adapter_model.safetensors")
        expected = peft.get_peft_model_state_dict(model)
    else:
        got = load_file(ours / "model" / "model.safetensors")
        expected = dict(model.named_parameters())
    assert got.keys() == expected.keys()
    for name, tensor in got.items():
        assert (tensor - expected[name]).abs().max() <= 1e-5, name


def test_no_tensor_outlives_its_step(base_overrides, tmp_path, monkeypatch):
    """G1, short: live tensors after step 20 and after step 120 are as many."""
    assert_no_growth(base_overrides, tmp_path, monkeypatch, 120)


@pytest.mark.slow
def test_no_tensor_outlives_its_step_in_500(base_overrides, tmp_path, monkeypatch):
    """G1."""
    assert_no_growth(base_overrides, tmp_path, monkeypatch, 500)


def assert_no_growth(base_overrides, tmp_path, monkeypatch, num_steps):
    import gc
    import weakref

    from trainer.training.watch import Watch

    def all_tensors():
        gc.collect()
        return [o for o in gc.get_objects() if isinstance(o, torch.Tensor)]

    live = {}
    real = Watch.after_step
    # Tests before this one in the process leave tensors in caches, symbolic ones of a compiler among them.
    earlier = [weakref.ref(tensor) for tensor in all_tensors()]

    def counting(self, state, grad_norm):
        real(self, state, grad_norm)
        if state.step in (20, num_steps):
            not_ours = {id(ref()) for ref in earlier}
            tensors = [tensor for tensor in all_tensors() if id(tensor) not in not_ours]
            live[state.step] = (len(tensors), sum(t.nbytes for t in tensors))

    monkeypatch.setattr(Watch, "after_step", counting)
    overrides = [*base_overrides, f"train.max_steps={num_steps + 1}", "train.eval_every=7", "data.eval_fraction=0.2"]
    overrides += ["quant=nf4", "optim=paged_adamw_8bit", "adapter.dropout=0.1", "train.accumulation_steps=1"]
    # One step more, so that a batch made ahead is alive at both counts.
    train_here(overrides, tmp_path / "run")
    (count, size), (last_count, last_size) = live[20], live[num_steps]
    assert count == last_count
    assert abs(size - last_size) < 8192, "more than the batches of the two steps differ by"


class Reads(TorchDispatchMode):
    """Counts reads of a tensor's value by Python: on a GPU each waits for the device."""

    def __init__(self):
        super().__init__()
        self.ours = self.masks = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        if operation is torch.ops.aten._local_scalar_dense.default:
            in_masks = any("masking_utils" in frame.filename for frame in traceback.extract_stack())
            self.masks += in_masks
            self.ours += not in_masks
        return operation(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("overrides", "mask_reads"), [(("packing=best_fit", "loss=chunked"), 1), (("packing=none", "loss=full"), 2)]
)
def test_one_value_is_read_an_optimizer_step(overrides, mask_reads):
    """The finite check of the gradient norm; micro-batches read nothing but in transformers' own mask preparation:
    whether position_ids restart (packed), whether a mask is all ones (padded)."""

    def reads(accumulation: int, num_steps: int) -> Reads:
        words = [
            *overrides,
            "train.micro_batch_tokens=64",
            "train.micro_batch_size=2",
            f"train.accumulation_steps={accumulation}",
            f"train.max_steps={num_steps}",
        ]
        with Reads() as mode:
            run_loop(random_tokens(LENGTHS), words)
        return mode

    once, twice = reads(1, 2), reads(1, 4)
    assert twice.ours - once.ours == 2 * 2  # run_loop's own trace reads the loss once a step too
    assert twice.masks - once.masks == 2 * mask_reads
    accumulated = reads(2, 2)  # two micro-batches in each of two steps
    assert accumulated.ours == once.ours
    assert accumulated.masks == 2 * once.masks


def test_nothing_of_a_micro_batch_outlives_it():
    """The loss holds its graph: with it the activations of the last micro-batch would lie beside the next one's."""
    alive = []

    class Watched(Full):
        def sum(self, model, batch):
            alive.append([] if not alive else [ref for ref in self.made if ref() is not None])
            total = super().sum(model, batch)
            self.made = [weakref.ref(total)]
            return total

    overrides = ("train.accumulation_steps=4", "train.micro_batch_tokens=64", "train.max_steps=1")
    run_loop(random_tokens([60, 50, 40, 62]), overrides, loss=Watched())
    assert alive == [[], [], [], []]
