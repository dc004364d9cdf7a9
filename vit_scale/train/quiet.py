"""Silence what libraries say that a user can do nothing about."""

from __future__ import annotations

import logging
import os
import warnings


def quiet_libraries() -> None:
    """Called before the libraries are imported; errors still come through."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("DS_SKIP_CUDA_CHECK", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("WANDB_SILENT", "true")
    for name in ("DeepSpeed", "deepspeed", "torch.distributed", "torch.utils.cpp_extension", "accelerate"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module=r"(torch|deepspeed|accelerate|timm|datasets|transformers)\b")
