"""Implementation of each command, from arguments to exit code; called by `vit_scale.cli` and launch/."""
