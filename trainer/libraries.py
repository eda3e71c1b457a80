"""How heavy libraries are loaded where their own way costs more than a run needs."""

from __future__ import annotations

import os


def load_bitsandbytes() -> None:
    """Imports bitsandbytes without torch's compiler: to be called before anything else that imports it, as PEFT does.

    Its backends/default/ops.py decorates four functions, for devices that have no kernels of their own, with
    torch.compile, which loads the whole of torch._inductor there and then: over a second of CPU time. torch reads
    TORCHDYNAMO_DISABLE at each decoration, so what is compiled later (kernels=compiled) is compiled all the same.
    """
    set_before = os.environ.get("TORCHDYNAMO_DISABLE")
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    try:
        import bitsandbytes  # noqa: F401
    finally:
        if set_before is None:
            del os.environ["TORCHDYNAMO_DISABLE"]
        else:
            os.environ["TORCHDYNAMO_DISABLE"] = set_before
