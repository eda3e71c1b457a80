"""Base models, quantisation, adapters, attention and checkpointing."""

import logging

logging.getLogger("bitsandbytes").setLevel(
    logging.ERROR
)  # it warns at import about kernels that a CPU run can do without
