"""The start-up probe lets isolated packing pass and refuses what contaminates."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from tests.factories import FP32, LLAMA, VOCABULARY, llama, option
from tests.support import train_here
from trainer.certificate.probe import check_packing
from trainer.errors import ModelError
from trainer.model import attention
from trainer.model.attention import PACKED
from trainer.model.loading.base import load_base, load_config
from trainer.model.model_settings import Weights
from trainer.model.precision import Dtypes
from trainer.run import build
from trainer.training.losses import Chunked, Full


def contaminating(module, query, key, value, attention_mask, scaling=None, **_):
    """Causal over the whole row, whatever sample a token belongs to."""
    out = scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=True)
    return out.transpose(1, 2), None


@pytest.fixture
def contaminated(monkeypatch):
    AttentionInterface.register("contaminating", contaminating)
    AttentionMaskInterface.register("contaminating", lambda *_, **__: None)
    return "contaminating"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("loss", [Full(), Chunked(4)], ids=["full", "chunked"])
@pytest.mark.parametrize("path", [PACKED, "sdpa", "eager"])
def test_isolated_packing_passes_and_leaves_the_model_as_it_was(path, loss, dtype):
    model = llama(path).to(dtype).train()
    check_packing(model, loss, Dtypes(dtype, "cpu"), VOCABULARY)
    assert model.training and model.config._attn_implementation == path
    assert all(p.grad is None for p in model.parameters())


def test_attention_across_samples_is_refused(contaminated):
    with pytest.raises(ModelError, match="packed samples would see each other") as error:
        check_packing(llama(contaminated), Full(), FP32, VOCABULARY)
    assert "packing=none" in str(error.value)


def test_a_run_on_such_an_attention_refuses_to_start(contaminated, base_overrides, tmp_path, monkeypatch):
    monkeypatch.setattr(attention, "choose", lambda *_: (contaminated, "a test"))
    with pytest.raises(ModelError, match="packing check") as error:
        train_here(base_overrides, tmp_path / "run")
    assert error.value.exit_code == 4 and build.attention is attention
    assert not (tmp_path / "run" / "adapter").exists()


def test_a_loss_path_that_leaves_out_what_the_model_does_is_refused():
    """A model that caps its logits: the chunked loss applies the bare head."""

    class Capped(Full):
        def sum(self, model, batch):
            return 1.1 * super().sum(model, batch)

    for implementation, packed in ((PACKED, True), ("sdpa", False)):
        with pytest.raises(ModelError, match="loss path differs"):
            check_packing(llama(implementation), Capped(), FP32, VOCABULARY, packed)
    check_packing(llama("sdpa"), Full(), FP32, VOCABULARY, packed=False)


def test_an_adapter_with_dropout_does_not_disturb_the_probe():
    base = llama(PACKED)
    option("adapter", "lora", dropout=0.9).attach(base)
    torch.nn.init.normal_(base.model.layers[0].self_attn.q_proj.lora_B["default"].weight)
    check_packing(base.train(), Full(), FP32, VOCABULARY)


def test_a_gradient_that_differs_is_refused_where_the_loss_does_not():
    """The right value with a slope of its own: half of the gradient is lost, which is as much as is left."""

    class Detached(Full):
        def sum(self, model, batch):
            total = super().sum(model, batch)
            return 0.5 * total + 0.5 * total.detach()

    with pytest.raises(ModelError, match=r"gradients differ by 100\.00%.*the loss path differs"):
        check_packing(llama(PACKED), Detached(), FP32, VOCABULARY)


def test_an_int8_base_is_judged_by_its_own_rounding(contaminated):
    """Which columns of a row are outliers depends on the rows beside it: that is no contamination."""
    fields = {"model_type": "llama", **LLAMA, "num_hidden_layers": 4, "hidden_size": 512, "intermediate_size": 1024}
    random = option("model", "tiny", path=None, weights=Weights.random, architecture=fields)
    int8 = option("quant", "int8")

    def check(path, rounding):
        torch.manual_seed(2)
        base = load_base(random, load_config(random), int8, FP32, torch.device("cpu"), path)
        option("adapter", "lora").attach(base)
        check_packing(base, Chunked(4), FP32, VOCABULARY, rounding=rounding)

    check(PACKED, int8.rounding)
    with pytest.raises(ModelError, match="packing check"):
        check(PACKED, 0.0)
    with pytest.raises(ModelError, match="packed samples would see each other"):
        check(contaminated, int8.rounding)
