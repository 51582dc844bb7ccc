"""`cswap bench`: the experiments of the package, and in a checkout all other benchmarks, too.

A module is imported when its command is called.
"""

from __future__ import annotations

import importlib
import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Final

import typer
from typer.core import TyperGroup

import cswap
from cswap.display import shown
from cswap.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

COMMANDS: Final = {
    "codecs": "cswap.experiments.codecs.command",
    "accuracy": "cswap.experiments.accuracy.command",
    "schedule": "cswap.experiments.accuracy.schedule",
    "report": "cswap.experiments.pages.report",
}
"""Commands, and the modules whose function `main` runs them."""

GO_ON: Final = "the same command goes on from here. With --again it begins anew"
AFTER_CTRL_C: Final = dict.fromkeys(("codecs", "schedule"), GO_ON)
"""Message after an interrupt, by command. Accuracy prints its own."""


def prepare() -> None:
    """Settings that a measurement needs, where the user has not made them."""
    # A calibration in the background would disturb measurements and change the advisor's choices.
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
            what = self.state_of(ctx.invoked_subcommand)
            typer.echo(f"\nInterrupted: {what}.", err=True)
            raise typer.Exit(130) from None

    def state_of(self, command: str) -> str:
        """Return the state of a command's results after an interrupt."""
        return self.after_ctrl_c.get(command, "nothing is written")

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


class _WithCheckout(LazyGroup):
    """The package's experiments; those of `python -m bench`, where there is a checkout."""

    def state_of(self, command: str) -> str:
        """Return the state of a command's results after an interrupt."""
        if command in self.modules:
            return super().state_of(command)
        from bench.__main__ import BenchGroup

        return BenchGroup.after_ctrl_c.get(command, "nothing is written")

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the package's commands, and then the checkout's."""
        return list(dict.fromkeys([*super().list_commands(ctx), *_of_checkout()]))

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Import and return one command.

        Raises:
            ConfigError: it is none of the package's, and there is no checkout.
        """
        prepare()
        if cmd_name in self.modules:
            return super().get_command(ctx, cmd_name)
        root = _checkout()
        if root is None:
            raise ConfigError(
                f"bench {shown(cmd_name)}: the package has {', '.join(self.modules)}. Other "
                f"benchmarks come with the repository, not with the package in "
                f"{shown(str(_root()))}: there, run `python -m bench`, or `pip install -e .` first."
            )
        if cmd_name not in _of_checkout():
            return None
        if "bench" in sys.argv:
            sys.argv = sys.argv[sys.argv.index("bench") :]  # results name their command by it
        from bench.__main__ import app

        return typer.main.get_command(app).get_command(ctx, cmd_name)  # type: ignore[attr-defined]


def _root() -> Path:
    return Path(cswap.__file__).resolve().parents[1]


def _checkout() -> Path | None:
    # Its root, from now on on the path, so that `bench` is found.
    root = _root()
    if not all((root / file).is_file() for file in ("bench/__main__.py", "pyproject.toml")):
        return None
    if str(root) not in sys.path:
        sys.path.insert(0, str(root))
    return root


def _of_checkout() -> list[str]:
    if _checkout() is None:
        return []
    from bench.__main__ import COMMANDS as ALL

    return list(ALL)


bench_app = typer.Typer(cls=_WithCheckout, no_args_is_help=True, add_completion=False)


@bench_app.callback()
def bench() -> None:
    """Benchmarks of codecs, accuracy of one's own model against latency, and reports.

    Results go to cswap-results in the current folder. In a checkout, the commands of
    `python -m bench` are here, too.
    """
