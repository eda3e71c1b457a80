"""Every path that differs on a card against its slow, obvious twin.

A tolerance is measured, not chosen: how far the twin itself is from the truth (the same in fp32), or how far two runs
of the twin are apart, since flash attention's backward adds with atomics.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from tests.factories import llama, option, options, random_tokens
from tests.gpu.prove import Setting, attempt
from trainer.config.compose import compose
from trainer.data.batches.batch import collate
from trainer.errors import ConfigError
from trainer.model import attention
from trainer.training.deterministic import deterministic_kernels

Gradients = dict[str, torch.Tensor]
SHAPE = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2}


def results(setting: Setting) -> Iterator[dict[str, Any]]:
    device = setting.device
    lengths = [130, 70, 56] if setting.dry else [1500, 400, 148]
    for size in (64, 128, 256):
        for window in (None, 32):
            what = {"path": "varlen kernel", "head_size": size, "window": window}
            yield attempt(what, lambda size=size, window=window: _attention(device, lengths, size, window))
    yield attempt({"path": "varlen kernel", "what": "sees no later token"}, lambda: _no_leak(device))
    for name in ("nf4", "fp4", "int8"):
        yield attempt({"path": f"quant={name}"}, lambda name=name: _quantised(device, name))
    for name in options("optim"):
        yield attempt({"path": f"optim={name}"}, lambda name=name: _optimizer(device, name))
    yield from _paths(device, lengths)
    yield from _policies(device, lengths)
    yield attempt({"path": "train.deterministic"}, lambda: _deterministic(device, lengths))


def distance(left: Gradients, right: Gradients) -> float:
    """Largest relative difference of any tensor; of zeros, as adapters' A has before the first step, the absolute."""
    return max(((left[key].float() - g.float()).norm() / (g.float().norm() or 1)).item() for key, g in right.items())


def _against(fast: Gradients, slow: Gradients, truth: Gradients) -> dict[str, Any]:
    """Equal where the fast path is about as near to the truth as the slow one."""
    error, allowed = distance(fast, truth), 1.5 * distance(slow, truth)
    return {"error": error, "allowed": allowed, "equal": error <= allowed}


