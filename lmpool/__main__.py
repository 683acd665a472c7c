"""``python -m lmpool`` is ``lmpool``."""

from lmpool.cli import app

if __name__ == "__main__":
    app(prog_name="lmpool")
