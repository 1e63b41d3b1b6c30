"""Message handlers, and receives that are dropped while a handler runs."""

from __future__ import annotations

from torch import Tensor

from aladdin_mpi.transport.mpi.progress import Handlers
from aladdin_mpi.transport.mpi.requests import MpiRequest


def test_handlers_ignore_abandoned_receive() -> None:
    """It completes without a message, possibly while another thread iterates over the handlers."""
    posted: list[MpiRequest] = []

    def receive(buffer: Tensor, source: int, tag: int) -> MpiRequest:
        posted.append(MpiRequest("receive", buffer, receives=True, peer=source, tag=tag))
        return posted[-1]

    def abandon(source: int, message: Tensor) -> None:
        heard.append("first")
        handlers.drop_tags(range(10, 20))
        for request in posted:
            request.done = True

    heard: list[str] = []
    handlers = Handlers(receive)
    handlers.add([1], 1, 10, 8, abandon)
    handlers.add([2], 1, 11, 8, lambda source, message: heard.append("second"))
    handlers.add([3], 1, 20, 8, lambda source, message: heard.append("kept"))
    posted[0].done = True

    handlers.run()
    assert heard == ["first", "kept"]
    assert [request.tag for request in posted if not request.done] == [20]
