"""kernels=...: compiled blocks against eager ones, what they keep under each policy, and what is refused early."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from functools import partial
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from tests.factories import FP32, gradients, largest_difference, llama, option, packed_batch, random_tokens
from trainer.device.measure import Memory
from trainer.errors import ConfigError, ModelError
from trainer.model import kernels
from trainer.model.attention import PACKED
from trainer.model.checkpointing import FullCheckpointing, NoCheckpointing, PerBlock, Selective

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
ROWS = [[30, 20], [17, 9, 8], [64], [5, 6, 7, 8, 9]]
CHUNKED = option("loss", "chunked")


def compiled(backend: str = "aot_eager") -> kernels.Compiled:
    return option("kernels", "compiled", backend=kernels.Backend(backend))


def losses_and_gradients(model, rows):
    """Of each row of samples in turn."""
    found = []
    for lengths in rows:
        model.zero_grad()
        total = CHUNKED.sum(model, packed_batch(random_tokens(lengths)))
        total.backward()
        found.append((total.item(), gradients(model)))
    return found


def assert_equal_to_eager(model, policy, backend):
    policy.apply(model)
    eager = losses_and_gradients(model, ROWS)
    own = compiled(backend)
    own.install(model)
    before = own.graphs()
    first = losses_and_gradients(model, ROWS[:1])
    graphs = own.graphs()
    found = first + losses_and_gradients(model, ROWS[1:])
    assert graphs > before, "nothing was compiled"
    assert own.graphs() == graphs, "rows of other lengths and numbers of samples compiled the blocks again"
    for (loss, grads), (expected, expected_grads) in zip(found, eager, strict=True):
        assert loss == pytest.approx(expected, rel=1e-6)
        scale = max(g.abs().max().item() for g in expected_grads.values())
        assert largest_difference(grads, expected_grads) <= 1e-5 * max(1.0, scale)


@pytest.mark.parametrize("policy", [NoCheckpointing(), FullCheckpointing()], ids=["none", "full"])
def test_compiled_blocks_compute_what_eager_ones_do(policy):
    torch._dynamo.reset()
    model = llama(PACKED).train()
    assert_equal_to_eager(model, policy, "aot_eager")


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["none", "full", "sqrt"])
def test_compiled_blocks_over_nf4_with_lora(policy):
    """With generated C++, PEFT's modules on quantised weights, and more blocks than may be compiled one by one."""
    torch._dynamo.reset()
    model = llama(PACKED, num_hidden_layers=9)
    for path, module in list(model.model.layers.named_modules()):
        if isinstance(module, torch.nn.Linear):
            parent, _, child = path.rpartition(".")
            linear = option("quant", "nf4").linear(module, torch.float32, CPU)
            linear.support_avx512bf16_for_cpu = False
            setattr(model.model.layers.get_submodule(parent), child, linear)
    option("adapter", "lora", fused=False).attach(model)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    assert_equal_to_eager(model.train(), option("checkpointing", policy), "inductor")


def test_compiled_blocks_keep_what_their_policy_keeps():
    """Full keeps block inputs only, in compiled code too; without a policy far more is kept, and neither is refused."""
    torch._dynamo.reset()
    batch = packed_batch(random_tokens([256, 256]))
    kept = {}
    with Memory(CPU) as memory:
        for name, policy in (("none", NoCheckpointing()), ("full", FullCheckpointing())):
            model = llama(PACKED, num_hidden_layers=4).train()
            policy.apply(model)
            own = compiled()
            own.install(model)
            own.verify(model, CHUNKED.sum, FP32, batch, memory)
            kept[name] = kernels._kept_bytes(model, CHUNKED.sum, FP32, batch, memory)
    assert kept["full"] < 0.35 * kept["none"]


def test_a_policy_lost_in_compiled_code_is_an_error(monkeypatch):
    """A checkpoint that is taken in eager mode only, as a compiler that drops it would have it."""
    forced = []

    @contextmanager
    def stance(name):
        forced.append(name)
        yield
        forced.pop()

    def losing(function, *args):
        return checkpoint(function, *args, use_reentrant=False) if forced else function(*args)

    monkeypatch.setattr(torch.compiler, "set_stance", stance)
    model = llama(PACKED, num_hidden_layers=4).train()
    for block in model.model.layers:
        block.gradient_checkpointing, block._gradient_checkpointing_func = True, losing
    with Memory(CPU) as memory, pytest.raises(ModelError, match="the policy is lost in compiled code"):
        compiled().verify(model, CHUNKED.sum, FP32, packed_batch(random_tokens([256, 256])), memory)
    assert all(p.grad is None for p in model.parameters()), "what was tried leaves nothing behind"


