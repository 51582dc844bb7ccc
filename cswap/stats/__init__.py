"""Statistics: counters while the engine runs, and their presentation afterwards."""
