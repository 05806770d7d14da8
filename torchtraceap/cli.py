"""The command `traceap`: what is available, how it ends, and nothing else.

Exit codes: 0 done, 1 not all was done (a workload failed, the reader of the output went away), 2 bad input
or usage (one line on stderr), 130 interrupted, 143 the same by SIGTERM. Anything else is a bug and keeps its
traceback. Commands import what they need when they run: `traceap --help` loads neither torch nor pandas.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from torchtraceap import __version__, console
from torchtraceap.commands import (
    auditing,
    catalogue,
    checking,
    collecting,
    data,
    demo,
    describing,
    quality,
    scoring,
    verifying,
)
from torchtraceap.errors import UserError
from torchtraceap.termination import terminable

INCOMPLETE = 1
USAGE_ERROR = 2
INTERRUPTED = 130
TERMINATED = 143

app = typer.Typer(
    name="traceap",
    help="Collect, label, score and diagnose PyTorch profiler traces of vision models.",
    epilog="Start with: traceap demo",
    invoke_without_command=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"traceap {__version__}")
        raise typer.Exit


@app.callback()
def _start(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


for _module in (
    catalogue,
    checking,
    collecting,
    data,
    verifying,
    describing,
    auditing,
    quality,
    scoring,
    demo,
):
    _module.add_to(app)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    _prepare_streams()
    command = typer.main.get_command(app)
    try:
        with terminable() as asked:
            result = command.main(args=arguments, prog_name="traceap", standalone_mode=False)
        sys.stdout.flush()
    except UserError as error:
        return _refuse(str(error))
    except (KeyboardInterrupt, typer.Abort):
        result = INTERRUPTED
    except BrokenPipeError:  # the reader, `head` for example, has seen enough
        _drop_stdout()
        return INCOMPLETE
    except OSError as error:
        if error.errno is None:
            raise
        if error.filename is None:  # files have names: it was a stream, and what it holds cannot be flushed
            _drop_stdout()
        return _refuse(f"{error.filename or 'output'}: {os.strerror(error.errno)}")
    except Exception as error:
        # Usage errors derive from click's exception or from Typer's own copy of it, depending on the version.
        if not hasattr(error, "format_message"):
            raise
        context = getattr(error, "ctx", None)
        hint = f" See: {context.command_path} --help" if context is not None else ""
        return _refuse(error.format_message() + hint)
    if result == INTERRUPTED:
        sys.stderr.write("traceap: interrupted\n")
        result = TERMINATED if asked.is_set() else INTERRUPTED
    return result if isinstance(result, int) else 0


def _prepare_streams() -> None:
    """Let output never fail for a character that the terminal's encoding lacks, or for a closed stream."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # closed by the caller: `>&-`
            setattr(sys, name, Path(os.devnull).open("w"))  # noqa: SIM115  open to the end of the process
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _drop_stdout() -> None:
    """Send to nowhere what is still to be flushed, which the interpreter would try again at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _refuse(message: str) -> int:
    sys.stderr.write(f"traceap: {console.visible(message.strip())}\n")
    return USAGE_ERROR


if __name__ == "__main__":
    sys.exit(main())
