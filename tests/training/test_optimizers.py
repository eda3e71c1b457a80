"""Optimizers: a step by hand, which parameters decay, and that their settings arrive."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.factories import llama, option, options
from trainer.config.compose import compose
from trainer.errors import ModelError
from trainer.model.roles import mark_tables, set_rate_ratio
from trainer.training.optimizer_state import flat
from trainer.training.optimizers.optim import RATE_RATIO

OPTIONS = options("optim")
ADAMW = [name for name in OPTIONS if "adamw" in name and "galore" not in name and "schedule_free" not in name]


def build(name: str, parameters: list, **settings):
    return option("optim", name, **settings).build(parameters)


def parameters(seed: int = 0) -> list[torch.nn.Parameter]:
    """A matrix whose state bitsandbytes keeps in 8 bits (4,096 elements or more), a small one, and a vector."""
    torch.manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(*shape) / 10) for shape in ((64, 128), (4, 8), (16,))]


def give_gradients(params: list, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for p in params:
        p.grad = torch.randn(p.shape, generator=generator)


@pytest.mark.parametrize("name", ADAMW)
def test_three_steps_are_adamws_by_hand(name):
    params = parameters()
    optimizer = build(name, params, learning_rate=1e-2, weight_decay=0.1, betas=[0.8, 0.95], eps=1e-6)
    expected = [p.detach().clone().double() for p in params]
    first = [torch.zeros_like(e) for e in expected]
    second = [torch.zeros_like(e) for e in expected]
    for step in range(1, 4):
        give_gradients(params, step)
        for p, e, m, v in zip(params, expected, first, second, strict=True):
            gradient = p.grad.double()
            m.mul_(0.8).add_(0.2 * gradient)
            v.mul_(0.95).add_(0.05 * gradient**2)
            decay = 0.1 if p.ndim > 1 else 0.0
            update = m / (1 - 0.8**step) / ((v / (1 - 0.95**step)).sqrt() + 1e-6)
            e.mul_(1 - 1e-2 * decay).sub_(1e-2 * update)
        optimizer.step()
    for p, e in zip(params, expected, strict=True):
        quantised = "8bit" in name and p.numel() >= 4096
        # 8-bit moments are rounded: a step may be off by a few percent of the learning rate.
        assert (p - e).abs().max() <= (1e-2 if quantised else 1e-6)
        assert (p - e).abs().mean() <= (2e-3 if quantised else 1e-6)


@pytest.mark.parametrize("name", ADAMW)
def test_matrices_decay_and_vectors_do_not(name):
    params = parameters()
    optimizer = build(name, params, weight_decay=0.5, learning_rate=1e-1)
    decays = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert [decays[id(p)] for p in params] == [0.5, 0.5, 0.0]
    before = [p.detach().clone() for p in params]
    for p in params:
        p.grad = torch.zeros_like(p)
    optimizer.step()
    for p, old in zip(params, before, strict=True):
        assert torch.allclose(p, old * (0.95 if p.ndim > 1 else 1.0), atol=1e-6)


@pytest.mark.parametrize("name", [name for name in ADAMW if "8bit" in name])
def test_state_of_large_tensors_is_in_eight_bits(name):
    params = parameters()
    optimizer = build(name, params)
    give_gradients(params, 1)
    optimizer.step()
    large, small = optimizer.state[params[0]], optimizer.state[params[1]]
    assert large["state1"].dtype is torch.uint8 and small["state1"].dtype is torch.float32
    stored = sum(t.nbytes for key, t in large.items() if isinstance(t, torch.Tensor) and not key.startswith("qmap"))
    assert stored / params[0].numel() == pytest.approx(2.03, abs=0.01), "bytes a parameter"


def test_a_run_without_vectors_has_no_empty_group():
    optimizer = build("adamw", parameters()[:2])
    assert len(optimizer.param_groups) == 1


def five_steps(name: str, follow, **settings) -> tuple[list, list]:
    """Parameters after five steps, and what `follow(p, gradient, memory, step)` makes of them, in float64."""
    params = parameters()
    expected = [p.detach().clone().double() for p in params]
    optimizer = build(name, params, **settings)
    memories = [{} for _ in params]
    for step in range(1, 6):
        give_gradients(params, step)
        for p, e, memory in zip(params, expected, memories, strict=True):
            follow(e, p.grad.double(), memory, step)
        optimizer.step()
    return params, expected


def test_lion_moves_by_the_sign_of_its_average():
    def follow(p, gradient, memory, step):
        average = memory.setdefault("average", torch.zeros_like(p))
        p.mul_(1 - 1e-3 * (0.1 if p.ndim > 1 else 0)).sub_(1e-3 * (0.9 * average + 0.1 * gradient).sign())
        average.mul_(0.99).add_(0.01 * gradient)

    params, expected = five_steps("lion_8bit", follow, learning_rate=1e-3, weight_decay=0.1, betas=[0.9, 0.99])
    for p, e in zip(params, expected, strict=True):
        # An average kept in 8 bits may have another sign where the sum is close to none.
        wrong = ((p - e).abs() > 1e-6).double().mean()
        assert wrong <= (0.05 if p.numel() >= 4096 else 0), wrong


def test_adafactor_keeps_a_row_and_a_column():
    """Shazeer & Stern 2018, algorithm 4 and section 6, with a relative rate."""

    def follow(p, gradient, memory, step):
        decay = step**-0.8
        axes = (1, 0) if p.ndim > 1 else ()
        for axis in axes:
            mean = gradient.square().mean(axis, keepdim=True)
            memory[axis] = memory.get(axis, torch.zeros_like(mean)).lerp(mean, decay)
        if axes:
            second = memory[1] @ memory[0] / memory[1].mean(0, keepdim=True)
        else:
            second = memory["all"] = memory.get("all", torch.zeros_like(p)).lerp(gradient.square(), decay)
        update = gradient / second.sqrt()
        update /= max(1.0, update.square().mean().sqrt().item())
        rate = max(1e-3, p.square().mean().sqrt().item()) * min(1e-2, step**-0.5)
        p.mul_(1 - 1e-2 * (0.1 if axes else 0)).sub_(rate * update)

    params, expected = five_steps("adafactor", follow, learning_rate=1e-2, weight_decay=0.1)
    for p, e in zip(params, expected, strict=True):
        assert (p - e).abs().max() <= 2e-6


def test_muon_is_orthogonal_momentum_for_matrices_and_adamw_for_vectors():
    def orthogonal(x):  # torch's own arithmetic is in bf16, and so are its small matrices' last digits
        tall = x.shape[0] > x.shape[1]
        x = (x.T if tall else x).bfloat16()
        x = x / x.norm().clamp(min=1e-7)
        for _ in range(5):
            gram = x @ x.T
            x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=-4.775, alpha=2.0315), x, beta=3.4445)
        return (x.T if tall else x).double()

    def follow(p, gradient, memory, step):
        if p.ndim > 1:
            momentum = memory.setdefault("momentum", torch.zeros_like(p)).lerp_(gradient, 0.05)
            update = orthogonal(gradient.lerp(momentum, 0.95).float())
            p.mul_(1 - 1e-2 * 0.1).sub_(1e-2 * 0.2 * max(p.shape) ** 0.5 * update)
            return
        m = memory.setdefault("m", torch.zeros_like(p)).mul_(0.9).add_(0.1 * gradient)
        v = memory.setdefault("v", torch.zeros_like(p)).mul_(0.999).add_(0.001 * gradient**2)
        p.sub_(1e-2 * (m / (1 - 0.9**step)) / ((v / (1 - 0.999**step)).sqrt() + 1e-8))

    params, expected = five_steps("muon", follow, learning_rate=1e-2, weight_decay=0.1)
    for p, e in zip(params, expected, strict=True):
        assert (p - e).abs().max() <= 1e-3 and (p - e).abs().mean() <= 1e-4


def adam(memory: dict, gradient: torch.Tensor, step: int, eps: float = 1e-8) -> torch.Tensor:
    """The bias-corrected direction."""
    m = memory.setdefault("m", torch.zeros_like(gradient)).mul_(0.9).add_(0.1 * gradient)
    v = memory.setdefault("v", torch.zeros_like(gradient)).mul_(0.999).add_(0.001 * gradient**2)
    return m * (1 - 0.999**step) ** 0.5 / (1 - 0.9**step) / (v.sqrt() + eps)


def test_galore_is_adam_in_the_gradients_singular_directions():
    def follow(p, gradient, memory, step):
        if p.ndim < 2 or min(p.shape) <= 8:
            p.mul_(1 - 1e-2 * (0.1 if p.ndim > 1 else 0)).sub_(1e-2 * adam(memory, gradient, step))
            return
        if step in (1, 3):  # every three steps, and at first
            memory["basis"] = torch.linalg.svd(gradient.float(), full_matrices=False)[0][:, :8].double()
        basis = memory["basis"]
        p.sub_(1e-2 * 0.25 * basis @ adam(memory, basis.T @ gradient, step)).mul_(1 - 1e-2 * 0.1)

    settings = {"learning_rate": 1e-2, "weight_decay": 0.1, "rank": 8, "update_interval": 3}
    params, expected = five_steps("galore_adamw", follow, **settings)
    for p, e in zip(params, expected, strict=True):
        assert (p - e).abs().max() <= 1e-5


def test_schedule_free_averages_its_weights():
    """Defazio et al. 2024, algorithm 1: y = (1 - b) z + b x, x the average of all z."""
    params = parameters()
    chosen = option("optim", "adamw_schedule_free", learning_rate=1e-2, weight_decay=0.0)
    optimizer = chosen.build(params)
    z, x = ([p.detach().clone().double() for p in params] for _ in range(2))
    second = [torch.zeros_like(e) for e in z]
    for step in range(1, 6):
        give_gradients(params, step)
        for p, newest, average, v in zip(params, z, x, second, strict=True):
            v.mul_(0.999).add_(0.001 * p.grad.double() ** 2)
            newest.sub_(1e-2 * p.grad.double() / ((v / (1 - 0.999**step)).sqrt() + 1e-8))
            average.lerp_(newest, 1 / step)
        optimizer.step()
    trained = [p.detach().clone() for p in params]
    for p, newest, average in zip(params, z, x, strict=True):
        assert torch.allclose(p.double(), 0.1 * newest + 0.9 * average, atol=1e-5)
    with chosen.evaluating(optimizer):
        for p, average in zip(params, x, strict=True):
            assert torch.allclose(p.double(), average, atol=1e-5)
    assert all(torch.equal(p, before) for p, before in zip(params, trained, strict=True))
    give_gradients(params, 6)
    optimizer.step()  # it is in training mode again


def test_muon_leaves_embeddings_and_the_head_to_adamw():
    model = llama()
    mark_tables(model)
    named = dict(model.named_parameters())
    optimizer = build("muon", list(named.values()))
    muon, adamw = optimizer.optimizers
    theirs = {id(p) for group in muon.param_groups for p in group["params"]}
    assert {name for name, p in named.items() if id(p) in theirs} == {n for n in named if "_proj" in n}
    assert sum(len(group["params"]) for group in adamw.param_groups) == len(named) - len(theirs)


@pytest.mark.parametrize(
    ("name", "shape", "state"),
    [
        ("adamw", (4096, 4096), 8 * 4096**2),
        ("adafactor", (4096, 4096), 4 * 2 * 4096),  # 2,048 times less than one moment in fp32
        ("muon", (1024, 4096), 4 * 1024 * 4096),
        ("lion_8bit", (1024, 4096), 1024 * 4096 * (1 + 4 / 256)),
        ("adamw_8bit", (1024, 4096), 2 * 1024 * 4096 * (1 + 4 / 256)),
        ("adamw_schedule_free", (1024, 4096), 8 * 1024 * 4096),
        ("galore_adamw", (1024, 4096), 4 * 128 * (1024 + 2 * 4096)),
        ("galore_adamw_8bit", (1024, 4096), 128 * (4 * 1024 + 2 * 4096 * (1 + 4 / 256))),
    ],
)
def test_state_is_as_planned(name, shape, state):
    """Bytes of state that a real step makes, those of the plan, and the formula."""
    chosen = option("optim", name)
    small = replace(chosen, rank=16) if hasattr(chosen, "rank") else chosen
    parameter = torch.nn.Parameter(torch.ones(64, 256))
    parameter.grad = torch.randn(64, 256)
    optimizer = small.build([parameter])
    optimizer.step()
    tensors = [v for v in flat(optimizer.state[parameter]).values() if isinstance(v, torch.Tensor)]
    planned = small.memory([torch.nn.Parameter(torch.empty(64, 256, device="meta"))], "cpu").state
    assert planned == sum(t.nbytes for t in tensors if t.ndim)
    assert chosen.memory([torch.nn.Parameter(torch.empty(shape, device="meta"))], "cpu").state == state


def test_parameters_of_another_rate_are_groups_of_their_own():
    params = parameters()
    set_rate_ratio(params[1], 16.0)
    optimizer = build("adamw", params, weight_decay=0.5)
    found = {(len(g["params"]), g["weight_decay"], g["rate_ratio"]) for g in optimizer.param_groups}
    assert found == {(1, 0.5, 1.0), (1, 0.0, 1.0), (1, 0.5, 16.0)}


def test_embeddings_learn_at_their_own_rate_and_what_decays_is_asked_for():
    model = llama("sdpa")
    mark_tables(model)
    parameters = dict(model.named_parameters())
    adamw = option("optim", "adamw", weight_decay=0.1, learning_rate=1e-3)

    def decayed(kind):
        train = compose([f"train.weight_decay_on={kind}", "train.embedding_learning_rate=2e-4"]).config.train
        train.group(parameters.values(), 1e-3)
        groups = adamw.groups(list(parameters.values()))
        names = {id(p): name for name, p in parameters.items()}
        assert {names[id(p)] for g in groups if g[RATE_RATIO] == 0.2 for p in g["params"]} == tables
        return {names[id(p)] for group in groups if group["weight_decay"] for p in group["params"]}

    tables = {"model.embed_tokens.weight", "lm_head.weight"}
    matrices = {name for name, p in parameters.items() if p.ndim == 2}
    assert decayed("matrices") == matrices
    assert decayed("hidden") == matrices - tables
    assert decayed("all") == set(parameters)
    with pytest.raises(ModelError, match="neither embeddings nor head train here"):
        own_rate = compose(["train.embedding_learning_rate=2e-4"]).config.train
        own_rate.group([torch.nn.Parameter(torch.ones(2, 2))], 1e-3)


@pytest.mark.parametrize(("shapes", "close"), [(((48, 32), (32, 48)), 1e-5), (((256, 600), (600, 256)), 0.1)])
def test_galore_in_eight_bits_is_galore(shapes, close):
    """Small matrices have state in 32 bits, and their steps are those of the library's GaLore; large ones are near."""
    settings = {"learning_rate": 1e-2, "weight_decay": 0.1, "rank": 16, "update_interval": 3}
    ends = []
    for name in ("galore_adamw", "galore_adamw_8bit"):
        torch.manual_seed(0)
        params = [torch.nn.Parameter(torch.randn(shape) / 10) for shape in shapes]
        before = [p.detach().clone() for p in params]
        optimizer = build(name, params, **settings)
        for step in range(5):
            give_gradients(params, step)
            optimizer.step()
        ends.append([p.detach() - b for p, b in zip(params, before, strict=True)])
    for one, other in zip(*ends, strict=True):
        assert (one - other).norm() <= close * one.norm()
    kinds = {value.dtype for value in flat(optimizer.state[params[0]]).values() if isinstance(value, torch.Tensor)}
    assert (torch.uint8 in kinds) == (close == 0.1)
