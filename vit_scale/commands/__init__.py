"""What each command does, from its arguments to its exit status; `vit_scale.cli` and launch/ call these."""
