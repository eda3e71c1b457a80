"""The README's table of families is what the certificates say, and it is whole."""

from __future__ import annotations

import json

import pytest
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.bench.adopt import README, TEXT_DECODERS, with_families
from trainer.certificate.settle import CERTIFIED, certified


def test_the_readme_says_what_the_certificates_say():
    page = README.read_text(encoding="utf-8")
    assert with_families(page, certified()) == page


def test_what_is_certified_is_known_and_every_refusal_has_a_reason():
    """Types without a result are proven at the start of each run."""
    if json.loads(CERTIFIED.read_text(encoding="utf-8"))["transformers"] != transformers.__version__:
        pytest.skip("the certificates are of another transformers")
    types = certified()
    assert set(types) <= {*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *TEXT_DECODERS}
    assert {"llama", "mistral", "qwen2", "qwen3", "gemma3_text", "phi3"} <= {
        k for k, f in types.items() if f.get("packing")
    }
    assert sum("reason" not in found for found in types.values()) >= 60
    assert [kind for kind, found in types.items() if "reason" in found and not found["reason"]] == []
