"""adopt: one table, certificate.json, and the exit code says whether it can be trained."""

from __future__ import annotations

import json

import pytest

from trainer.commands.adopt import run
from trainer.errors import ConfigError


def test_a_type_that_holds(tmp_path, capsys):
    assert run(["qwen2", f"output_dir={tmp_path}"]) == 0
    found = json.loads((tmp_path / "certificate.json").read_text())
    assert found["holds"] and found["packing"] and found["loss"] == "chunked" and found["model_type"] == "qwen2"
    assert all(finding["holds"] for finding in found["findings"]) and len(found["findings"]) == 11
    assert "packing=auto packs" in capsys.readouterr().out


def test_a_type_that_is_refused(tmp_path, capsys):
    assert run(["t5", f"output_dir={tmp_path}"]) == 4
    found = json.loads((tmp_path / "certificate.json").read_text())
    assert not found["holds"] and "t5 is an encoder-decoder model" in found["refused"]
    assert "refused" in capsys.readouterr().out


def test_one_model_is_named():
    for words in ([], ["a", "b"], ["--fast"]):
        with pytest.raises(ConfigError, match="adopt takes one model"):
            run(words)
