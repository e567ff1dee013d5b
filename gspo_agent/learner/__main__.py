"""The learner's own process, which ends with its parent: from its first moment, before what it needs is imported."""

import os
import select
import signal
import sys
import threading


def _end_with_parent(descriptor: int) -> None:
    """Waits until the other end of the socket is closed, and ends the process at once."""
    closed = select.poll()
    closed.register(descriptor, select.POLLRDHUP)
    closed.poll()
    os._exit(0)


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, args=(int(sys.argv[1]),), daemon=True).start()

    from gspo_agent.learner.process import serve

    serve(int(sys.argv[1]))
