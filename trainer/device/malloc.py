"""What the C library's allocator says of itself: glibc's mallinfo2."""

from __future__ import annotations

import ctypes


class MallInfo2(ctypes.Structure):
    """glibc's struct mallinfo2 (malloc.h)."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in [
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        ]
    ]


def mallinfo2():
    """glibc's mallinfo2, or None where the C library has none."""
    try:
        function = ctypes.CDLL(None).mallinfo2
    except (AttributeError, OSError):
        return None
    function.restype = MallInfo2
    return function


def malloc_statistics() -> dict[str, int]:
    """glibc's mallinfo2 by field; empty where the C library has none."""
    function = mallinfo2()
    if function is None:
        return {}
    info = function()
    return {name: getattr(info, name) for name, _ in MallInfo2._fields_ if getattr(info, name)}
