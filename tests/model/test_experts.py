"""Mixtures of experts in 4 bits, beside plain transformers with the dequantised weights."""

from __future__ import annotations

import shutil

import peft
import pytest
import torch
from peft.utils.integrations import dequantize_module_weight
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from tests.factories import FP32, gradients, largest_difference, option, packed_batch, random_tokens
from tests.support import train_here
from trainer.config.compose import compose
from trainer.errors import ModelError
from trainer.memory.predict.planner import Planner
from trainer.memory.predict.profile import Shape
from trainer.model.experts import Stack4bit, stacks
from trainer.model.live_storages import LiveStorages
from trainer.model.loading import base as load
from trainer.model.loading.architecture import skeleton, written_config
from trainer.model.loading.assemble import assemble, at_random
from trainer.model.mixtures import decoder_experts, routers
from trainer.run.prepare import check_shape

CPU = torch.device("cpu")
SMALL = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.1,
}
KINDS = {
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16},
    "gpt_oss": {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "head_dim": 16,
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 8,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
}
EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]


def config_of(kind: str, **changes):
    return AutoConfig.for_model(kind, **{**SMALL, **KINDS[kind], **changes})


def quantised(kind: str, attention: str = "eager", **changes):
    torch.manual_seed(0)
    quant = option("quant", "nf4", **changes)
    return assemble(config_of(kind), quant, FP32, CPU, attention, at_random)


def plain_twin(base):
    """transformers' own model with the values that the 4-bit weights stand for."""
    twin = AutoModelForCausalLM.from_config(base.config, attn_implementation="eager", dtype=torch.float32).eval()
    values = {name: p for name, p in base.named_parameters() if name in twin.state_dict()}
    for name, module in base.named_modules():
        if isinstance(module, Stack4bit):
            values[name] = torch.stack([module.matrix(index) for index in range(module.shape[0])])
        elif hasattr(module, "quant_state"):
            values[f"{name}.weight"] = dequantize_module_weight(module)
    twin.load_state_dict(values, strict=True)
    return twin


def adapted(model, seed: int = 1, **settings):
    """With LoRA whose weights are not zero, the same for the same names."""
    model = option("adapter", "lora", r=4, fused=False, **settings).attach(model)
    generator = torch.Generator().manual_seed(seed)
    for _, parameter in sorted((n, p) for n, p in model.named_parameters() if p.requires_grad):
        parameter.data.normal_(0, 0.1, generator=generator)
    return model


def loss_and_gradients(model, seed: int = 2):
    ids = torch.randint(5, 300, (2, 24), generator=torch.Generator().manual_seed(seed))
    model.zero_grad(set_to_none=True)
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    return loss.item(), gradients(model)


@pytest.mark.parametrize("targets", [[], EXPERTS], ids=["attention", "experts"])
@pytest.mark.parametrize("kind", KINDS)
def test_loss_and_gradients_are_those_of_the_dequantised_weights(kind, targets):
    base = quantised(kind)
    twin = plain_twin(base)
    loss, found = loss_and_gradients(adapted(base, target_parameters=targets))
    expected_loss, expected = loss_and_gradients(adapted(twin, target_parameters=targets))
    assert abs(loss - expected_loss) <= 1e-5 * expected_loss
    assert largest_difference(found, expected) <= 1e-5 * max(g.abs().max() for g in expected.values())
    assert any("experts" in name for name in found) == bool(targets)
    assert all(g.abs().max() > 0 for g in found.values())


@pytest.mark.parametrize("double_quant", [True, False])
def test_an_expert_is_quantised_as_a_linear_layer_of_its_own(double_quant):
    values = torch.randn(3, 40, 64)
    stack = Stack4bit(values.shape, "nf4", double_quant, torch.float32, CPU)
    quant = option("quant", "nf4", double_quant=double_quant)
    for index, matrix in enumerate(values):
        stack.put(index, matrix)
        linear = torch.nn.Linear(64, 40, bias=False)
        linear.weight = torch.nn.Parameter(matrix.clone(), requires_grad=False)
        linear = quant.linear(linear, torch.float32, CPU)
        assert torch.equal(linear.weight.view(-1), stack.weight[index])
        assert torch.equal(dequantize_module_weight(linear), stack.matrix(index))


