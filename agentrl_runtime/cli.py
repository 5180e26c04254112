"""The `agentrl` command: one file a group under `commands`, and plug-ins by entry point."""

import json
import sys
from importlib import metadata

import typer

from agentrl_runtime.commands import lineage, runs, services, tasks
from agentrl_runtime.errors import AgentRLError


def build_app() -> typer.Typer:
    app = typer.Typer(
        name="agentrl",
        help="Train agents and trace every trained token, both ways, between its dataset line and every checkpoint.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        add_completion=False,
    )
    for group in (services, tasks, runs, lineage):
        group.register(app)
    for plugin in metadata.entry_points(group="agentrl.commands"):
        try:
            extend = plugin.load()
        except (ImportError, AttributeError) as error:
            # The other commands, `agentrl doctor` above all, must work when a part of the installation is broken.
            print(f"warning: the commands of {plugin.name} are left out: {error}; run `make setup`", file=sys.stderr)
        else:
            extend(app)
    return app


def main() -> None:
    """Run the command; a known problem is one line and its mend on stderr, and exit code 1."""
    try:
        build_app()()
    except AgentRLError as error:
        if "--json" in sys.argv:
            print(json.dumps({"error": error.what, "mend": error.mend}))
        print(f"error: {error.what}", file=sys.stderr)
        if error.mend:
            print(f"mend: {error.mend}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
