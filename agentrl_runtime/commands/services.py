"""`agentrl up | down | status | doctor`: the stores and the health of the installation."""

import typer

from agentrl_runtime.commands.output import JsonFlag, print_json, print_table


def register(app: typer.Typer) -> None:
    app.command()(up)
    app.command()(down)
    app.command()(status)
    app.command()(doctor)


def up(as_json: bool = JsonFlag) -> None:
    """Start the embedded stores, or check the ones that the environment names.

    AGENTRL_MONGO_URI and AGENTRL_S3_URL win over the embedded servers, which live under AGENTRL_HOME
    (default ./.agentrl), listen on loopback only and go on running until `agentrl down`.
    """
    from agentrl_runtime.local import services
    from agentrl_runtime.local.endpoints import home, public_address

    found = services.up(home())
    if as_json:
        print_json({"mongo": public_address(found.mongo_uri), "s3": public_address(found.s3_url)})
    else:
        typer.echo(f"MongoDB      {public_address(found.mongo_uri)}")
        typer.echo(f"object store {public_address(found.s3_url)}")


def down(as_json: bool = JsonFlag) -> None:
    """Stop the embedded stores; their data stays."""
    from agentrl_runtime.local import services
    from agentrl_runtime.local.endpoints import home

    stopped = services.down(home())
    if as_json:
        print_json({"stopped": stopped})
    else:
        typer.echo(f"stopped {', '.join(stopped)}" if stopped else "nothing was running")


def status(as_json: bool = JsonFlag) -> None:
    """Where the stores are and whether they answer; exit 1 when one does not."""
    from agentrl_runtime.local import services
    from agentrl_runtime.local.endpoints import home

    found = services.status(home())
    if as_json:
        print_json(services.status_json(found))
    else:
        rows = [(s.name, s.address or "-", "embedded" if s.embedded else "external", s.detail) for s in found]
        print_table(("store", "address", "kind", "state"), rows)
    if not all(item.ok for item in found):
        raise typer.Exit(1)


def doctor(as_json: bool = JsonFlag) -> None:
    """Check every part of the installation and say how to mend what is wrong; exit 1 when something is."""
    from agentrl_runtime.local.doctor import examine
    from agentrl_runtime.local.endpoints import home

    findings = examine(home())
    if as_json:
        print_json([vars(item) for item in findings])
    else:
        signs = {"ok": "ok  ", "warn": "warn", "fail": "FAIL"}
        for item in findings:
            typer.echo(f"{signs[item.level]}  {item.part}: {item.detail}")
            if item.mend:
                typer.echo(f"      mend: {item.mend}")
    if any(item.level == "fail" for item in findings):
        raise typer.Exit(1)
