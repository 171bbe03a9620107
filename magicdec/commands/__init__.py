"""The subcommands of `magicdec`: a module each, named like its command, with a function `main`."""
