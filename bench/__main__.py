"""`python -m bench <command>`, each command the function `main` of a module.

A module is imported when its command is called.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import typer

from cswap.commands import experiments
from cswap.commands.experiments import GO_ON, LazyGroup
from cswap.display import visible
from cswap.errors import CswapError

if TYPE_CHECKING:
    from typing import Any

COMMANDS = {
    "demo": "bench.demo.command",
    "swap": "bench.swap.command",
    "fit": "bench.fit.command",
    "codecs": "bench.codecs.command",
    "workloads": "bench.frameworks.command",
    "inlined": "bench.inlined.command",
    "advisor": "bench.advisor.command",
    "accuracy": "bench.accuracy.command",
    "readme": "bench.pages.readme",
    "gpu": "bench.gpu.command",
    "twin": "bench.twin.command",
}
"""Commands, and the modules that run them."""


class BenchGroup(LazyGroup):
    """The commands of `COMMANDS`; their errors are one line."""

    modules = COMMANDS
    after_ctrl_c: ClassVar = {
        **experiments.AFTER_CTRL_C,
        **dict.fromkeys(("demo", "swap", "fit", "workloads", "twin"), GO_ON),
        "gpu": "the same command goes on from here",
    }
    """Other commands keep nothing."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command; print its error."""
        try:
            return super().invoke(ctx)
        except CswapError as error:
            typer.echo(visible(str(error)), err=True)
            raise typer.Exit(2) from error


experiments.prepare()

app = typer.Typer(cls=BenchGroup, no_args_is_help=True, add_completion=False)


@app.callback()
def bench() -> None:
    """Demo and benchmarks of cswap."""


if __name__ == "__main__":
    app(prog_name="python -m bench")
