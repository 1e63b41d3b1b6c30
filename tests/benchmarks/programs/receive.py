"""Receive bytes from several senders at once, and print the times of the first and last byte.

Arguments: the bytes from each sender, and the number of senders.
"""

from __future__ import annotations

import socket
import sys
import threading
import time


def take(connection: socket.socket) -> None:
    left = int(sys.argv[1])
    while left:
        left -= len(connection.recv(min(left, 1 << 16))) or sys.exit("cut off")


server = socket.create_server(("", 5001))
print("ready", flush=True)
connections = [server.accept()[0] for _ in range(int(sys.argv[2]))]
threads = [threading.Thread(target=take, args=[connection]) for connection in connections]
start = time.monotonic()
for thread in threads:
    thread.start()
for connection in connections:
    connection.sendall(b"x")
for thread in threads:
    thread.join()
print(start, time.monotonic())
