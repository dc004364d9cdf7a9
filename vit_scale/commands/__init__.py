"""What each command does, from its arguments to its exit status; `vit_scale.console` and launch/ call these."""
