"""The small commands. Each module has `add_arguments(parser)` and `main(args)`."""
