"""GGUF files read back: by transformers' own reader, by the gguf library's, and by llama.cpp where it is installed."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.program import here
from tests.support import slow_but, train_here
from trainer.config.saved import load_run
from trainer.errors import ConfigError, ModelError
from trainer.export import gguf_files
from trainer.export.reload import load_trained

IDS = torch.arange(5, 45)[None]


@pytest.fixture(scope="module", params=slow_but(["lora"], ["lora", "rslora"]))
def run(request, tmp_path_factory, tiny, chats):
    pytest.importorskip("gguf")
    folder = tmp_path_factory.mktemp("gguf") / "run"
    words = [*tiny.overrides(), "data=file", f"data.path={chats}", "data.max_length=128", "data.eval_fraction=0"]
    words += ["quant=none", "precision=fp32", "optim=adamw", "optim.learning_rate=1e-2", "device=cpu"]
    words += ["train.micro_batch_tokens=128", "train.save_every=0", "train.max_steps=4", f"adapter={request.param}"]
    train_here([*words, "schedule.warmup_ratio=0"], folder)
    return folder


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(IDS, use_cache=False).logits


def test_the_merged_model_is_the_adapter_in_transformers_own_reader(run, tmp_path):
    file = tmp_path / "model.gguf"
    assert here("merge", f"run={run}", "merge.format=gguf", "merge.dtype=fp32", f"to={file}") == 0
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=file.name, dtype=torch.float32)
    assert (logits(loaded) - logits(load_trained(load_run(run), run).model)).abs().max() < 1e-4
    assert here("merge", f"run={run}", "merge.format=gguf", f"to={file}") == 5


def test_the_adapter_read_back_is_the_adapter(run, tiny, tmp_path):
    """Oracle: alpha / r B A of the file, its rows turned back, added to the base's weights."""
    from gguf import GGUFReader

    file = tmp_path / "adapter.gguf"
    assert here("merge", f"run={run}", "merge.format=gguf_adapter", f"to={file}") == 0
    reader = GGUFReader(file)
    tensors = {t.name: torch.from_numpy(np.array(t.data)) for t in reader.tensors}
    alpha = float(reader.fields["adapter.lora.alpha"].parts[-1][0])
    names = {"self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v"}
    names |= {"self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up"}
    names |= {"mlp.down_proj": "ffn_down"}
    base = AutoModelForCausalLM.from_pretrained(tiny.path, dtype=torch.float32)
    with torch.no_grad():
        for block in range(2):
            for ours, theirs in names.items():
                a, b = (tensors.pop(f"blk.{block}.{theirs}.weight.lora_{part}") for part in "ab")
                delta = alpha / len(a) * b @ a
                heads = {"attn_q": 4, "attn_k": 2}.get(theirs)
                if heads is not None:
                    d = len(delta) // heads
                    order = [h * d + i * 2 + half for h in range(heads) for half in (0, 1) for i in range(d // 2)]
                    delta = delta[order]
                base.model.layers[block].get_submodule(ours).weight += delta
    assert tensors == {}
    assert (logits(base) - logits(load_trained(load_run(run), run).model)).abs().max() < 1e-4


@pytest.mark.slow
def test_llama_cpp_says_the_same(run, tiny, tmp_path):
    """The outside judge: the merged file, and the base's file with the adapter's."""
    llama_cpp = pytest.importorskip("llama_cpp")
    merged, adapter = tmp_path / "merged.gguf", tmp_path / "adapter.gguf"
    assert here("merge", f"run={run}", "merge.format=gguf", "merge.dtype=fp32", f"to={merged}") == 0
    assert here("merge", f"run={run}", "merge.format=gguf_adapter", f"to={adapter}") == 0
    expected = logits(load_trained(load_run(run), run).model)[0].numpy()
    judge = llama_cpp.Llama(str(merged), n_ctx=128, logits_all=True, verbose=False)
    judge.eval(IDS[0].tolist())
    assert np.abs(np.array(judge.scores[: IDS.shape[1]]) - expected).max() < 0.05


def test_what_it_cannot_hold_names_the_other_way(tiny, tmp_path, base_overrides, monkeypatch):
    pytest.importorskip("gguf")
    config = AutoModelForCausalLM.from_pretrained(tiny.path).config
    config.model_type = "phi3"
    with pytest.raises(ModelError, match="phi3 is not among llama, .* python convert_hf_to_gguf.py MERGED"):
        gguf_files.Names(config)
    config.rope_parameters = {"rope_type": "yarn", "rope_theta": 1e4}
    with pytest.raises(ModelError, match="rope_type=yarn is not written here"):
        gguf_files.rope_factors(config)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match=r"llama-quantize .*m\.gguf .*m-q4_k_m\.gguf Q4_K_M"):
        gguf_files.quantize(tmp_path / "m.gguf", "Q4_K_M")


def test_without_the_library_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'trainer\[gguf\]'"):
        gguf_files.check_library()
