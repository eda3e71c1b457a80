"""Heavy libraries are loaded without what a run does not use."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support import REPO

OURS = "from trainer.libraries import load_bitsandbytes; load_bitsandbytes()"
PLAIN = "import bitsandbytes"
"""Once this loads no inductor either, load_bitsandbytes has no more use."""


@pytest.mark.parametrize(("statement", "inductor"), [(OURS, False), (PLAIN, True)], ids=["ours", "plain"])
def test_bitsandbytes_loads_inductor_by_itself_only(statement, inductor):
    found = "'torch._inductor.compile_fx' in sys.modules, dict(os.environ) == before"
    code = f"import os, sys; before = dict(os.environ); {statement}; print({found})"
    done = subprocess.run([sys.executable, "-c", code], cwd=REPO, capture_output=True, text=True, check=True)
    assert done.stdout.split()[-2:] == [str(inductor), "True"]
