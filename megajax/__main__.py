"""`python -m megajax` is the command `megajax`."""

from megajax import commands

if __name__ == "__main__":
    commands.start()
