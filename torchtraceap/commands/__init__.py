"""The subcommands of `traceap`, one module a subject; each adds itself to the application."""
