"""Send bytes to several receivers at once, after each has requested them.

Arguments: the bytes for each receiver, and their addresses.
"""

from __future__ import annotations

import socket
import sys
import threading


def give(connection: socket.socket) -> None:
    connection.recv(1)
    connection.sendall(bytes(int(sys.argv[1])))


connections = [socket.create_connection((each, 5001), timeout=20) for each in sys.argv[2:]]
threads = [threading.Thread(target=give, args=[connection]) for connection in connections]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