def _attention(device: torch.device, lengths: list[int], size: int, window: int | None) -> dict[str, Any]:
    """Output and gradients in bf16, grouped heads, beside one call a sample in bf16 and in fp32."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, heads, sum(lengths), size) for heads in (8, 2, 2)]
    inputs = [torch.randn(shape, generator=generator).to(torch.bfloat16) for shape in shapes]
    grad = torch.randn(1, sum(lengths), 8, size, generator=generator).to(torch.bfloat16)
    boundaries = torch.tensor(np.cumsum([0, *lengths]), dtype=torch.int32, device=device)

    def run(function: Callable, dtype: torch.dtype) -> Gradients:
        leaves = [x.to(device, dtype, copy=True).requires_grad_() for x in inputs]
        out = function(*leaves)
        out.backward(grad.to(device, dtype))
        return dict(zip(["out", "query", "key", "value"], [out.detach(), *(x.grad for x in leaves)], strict=True))

    def packed(q, k, v):
        return attention.packed_attention(
            None, q, k, v, None, None, 0.0, window, cu_seq_lens_q=boundaries, max_length_q=max(lengths)
        )[0]

    def a_sample_a_call(q, k, v):
        return attention._per_sample(q, k, v, None, 0.0, window, boundaries)

    truth = run(a_sample_a_call, torch.float32)
    return _against(run(packed, torch.bfloat16), run(a_sample_a_call, torch.bfloat16), truth)


def _no_leak(device: torch.device) -> dict[str, Any]:
    """Changing a token changes no output before it, nor any of another sample."""
    boundaries = torch.tensor([0, 40, 64], dtype=torch.int32, device=device)

    def run(changed: int | None) -> torch.Tensor:
        generator = torch.Generator().manual_seed(0)
        q, k, v = (torch.randn(1, heads, 64, 64, generator=generator) for heads in (4, 2, 2))
        if changed is not None:
            k[:, :, changed] += 1
        q, k, v = (x.to(device, torch.bfloat16) for x in (q, k, v))
        return attention.packed_attention(None, q, k, v, None, cu_seq_lens_q=boundaries, max_length_q=40)[0]

    differs = (run(20) != run(None)).flatten(2).any(-1)[0].nonzero().flatten().tolist()
    return {"changed": [min(differs), max(differs)], "equal": min(differs) >= 20 and max(differs) < 40}


def _quantised(device: torch.device, name: str) -> dict[str, Any]:
    """A layer of the same weights on the device and on the CPU: its output in bf16, beside the unquantised one."""
    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(1))

    def run(where: torch.device) -> torch.Tensor:
        torch.manual_seed(0)
        plain = torch.nn.Linear(256, 512, bias=False).to(torch.bfloat16)
        layer = option("quant", name).linear(plain, torch.bfloat16, where)
        return layer(x.to(where, torch.bfloat16)).float().cpu()

    here, there = run(device), run(torch.device("cpu"))
    difference = ((here - there).norm() / there.norm()).item()
    return {"difference": difference, "allowed": 2**-7, "equal": difference <= 2**-7}  # two roundings to bf16


def _optimizer(device: torch.device, name: str) -> dict[str, Any]:
    """Five steps from the same weights and gradients, on the device and on the CPU."""

    def run(where: torch.device) -> Gradients:
        generator = torch.Generator().manual_seed(0)
        start = {"matrix": torch.randn(64, 256, generator=generator), "vector": torch.randn(8192, generator=generator)}
        weights = {key: torch.nn.Parameter(value.to(where, copy=True)) for key, value in start.items()}
        optimizer = option("optim", name, learning_rate=1e-2).build(list(weights.values()))
        for _ in range(5):
            for weight in weights.values():
                weight.grad = torch.randn(weight.shape, generator=generator).to(where)
            optimizer.step()
        return {key: weight.detach().cpu() - start[key] for key, weight in weights.items()}

    difference = distance(run(device), run(torch.device("cpu")))
    allowed = 0.05 if "8bit" in name else 1e-4  # an 8-bit code may fall on the neighbour
    return {"difference": difference, "allowed": allowed, "equal": difference <= allowed}


class Twin:
    """A small quantised Llama with an adapter, whose gradients are asked for under many settings."""

    def __init__(self, device: torch.device, lengths: list[int]):
        self.device = device
        self.batch = collate(random_tokens(lengths), np.arange(len(lengths)), packed=True).to(device)

    def gradients(
        self, name: str, fused: bool, loss: str, dtype: torch.dtype, more: tuple[str, ...] = (), dropout: float = 0.0
    ) -> Gradients:
        config = compose(
            ["data.path=x", "adapter.r=8", f"loss={loss}", "quant=nf4", f"adapter.fused={fused}",
             f"adapter.dropout={dropout}", *more]
        ).config  # fmt: skip
        model = llama(name, num_hidden_layers=4, **SHAPE)
        model.to(torch.bfloat16).to(dtype)  # the same weights in both dtypes, so that they get the same codes
        layers = model.get_decoder().layers
        for path, module in list(layers.named_modules()):
            if isinstance(module, torch.nn.Linear):
                parent, _, child = path.rpartition(".")
                linear = config.quant.linear(module, dtype, self.device)
                linear.support_avx512bf16_for_cpu = False
                setattr(layers.get_submodule(parent), child, linear)
        model.to(self.device)
        torch.manual_seed(0)
        adapted = config.adapter.attach(model).train()
        for key, parameter in adapted.named_parameters():
            if "lora_B" in key:
                torch.nn.init.normal_(parameter, std=0.1)
        config.checkpointing.apply(model)
        config.kernels.install(model)
        autocast = torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=dtype is torch.bfloat16)
        torch.manual_seed(1)
        with autocast:
            loss_mean = config.loss.sum(model, self.batch) / self.batch.num_targets
        loss_mean.backward()
        return {key: p.grad for key, p in adapted.named_parameters() if p.grad is not None}


def _paths(device: torch.device, lengths: list[int]) -> Iterator[dict[str, Any]]:
    """Fused functions, packed attention, losses and kernels in bf16, each beside the slow path in bf16 and fp32."""
    twin, bf16 = Twin(device, lengths), torch.bfloat16
    truth = twin.gradients("sdpa", False, "full", torch.float32)
    slow = twin.gradients("sdpa", False, "full", bf16)
    paths = {
        "fused": ("sdpa", True, "full", bf16),
        "packed attention": (attention.PACKED, False, "full", bf16),
        "chunked loss": ("sdpa", False, "chunked", bf16),
        "all": (attention.PACKED, True, "chunked", bf16),
    }
    for loss in ("liger", "cut_cross_entropy"):
        paths[f"loss={loss}"] = ("sdpa", False, loss, bf16)
    for kernels in ("compiled", "liger"):
        paths[f"kernels={kernels}"] = (attention.PACKED, False, "full", bf16, (f"kernels={kernels}",))
    for path, choice in paths.items():
        reason = _refused(choice, device)
        if reason is None:
            yield attempt({"path": path}, lambda choice=choice: _against(twin.gradients(*choice), slow, truth))
        else:
            yield {"path": path, "left_out": reason}


def _refused(choice: tuple, device: torch.device) -> str | None:
    """Why this machine has no such path."""
    config = compose(["data.path=x", f"loss={choice[2]}", "adapter.fused=false", *(choice[4] if choice[4:] else ())])
    with contextlib.suppress(ConfigError):
        config.config.loss.check(device)
        config.config.kernels.check(device)
        return None
    return "not installed, or not for this device"


def _policies(device: torch.device, lengths: list[int]) -> Iterator[dict[str, Any]]:
    """Every checkpointing policy with dropout beside keeping everything, as far as two such runs are apart."""
    twin = Twin(device, lengths)

    def run(policy: str) -> Gradients:
        more = (f"checkpointing={policy}",)
        return twin.gradients(attention.PACKED, True, "chunked", torch.bfloat16, more, dropout=0.1)

    kept = run("none")
    allowed = 2 * distance(run("none"), kept)

    def beside(policy: str) -> dict[str, Any]:
        difference = distance(run(policy), kept)
        return {"difference": difference, "allowed": allowed, "equal": difference <= allowed}

    for policy in options("checkpointing"):
        if policy not in ("auto", "none"):
            yield attempt({"path": f"checkpointing={policy}"}, lambda policy=policy: beside(policy))


def _deterministic(device: torch.device, lengths: list[int]) -> dict[str, Any]:
    """Two runs bit for bit the same."""
    twin = Twin(device, lengths)
    with deterministic_kernels(True):
        first, second = (twin.gradients(attention.PACKED, True, "chunked", torch.bfloat16) for _ in range(2))
    return {"equal": all(torch.equal(first[key], second[key]) for key in second)}
