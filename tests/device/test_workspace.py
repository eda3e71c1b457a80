"""The workspace of libraries: what malloc counts when the products are really made, and cuBLAS' by its source."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from trainer.device.workspace import cublas_bytes

CHILD = """
import json, torch
from trainer.device.malloc import mallinfo2
from trainer.device.workspace import Product, products_workspace

read = mallinfo2()
held = lambda: (lambda i: i.uordblks + i.hblkhd)(read())
products = [Product(512, 384, 1024, False, False), Product(512, 1024, 384, False, False)]
dtype = getattr(torch, "{dtype}")
begin = held()
found = products_workspace(products, dtype, 4, True)
again = products_workspace(products, dtype, 4, True)
tried = held()
for rows in (512, 300, 511):
    for inputs, outputs in ((384, 1024), (1024, 384)):
        hidden = torch.randn(rows, inputs, dtype=dtype, requires_grad=True)
        torch.nn.functional.linear(hidden, torch.randn(outputs, inputs, dtype=dtype)).sum().backward()
        del hidden
print(json.dumps([found.held, found.needed, again == found, tried - begin, held() - tried]))
"""


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_trial_of_the_products_leaves_what_a_run_will_hold(dtype):
    """In a process of its own, where no library holds anything yet."""
    done = subprocess.run(
        [sys.executable, "-c", CHILD.replace("{dtype}", dtype)], capture_output=True, text=True, check=True
    )
    held, needed, same, tried, more = json.loads(done.stdout)
    assert same and held == pytest.approx(tried, abs=2**18) and held > 2**16
    if dtype == "float32":
        assert needed == held and more < 2**20  # MKL's buffers are there
    else:
        assert needed == 4 * held  # four lengths of two products; a primitive for each
        assert more == pytest.approx(2 * held, rel=0.6)  # two more lengths here


def test_cublas(monkeypatch):
    """8.125 MiB a handle without a card; torch's setting counts where there is one."""
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    assert cublas_bytes() == 2 * (8 * 2**20 + 2**17)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    assert cublas_bytes() == 2 * 2**25
