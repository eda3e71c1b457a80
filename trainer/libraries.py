"""How heavy libraries are loaded where their own way costs more than a run needs."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def loading() -> Iterator[None]:
    """Inside, a command imports what it needs: bitsandbytes first, and without the garbage collector.

    Imports make a million objects that stay to the end. To search them while they come is a sixth of the imports'
    CPU time, and each of a run's own collections would search them again.
    """
    new, enabled = "torch" not in sys.modules, gc.isenabled()
    gc.disable()
    try:
        load_bitsandbytes()
        yield
    finally:
        if enabled:
            gc.enable()
        if new:
            gc.freeze()


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
