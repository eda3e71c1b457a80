"""The closed form against the bytes of real, quantised, adapted models with real optimizer state."""

from __future__ import annotations

import pytest
import torch

from tests.bench._memory_cases import BASE
from trainer.config.compose import compose
from trainer.memory.predict.planner import Planner
from trainer.model import attention
from trainer.model.loading.base import load_base
from trainer.model.new_tokens import grow, planned_ids
from trainer.training.optimizer_memory import measured


def _bytes(tensors) -> int:
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["quant=fp4", "quant.double_quant=false"],
        ["quant=int8"],
        ["quant=none", "precision=bf16"],
        ["model.architecture.tie_word_embeddings=false"],
        ["quant=none", "adapter=none"],
        ["model.new_tokens=[aa,bb,cc]", "model.architecture.tie_word_embeddings=false"],
    ],
    ids=["nf4", "fp4", "int8", "bf16", "untied", "all parameters", "new tokens"],
)
def test_weights_and_adapter_are_those_of_a_real_model(words):
    config = compose([*BASE, *words]).config
    planner = Planner(config)
    base = load_base(
        config.model, planner.model_config, config.quant, planner.dtypes, torch.device("cpu"), attention.PACKED
    )
    new_ids = planned_ids(base, config.model.new_tokens)
    grow(base, new_ids)
    adapted = config.adapter.attach(base, new_ids)
    tensors = [*adapted.parameters(), *adapted.buffers()]
    for parameter in adapted.parameters():
        state = getattr(parameter, "quant_state", None)
        if state is not None:
            tensors += [state.absmax, state.code]
            tensors += [state.offset, state.state2.absmax] if state.nested else []
        scale = getattr(parameter, "SCB", None)
        tensors += [scale] if scale is not None else []
    static = planner.static
    assert static.total - static.gradients - static.optimizer == pytest.approx(_bytes(tensors), rel=0.001)
    assert planner.static.trainable == sum(p.numel() for p in adapted.parameters() if p.requires_grad)


@pytest.mark.parametrize("name", ["adamw", "adamw_8bit", "paged_adamw_8bit", "paged_adamw_32bit"])
def test_optimizer_state_is_that_of_a_real_step(name):
    optim = compose([*BASE, f"optim={name}"]).config.optim
    shapes = [(128, 64), (128, 64), (16, 16), (300,)]
    parameters = [torch.nn.Parameter(torch.randn(shape)) for shape in shapes]
    planned = measured(optim.build, [torch.nn.Parameter(p.detach().to("meta")) for p in parameters], "cpu")
    optimizer = optim.build(parameters)
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    real = [
        value
        for state in optimizer.state.values()
        for key, value in state.items()
        if isinstance(value, torch.Tensor) and not key.startswith("qmap") and value.ndim
    ]
    assert planned.state == _bytes(real)


def test_8_bit_state_is_2_03_bytes_a_parameter():
    optim = compose([*BASE, "optim=adamw_8bit"]).config.optim
    planned = measured(optim.build, [torch.nn.Parameter(torch.empty(4096, 1024, device="meta"))], "cuda")
    assert planned.state / (4096 * 1024) == pytest.approx(2.03, abs=0.005)
    assert planned.workspace == 0


def test_adamw_on_cuda_works_on_all_parameters_at_once():
    optim = compose([*BASE, "optim=adamw"]).config.optim
    parameters = [torch.nn.Parameter(torch.empty(64, 64, device="meta")) for _ in range(10)]
    together = measured(optim.build, parameters, "cuda").workspace
    one_by_one = measured(optim.build, parameters, "cpu").workspace
    assert together >= 10 * 64 * 64 * 4 > one_by_one
