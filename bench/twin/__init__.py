"""A GPU with a clock, on a CPU: the real engine, on streams that have times. See command.py."""