def saved(kind: str, folder, **changes):
    """A folder as the hub's, which for most mixtures holds each expert by itself."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config_of(kind, **changes), dtype=torch.float32)
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_is_loaded_quantised_as_made_in_memory(kind, tmp_path):
    model = saved(kind, tmp_path)
    run = compose([f"model.path={tmp_path}", "quant=nf4", "precision=fp32", "adapter=lora"]).config
    config = load.load_config(run.model)
    base = load.load_base(run.model, config, run.quant, FP32, CPU, "eager")
    assert len(stacks(base)) == 4
    for name, stack in stacks(base).items():
        own = Stack4bit(stack.shape, "nf4", True, torch.float32, CPU)
        for index, matrix in enumerate(model.get_parameter(name).detach()):
            own.put(index, matrix)
        assert torch.equal(own.weight, stack.weight)
    ids = torch.arange(10, 40)[None]
    with torch.no_grad():
        expected = plain_twin(base)(input_ids=ids, use_cache=False).logits
        assert (base(input_ids=ids, use_cache=False).logits - expected).abs().max() <= 1e-5


@pytest.mark.parametrize("kind", KINDS)
def test_a_saved_adapter_reloads_through_plain_peft(kind, tmp_path):
    base = quantised(kind)
    twin = plain_twin(base)
    ours = adapted(base, target_parameters=EXPERTS).eval()
    ours.save_pretrained(tmp_path)
    loaded = peft.PeftModel.from_pretrained(twin, tmp_path).eval()
    ids = torch.arange(10, 40)[None]
    with torch.no_grad():
        before = twin.eval()(input_ids=ids, use_cache=False).logits
        found, expected = (m(input_ids=ids, use_cache=False).logits for m in (ours, loaded))
        with ours.disable_adapter(), loaded.disable_adapter():
            plain = [m(input_ids=ids, use_cache=False).logits for m in (ours, loaded)]
    assert torch.allclose(before, expected)  # PEFT changes the model in place
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()
    assert (plain[0] - plain[1]).abs().max() <= 1e-5 * expected.abs().max()
    assert (plain[0] - found).abs().max() > 1e-2


@pytest.mark.parametrize("policy", ["full", "selective", "none"])
@pytest.mark.parametrize("targets", [[], EXPERTS], ids=["attention", "experts"])
def test_the_plan_is_what_a_step_takes_however_tokens_are_routed(policy, targets):
    fields = {**SMALL, **KINDS["qwen3_moe"], "hidden_size": 128, "moe_intermediate_size": 256, "num_hidden_layers": 3}
    words = ["model.weights=random", "quant=nf4", "precision=fp32", f"checkpointing={policy}", "device=cpu"]
    run = compose([*words, f"adapter.target_parameters=[{','.join(targets)}]"]).config
    run.model.architecture = {"model_type": "qwen3_moe", **fields}
    tokens = random_tokens([150, 106], targets=1.0)
    batch = packed_batch(tokens)
    config = load.load_config(run.model)
    planner = Planner(run, config, Shape((150, 106), batch.num_targets, True))
    prediction = planner.predict()
    torch.manual_seed(0)
    base = load.load_base(run.model, config, run.quant, FP32, CPU, "trainer_packed")
    model = run.adapter.attach(base)
    base.train()
    run.checkpointing.apply(base)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)
    storages = LiveStorages(1)
    for tensor in [*model.parameters(), *model.buffers()]:
        storages.hold(tensor, tensor.grad)
    with storages:
        storages.mark()
        run.loss.sum(base, batch).backward()
        _, peak = storages.mark()
    assert peak == pytest.approx(prediction.peak - planner.optimizer.state, rel=0.05)


def test_routers_are_neither_quantised_nor_adapted():
    config = AutoConfig.for_model("qwen2_moe", **{**SMALL, "num_experts": 4, "num_experts_per_tok": 2})
    model = skeleton(config)
    assert routers(model) == {f"model.layers.{i}.mlp.shared_expert_gate" for i in range(2)}
    targets = option("adapter", "lora").config(model).target_modules
    assert not [name for name in targets if "shared_expert_gate" in name or name == "gate"]


def test_what_would_stay_in_16_bits_is_refused_by_name():
    model = skeleton(config_of("mixtral"))
    assert len(decoder_experts(model)) == 2
    with pytest.raises(ModelError, match="quant=int8: the experts of this mixtral"):
        option("quant", "int8").check_experts(model)
    for name in decoder_experts(model):  # as classes outside transformers' interface of experts, such as Llama 4's
        del model.get_submodule(name).is_transposed
    with pytest.raises(ModelError, match="quant=nf4: the experts of this mixtral.*way of their own"):
        option("quant", "nf4").check_experts(model)


def test_a_cache_that_would_not_hold_the_experts_is_refused():
    config = compose(["data.path=x", "quant=nf4", "model.quantized_cache=true"]).config
    with pytest.raises(ModelError, match="model.quantized_cache=true.*the experts of this mixtral"):
        check_shape(config, skeleton(config_of("mixtral")))


def test_an_architecture_block_takes_published_names():
    architecture = {"model_type": "qwen3_moe", "num_experts": 8, "head_dim": 128}
    config = written_config(architecture)
    assert (config.num_experts, config.head_dim) == (8, 128)


@pytest.mark.slow
def test_a_run_streams_and_resumes_bit_for_bit(base_overrides, tmp_path):
    added = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
    words = [*base_overrides, "quant=nf4", "model.weights=random", "model.architecture.model_type=qwen3_moe"]
    words += [f"+model.architecture.{key}={value}" for key, value in added.items()]
    words += ["model.architecture.num_hidden_layers=5", f"adapter.target_parameters=[{','.join(EXPERTS)}]"]
    words += ["train.max_steps=4", "train.save_every=2", "train.keep_checkpoints=9"]
    train_here(words, tmp_path / "resident")
    train_here([*words, "offload=base_cpu"], tmp_path / "streamed")
    stopped = tmp_path / "stopped"
    shutil.copytree(tmp_path / "resident", stopped)
    shutil.rmtree(stopped / "checkpoints" / "step-00000004")
    (stopped / "checkpoints" / "last").write_text("step-00000002\n")
    (stopped / "summary.json").unlink()
    shutil.rmtree(stopped / "adapter")
    train_here(words, stopped)
    expected = load_file(tmp_path / "resident" / "adapter" / "adapter_model.safetensors")
    for other in ("streamed", "stopped"):
        found = load_file(tmp_path / other / "adapter" / "adapter_model.safetensors")
        assert found.keys() == expected.keys() and all(found[name].equal(expected[name]) for name in found)
