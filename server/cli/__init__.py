"""The command ``outrider``: one module a subcommand, imported only when it is named."""
