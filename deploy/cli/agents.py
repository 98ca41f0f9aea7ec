"""The command `serve-tasks`, by which agents on other machines take part in a run."""

import asyncio
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

import typer

from deploy.cli.arguments import Overrides, RunsDir, complete_recipes, load
from deploy.runtime.safe_console import echo


def serve_tasks(
    run: Annotated[
        str,
        typer.Argument(
            help="A run's folder or name, or its recipe.", autocompletion=complete_recipes
        ),
    ],
    overrides: Overrides = [],  # noqa: B006
    *,
    host: Annotated[
        str, typer.Option(help='Address to listen on; "0.0.0.0" for other machines.')
    ] = "127.0.0.1",
    port: Annotated[
        int | None, typer.Option(help="Port; that of environment_options.relay by default.")
    ] = None,
    key_file: Annotated[
        Path | None, typer.Option(help="Write the agents' key to this file; it is printed else.")
    ] = None,
    runs_dir: RunsDir = Path("runs"),
) -> None:
    """Give the tasks of a run with `environment = "remote"` to agents on other machines.

    Ctrl-C ends it, and the same command goes on: agents keep their tasks.
    """
    from actors.gateway.http_server import HttpServer
    from actors.remote.relay import TaskRelay
    from actors.remote.remote_agent import NAME, read_options
    from actors.remote.task_board import TaskBoard
    from actors.remote.task_keys import TaskKeys
    from deploy.storage.run_directory import RunDirectory
    from deploy.storage.run_lock import RunMissing
    from headway.errors import InputError

    try:
        config = RunDirectory.open(run, runs_dir).config(overrides)
    except RunMissing:
        config = load(run, overrides)
    if config.actors.environment != NAME:
        raise InputError(
            f'actors.environment of {config.name} is "{config.actors.environment}"; agents on '
            f'other machines play with "{NAME}"'
        )
    options, keys = read_options(config.actors.environment_options), TaskKeys.of_environment()

    chosen = urlsplit(options.relay).port or 0 if port is None else port

    async def serve() -> None:
        relay = TaskRelay(TaskBoard(options.silent_seconds), keys)
        server = HttpServer(relay, host, chosen)
        try:
            await server.start()
        except OSError as error:
            raise InputError(f"{host}, port {chosen}: {error.strerror}") from None
        shown = f"in {key_file}" if key_file else keys.of_agents
        echo(f"tasks of {config.name} at {server.address}; key of agents: {shown}")
        try:
            await asyncio.Event().wait()
        finally:
            await server.close()
            await relay.close()

    if key_file:
        key_file.touch()
        key_file.chmod(0o600)  # that of a file which was there too
        key_file.write_text(f"{keys.of_agents}\n")
    asyncio.run(serve())
