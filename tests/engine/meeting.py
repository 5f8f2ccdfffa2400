"""Lets a request and a call arrive at the core in that order, the call while the request runs."""

import threading
import time
from collections.abc import Callable
from typing import Any

from seawall import Engine


def meet(
    engine: Engine, request: Callable[[], Any], act: Callable[[], Any]
) -> tuple[Any, Exception | None]:
    """What `request` returned, and what `act`, called while it ran, raised."""
    gate, held = threading.Event(), threading.Event()
    results: list[Any] = []
    errors: list[Exception | None] = []

    def attempt() -> None:
        try:
            act()
        except Exception as error:
            errors.append(error)
        else:
            errors.append(None)

    def hold() -> None:
        held.set()
        gate.wait()

    keeper = threading.Thread(target=lambda: engine._thread.call(hold))
    reader = threading.Thread(target=lambda: results.append(request()))
    actor = threading.Thread(target=attempt)
    inbox = engine._thread._inbox
    keeper.start()
    held.wait()
    for at, thread in enumerate((reader, actor)):
        thread.start()
        while inbox.qsize() <= at:
            time.sleep(0.001)
    gate.set()
    for thread in (keeper, reader, actor):
        thread.join(60)
    [result], [error] = results, errors
    return result, error
