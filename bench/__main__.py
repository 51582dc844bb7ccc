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

from bench.options import INTERRUPTED
from cswap.display import visible
from cswap.errors import CswapError

if TYPE_CHECKING:
    from typing import Any

COMMANDS = {
    "demo": "bench.demo.command",
    "swap": "bench.swap.command",
    "fit": "bench.fit.command",
    "codecs": "bench.codecs.command",
    "overhead": "bench.overhead.command",
    "plans": "bench.plans.command",
    "sparsity": "bench.sparsity.command",
    "papers": "bench.papers.command",
    "advisor": "bench.advisor.command",
    "accuracy": "bench.accuracy.command",
    "schedule": "bench.accuracy.schedule",
    "compare": "bench.files.compare",
    "stale": "bench.files.stale",
    "report": "bench.pages.report",
    "readme": "bench.pages.readme",
    "gpu": "bench.gpu.command",
}
"""Names, and the modules that do it."""


GO_ON = "the same command goes on from here. With --again it begins anew"
AFTER_CTRL_C = {
    **dict.fromkeys(("swap", "fit", "codecs", "plans", "sparsity", "papers", "schedule"), GO_ON),
    "gpu": "what was measured is written",
}
"""What becomes of an interrupted command; of others nothing is kept. (demo, accuracy say it.)"""


class LazyGroup(TyperGroup):
    """Imports commands one by one: what one benchmark needs must not stop another."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command; say what was wrong with it, or after Ctrl-C what became of it."""
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
        """Return the commands whose module is there."""
        return [name for name, module in COMMANDS.items() if find_spec(module)]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Import and return one command; None lets typer name the ones that exist."""
        if cmd_name not in self.list_commands(ctx):
            return None
        app = typer.Typer(add_completion=False)
        app.command(cmd_name)(import_module(COMMANDS[cmd_name]).main)
        return typer.main.get_command(app)


# A calibration in the background would disturb what is measured, and change choices on the way.
os.environ.setdefault("CSWAP_CALIBRATE", "0")
# Read when torch loads OpenMP, whose threads wait for one another in a busy loop by default: on a
# machine busy with other work that made training five times slower.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

app = typer.Typer(cls=LazyGroup, no_args_is_help=True, add_completion=False)


@app.callback()
def bench() -> None:
    """Demo and benchmarks of cswap."""


if __name__ == "__main__":
    app(prog_name="python -m bench")
