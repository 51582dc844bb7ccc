"""One file per policy; ``solve(problem)`` makes its plan. They do not know each other."""