def test_a_machine_without_a_compiler_is_told_early(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(ConfigError, match=r"kernels=compiled: .* C\+\+ compiler .*kernels=torch"):
        compiled("inductor").check(CPU)
    compiled("aot_eager").check(CPU)
    compiler = tmp_path / "clang++"
    compiler.write_text("#!/bin/sh\n")
    compiler.chmod(0o755)
    compiled("inductor").check(CPU)
    monkeypatch.setenv("CXX", "/none/such")
    with pytest.raises(ConfigError, match="CXX does not name one"):
        compiled("inductor").check(CPU)


def test_a_gpu_without_triton_is_told_early(monkeypatch):
    monkeypatch.setattr(kernels.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="inductor needs the package triton"):
        compiled("inductor").check(CUDA)


def test_policies_that_cut_through_a_block_are_refused():
    config = llama().config
    mixed = PerBlock([FullCheckpointing(), Selective(keep="attention")])
    with pytest.raises(ConfigError, match="auto where it picks selective"):
        compiled().check_model(config, mixed)
    compiled().check_model(config, PerBlock([FullCheckpointing(), NoCheckpointing()]))


def test_liger_is_refused_where_it_cannot_run(monkeypatch):
    liger = option("kernels", "liger")
    with pytest.raises(ConfigError, match="kernels=liger: its kernels need a GPU"):
        liger.check(CPU)
    monkeypatch.setattr(kernels.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="liger-kernel is not installed"):
        liger.check(CUDA)


@pytest.fixture
def liger_stub(monkeypatch):
    """Stands in for the package: what it knows, and what it was asked to do."""
    asked = []
    package, transformers, patch = (
        ModuleType("liger_kernel"),
        ModuleType("liger_kernel.transformers"),
        ModuleType("liger_kernel.transformers.monkey_patch"),
    )
    patch.MODEL_TYPE_TO_APPLY_LIGER_FN = {"llama": None}
    transformers._apply_liger_kernel_to_instance = lambda model, **chosen: asked.append((model, chosen))
    for module in (package, transformers, patch):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    from transformers.integrations import liger

    monkeypatch.setattr(liger, "is_liger_kernel_available", lambda: True)
    return asked


def test_liger_through_its_public_interface(liger_stub):
    """Norm, rotary and SwiGLU; the loss stays the group loss's, and a model that it does not know is refused."""
    own, model = option("kernels", "liger"), llama()
    own.check_model(model.config, FullCheckpointing())
    own.install(model)
    ((patched, chosen),) = liger_stub
    assert patched is model
    assert chosen == {
        "rope": True, "rms_norm": True, "swiglu": True, "cross_entropy": False, "fused_linear_cross_entropy": False
    }  # fmt: skip
    with pytest.raises(ModelError, match="nothing for model type mamba"):
        own.check_model(SimpleNamespace(model_type="mamba"), FullCheckpointing())


def test_torchs_kernels_change_nothing():
    own, model = option("kernels", "torch"), llama()
    forwards = {name: module.__dict__.get("forward") for name, module in model.named_modules()}
    own.check(CPU)
    own.install(model)
    assert {name: module.__dict__.get("forward") for name, module in model.named_modules()} == forwards
    assert own.graphs() is None and own.describe() == ""


def test_run_by_the_policy_with_the_blocks_own_arguments():
    """transformers binds the forward's arguments; the compiled forward gets the same ones, through the policy."""
    seen = []

    def policy(function, *args):
        seen.append(args)
        return function(*args)

    call = partial(lambda *args, **kwargs: "eager", "block", mask=1)
    assert kernels._run_compiled(policy, lambda *args, **kwargs: (args, kwargs), call, "hidden") == (
        ("block", "hidden"), {"mask": 1}
    )  # fmt: skip
    assert seen == [("hidden",)]
