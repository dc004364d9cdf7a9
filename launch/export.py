"""Export a run's model: `python launch/export.py RUN --to timm|onnx|torch-export|hub-folder`."""

from vit_scale.cli import run_main
from vit_scale.commands.export import main

if __name__ == "__main__":
    run_main(main)
