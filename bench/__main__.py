"""`python -m bench <command>`, each command the function `main` of a module.

A module is imported when its command is called.
"""

from __future__ import annotations

import os
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING

import typer
from typer.core import TyperGroup

from cswap.display import visible
from cswap.errors import CswapError
from cswap.experiments.options import INTERRUPTED

if TYPE_CHECKING:
    from typing import Any

COMMANDS = {
    "demo": "bench.demo.command",
    "swap": "bench.swap.command",
    "fit": "bench.fit.command",
    "codecs": "cswap.experiments.codecs.command",
    "workloads": "bench.frameworks.command",
    "overhead": "bench.overhead.command",
    "plans": "bench.plans.command",
    "sparsity": "bench.sparsity.command",
    "papers": "bench.papers.command",
    "advisor": "bench.advisor.command",
    "accuracy": "cswap.experiments.accuracy.command",
    "schedule": "cswap.experiments.accuracy.schedule",
    "compare": "bench.files.compare",
    "stale": "bench.files.stale",
    "report": "bench.pages.report",
    "readme": "bench.pages.readme",
    "gpu": "bench.gpu.command",
}
"""Commands, and the modules that run them."""


GO_ON = "the same command goes on from here. With --again it begins anew"
AFTER_CTRL_C = {
    **dict.fromkeys(("swap", "fit", "workloads", "codecs", "plans", "sparsity"), GO_ON),
    **dict.fromkeys(("papers", "schedule"), GO_ON),
    "gpu": "all finished measurements are written",
}
"""Message after an interrupt, by command. Other commands keep nothing, except demo and accuracy,
which print their own message."""


class LazyGroup(TyperGroup):
    """Imports commands one by one: a missing package of one benchmark must not stop another."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command; print its error, or after Ctrl-C the state of its results."""
        try:
            return super().invoke(ctx)
        except CswapError as error:
            typer.echo(visible(str(error)), err=True)
            raise typer.Exit(2) from error
        except KeyboardInterrupt:
            what = AFTER_CTRL_C.get(ctx.invoked_subcommand, "nothing is written")
            typer.echo(f"\nInterrupted: {what}.", err=True)
            raise typer.Exit(INTERRUPTED) from None

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the commands whose module exists."""
        return [name for name, module in COMMANDS.items() if find_spec(module)]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Import and return one command; None lets typer name the ones that exist."""
        if cmd_name not in self.list_commands(ctx):
            return None
        app = typer.Typer(add_completion=False)
        app.command(cmd_name)(import_module(COMMANDS[cmd_name]).main)
        return typer.main.get_command(app)


# A calibration in the background would disturb measurements and change the advisor's choices.
os.environ.setdefault("CSWAP_CALIBRATE", "0")
# torch reads this when it loads OpenMP. OpenMP's threads wait for each other in a busy loop by
# default. On a machine with other work, this made training five times slower.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

app = typer.Typer(cls=LazyGroup, no_args_is_help=True, add_completion=False)


@app.callback()
def bench() -> None:
    """Demo and benchmarks of cswap."""


if __name__ == "__main__":
    app(prog_name="python -m bench")
