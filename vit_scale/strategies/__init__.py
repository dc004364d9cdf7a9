"""How work is spread over processes: one process, DDP and DeepSpeed ZeRO."""
