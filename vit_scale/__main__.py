"""`python -m vit_scale COMMAND`, as launchers of many processes start it: `accelerate launch -m vit_scale train`."""

from vit_scale.cli import main

if __name__ == "__main__":
    main()
