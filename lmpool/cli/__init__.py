"""The command line: a module for each group of commands, and `main`, which puts them together.

A command reads its options, calls a public function, and prints what that returned.
"""

from lmpool.cli.main import app

__all__ = ["app"]
