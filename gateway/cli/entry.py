"""What the installed command calls: the command line, whose imports a Ctrl-C may meet.

Decides only what becomes of an interruption before there is anything to take back.
"""

from __future__ import annotations

import os
import sys

INTERRUPTED = 130


def main() -> None:
    try:
        from gateway.cli import app
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        sys.stderr.flush()
        os._exit(INTERRUPTED)
    app.main()
