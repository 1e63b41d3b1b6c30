"""How the threads of one rank wake each other; the protocol is :mod:`.polling`'s."""

from __future__ import annotations

import threading


class Signals:
    """Events between the progress thread, the threads that wait, and those that begin something.

    Attributes:
        waiters: threads that wait for a request.
        news: something has ended: for a thread that waits while another one polls.
        takes_over: for the progress thread: one that polled for itself goes back to work, or has
            begun something.
        dozes: the progress thread looks seldom.
    """

    def __init__(self) -> None:
        self.waiters = 0
        self.news = threading.Event()
        self.takes_over = threading.Event()
        self.dozes = False

    def ended(self) -> None:
        """A request has ended."""
        if self.waiters:
            self.news.set()

    def begun(self) -> None:
        """There is something to look for more often."""
        if self.dozes:
            self.takes_over.set()
