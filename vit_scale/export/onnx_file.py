"""Export to ONNX: normalized images [batch, channels, height, width] to logits, or features without a classifier."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from vit_scale.errors import UserError
from vit_scale.export.about import about_model
from vit_scale.export.verify import BATCHES, Exported, largest_difference, staged
from vit_scale.inference.loaded_run import LoadedRun

_MAX_BYTES_IN_ONE_FILE = 1_800_000_000
"""protobuf is limited to 2 GB; larger weights go into a file next to the model."""


def export_onnx(run: LoadedRun, out: Path) -> Exported:
    """Write `out` and verify it with onnxruntime. The expected image format is stored in the file's metadata."""
    _check_installed()
    output = "logits" if run.model.num_classes else "features"
    with staged(out) as path:
        with _quiet():
            example = torch.zeros(2, run.model.in_chans, *run.model.img_size)
            program: Any = torch.onnx.export(
                run.model,
                (example,),
                dynamo=True,
                input_names=["images"],
                output_names=[output],
                dynamic_shapes=({0: torch.export.Dim("batch")},),
            )
        program.model.metadata_props.update(about_model(run))
        size = sum(tensor.numel() * tensor.element_size() for tensor in run.model.state_dict().values())
        program.save(str(path), external_data=size > _MAX_BYTES_IN_ONE_FILE)
        session = _open_session(path)
        difference = largest_difference(
            run, lambda images: torch.from_numpy(session.run([output], {"images": images.numpy()})[0])
        )
    batches = " and ".join(map(str, BATCHES))
    usage = (
        f"import onnxruntime\n\nsession = onnxruntime.InferenceSession({str(out)!r})\n"
        f'({output},) = session.run(["{output}"], {{"images": images}})  # float32, normalized'
    )
    return Exported(out, f"run with onnxruntime at batch sizes {batches}", difference, usage)


def _check_installed() -> None:
    try:
        import onnx  # noqa: F401
        import onnxruntime  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise UserError(f"--to onnx: requires {error.name}; run pip install 'vit_scale[export]'") from error


def _open_session(path: Path) -> Any:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = torch.get_num_threads()
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence the progress messages and irrelevant warnings of torch's exporter."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "onnxscript", "onnx_ir")]
    levels = [logger.level for logger in loggers]
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        try:
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)
