"""The fault-injecting server with children, or one that does not serve: python -m tests.engine.served --port P ..."""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

if __name__ == "__main__":
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--children", type=int, default=0)
    parser.add_argument("--litter", action="store_true", help="leaves temporary files")
    parser.add_argument("--silent", action="store_true")
    parser.add_argument("--broken", type=Path, help="while this exists, it ends at once")
    options, rest = parser.parse_known_args()
    for number in range(options.children):  # every other one leaves the process group
        subprocess.Popen(["sleep", "3600"], start_new_session=bool(number % 2))
    if options.litter:
        Path(tempfile.mkdtemp(), "file").touch()
    if options.broken is not None and options.broken.exists():
        sys.exit("the model is broken")
    if options.silent:
        time.sleep(3600)
    from gspo_agent.testing.sglang_server.__main__ import main

    sys.argv[1:] = rest
    main()
