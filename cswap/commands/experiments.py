"""`cswap bench`: experiments on a user's own tensors and model.

A module is imported when its command is called.
"""

from __future__ import annotations

import importlib
import os
from importlib.util import find_spec
from typing import TYPE_CHECKING, ClassVar, Final

import typer
from typer.core import TyperGroup

from cswap.display import shown
from cswap.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

COMMANDS: Final = {
    "codecs": "cswap.experiments.codecs.command",
    "accuracy": "cswap.experiments.accuracy.command",
    "report": "cswap.experiments.results_page",
}
"""Commands, and the modules whose function `main` runs them."""

GO_ON: Final = "the same command goes on from here. With --again it begins anew"
AFTER_CTRL_C: Final = dict.fromkeys(("codecs", "accuracy"), GO_ON)
"""Message after an interrupt, by command."""


def prepare() -> None:
    """Settings that a measurement needs, where the user has not made them."""
    # A process that compiles beside a training would disturb measurements.
    os.environ.setdefault("CSWAP_CALIBRATE", "0")
    # torch reads this when it loads OpenMP. OpenMP's threads wait for each other in a busy loop by
    # default. On a machine with other work, this made training five times slower.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


class LazyGroup(TyperGroup):
    """Imports commands one by one: a missing package of one benchmark must not stop another.

    Attributes:
        modules: modules by command.
        after_ctrl_c: messages after an interrupt, by command.
    """

    modules: ClassVar[Mapping[str, str]] = COMMANDS
    after_ctrl_c: ClassVar[Mapping[str, str]] = AFTER_CTRL_C

    def invoke(self, ctx: Any) -> Any:
        """Run the command; after Ctrl-C, print the state of its results."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            what = self.after_ctrl_c.get(ctx.invoked_subcommand, "nothing is written")
            typer.echo(f"\nInterrupted: {what}.", err=True)
            raise typer.Exit(130) from None

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the commands whose module exists."""
        return [name for name, module in self.modules.items() if find_spec(module)]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Import and return one command; None lets typer name the ones that exist."""
        if cmd_name not in self.list_commands(ctx):
            return None
        app = typer.Typer(add_completion=False)
        app.command(cmd_name)(importlib.import_module(self.modules[cmd_name]).main)
        return typer.main.get_command(app)


class _Bench(LazyGroup):
    """The package's experiments."""

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Import and return one command.

        Raises:
            ConfigError: it is none of the package's.
        """
        prepare()
        if cmd_name not in self.modules:
            raise ConfigError(
                f"bench {shown(cmd_name)}: the package has {', '.join(self.modules)}. Other "
                "benchmarks come with the repository: there, run `python -m bench`."
            )
        return super().get_command(ctx, cmd_name)


bench_app = typer.Typer(cls=_Bench, no_args_is_help=True, add_completion=False)


@bench_app.callback()
def bench() -> None:
    """Codecs on your own tensors, accuracy of your own model against latency, and a report.

    Results go to cswap-results in the current folder.
    """
