"""``morphing.py``, but one worker is in a network namespace: ``apart.py NUM_STEPS WORKER NAMESPACE``.

That worker reaches manager and store through a relay, which it leaves outside.
"""

from __future__ import annotations

import os
import runpy
import selectors
import socket
import sys
from pathlib import Path
from urllib.parse import urlsplit

from tests.e2e.namespace import Namespace, enter
from varuna.launch.processes import die_with_parent, set_process_name


def relay(listeners: dict[socket.socket, tuple[str, int]]) -> None:
    """Passes on what comes, both ways, until its parent ends."""
    selector = selectors.DefaultSelector()
    for listener, target in listeners.items():
        selector.register(listener, selectors.EVENT_READ, target)
    while True:
        for key, _ in selector.select():
            assert isinstance(key.fileobj, socket.socket)
            if isinstance(key.data, tuple):
                near, _ = key.fileobj.accept()
                far = socket.create_connection(key.data)
                selector.register(near, selectors.EVENT_READ, far)
                selector.register(far, selectors.EVENT_READ, near)
                continue
            try:
                data = key.fileobj.recv(1 << 16)
                key.data.sendall(data)
            except OSError:
                data = b""
            if not data:
                selector.unregister(key.fileobj)
                key.fileobj.close()


def go_apart(there: Namespace) -> None:
    """Leave a relay outside, and go in."""
    manager, store = urlsplit(os.environ["VARUNA_MANAGER"]), int(os.environ["MASTER_PORT"])
    assert manager.port is not None
    listeners = {
        socket.create_server((there.outside, 0)): ("127.0.0.1", manager.port),
        socket.create_server((there.outside, 0)): ("127.0.0.1", store),
    }
    if os.fork() == 0:
        die_with_parent(9)
        set_process_name("relay")
        relay(listeners)
    to_manager, to_store = (listener.getsockname()[1] for listener in listeners)
    for listener in listeners:
        listener.close()
    os.environ.update(
        VARUNA_MANAGER=f"http://{there.outside}:{to_manager}",
        MASTER_ADDR=there.outside,
        MASTER_PORT=str(to_store),
    )
    enter(there.name)


_, _, worker, name = sys.argv
is_apart = os.environ["VARUNA_INCARNATION"].rsplit(".", 2)[1] == worker
there = Namespace(name)
os.environ["VARUNA_ADDRESS"] = there.inside if is_apart else there.outside
if is_apart:
    go_apart(there)
runpy.run_path(str(Path(__file__).with_name("morphing.py")), run_name="__main__")
