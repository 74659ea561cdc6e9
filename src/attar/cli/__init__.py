"""The command line: one module for each group of commands, one config class for each command.

`main.py` is the table of commands, `commands.py` declares commands and writes help, `options.py` has shared options,
and `terminal.py` what all share at run time: exit statuses, JSON, errors, progress.

Imports: any package, inside the commands, so that a command loads only what it runs. Start with `main.py`.
"""
