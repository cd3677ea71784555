"""Tells the machine what the functions of the device API do: who waits, sends, receives and claims."""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from jaxtaxfree.heap.layout import Garbage
from jaxtaxfree.simulator import interpreter
from jaxtaxfree.simulator.events import DEVICE_API, GLUON_API
from jaxtaxfree.simulator.machine import Machine


def _data(value: Any) -> Any:
    """What a kernel knows as a value: an array, or a number if it is constant."""
    return value.handle.data if hasattr(value, "handle") else value


def _integer(value: Any) -> int:
    return int(value.handle.data.reshape(-1)[0]) if hasattr(value, "handle") else int(value)


@interpreter.hook(DEVICE_API, "wait")
def _wait(function: Callable) -> Callable:
    def wait(me: Any, index: Any, count: Any, peer: Any) -> Any:
        if Machine.running is not None:
            Machine.running.blame(_integer(peer))
        return function(me, index, count, peer)

    return wait


@interpreter.hook(DEVICE_API, "_poll")
def _poll(function: Callable) -> Callable:
    def poll(me: Any, index: Any, counters: Any, count: Any, *scope: Any) -> Any:
        machine = Machine.running
        assert machine is not None
        first = _integer(me.signals) + 4 * _integer(index)
        machine.begin_wait([first + 4 * i for i in range(_integer(counters))], _integer(count))
        arrived = function(me, index, counters, count, *scope)
        machine.end_wait()
        return arrived

    return poll


@interpreter.hook(DEVICE_API, "claim")
def _claim(function: Callable) -> Callable:
    def claim(me: Any, index: Any, draws: Any) -> Any:
        ticket = function(me, index, draws)
        if Machine.running is not None:
            address = _integer(me.signals) + 4 * _integer(index)
            Machine.running.claim(address, _integer(ticket), _integer(draws))
        return ticket

    return claim


@interpreter.hook(DEVICE_API, "report_garbage")
def _report_garbage(function: Callable) -> Callable:
    del function  # there is no record, and nobody may see by what it does that one program comes before another

    def report_garbage(me: Any, operand: Any, index: Any, value: Any, least: Any, most: Any, SLOT: Any) -> None:
        if Machine.running is not None:
            numbers = map(_integer, (operand, index, value, least, most, me.epoch))
            Machine.running.report_garbage(_integer(SLOT), Garbage(*numbers))

    return report_garbage


@interpreter.hook(DEVICE_API, "remote")
def _remote(function: Callable) -> Callable:
    def remote(me: Any, ptr: Any, peer: Any) -> Any:
        if Machine.running is not None:
            Machine.running.remote(_data(ptr))
        return function(me, ptr, peer)

    return remote


@interpreter.hook(DEVICE_API, "fence_proxy")
def _fence_proxy(function: Callable) -> Callable:
    def fence_proxy() -> None:
        function()
        if Machine.running is not None:
            Machine.running.fence_proxy()

    return fence_proxy


# Gluon kernels wait in assembly; here they do as others do.


@interpreter.hook(GLUON_API, "meet")
def _gluon_meet(function: Callable) -> Callable:
    return lambda *args: function.__globals__["shmem"].meet(*args)


@interpreter.hook(GLUON_API, "wait")
def _gluon_wait(function: Callable) -> Callable:
    return lambda *args: function.__globals__["shmem"].wait(*args)


@interpreter.hook(GLUON_API, "_poll")
def _gluon_poll(function: Callable) -> Callable:
    return lambda *args: function.__globals__["shmem"]._poll(*args)


def _writes(why: str, function: Callable) -> Callable:
    def write(*args: Any, **kwargs: Any) -> Any:
        machine = Machine.running
        assert machine is not None
        machine.begin_write(why)
        result = function(*args, **kwargs)
        machine.end_write()
        return result

    return write


for _api, _name, _why in (
    (DEVICE_API, "send", "send"),
    (DEVICE_API, "send_words", "send"),
    (DEVICE_API, "clear_vectors", "clear"),
    (GLUON_API, "clear_vectors", "clear"),
):
    interpreter.hook(_api, _name)(functools.partial(_writes, _why))


@interpreter.hook(DEVICE_API, "receive")
@interpreter.hook(DEVICE_API, "receive_words")
@interpreter.hook(DEVICE_API, "_take_words")
def _receive(function: Callable) -> Callable:
    def receive(me: Any, source: Any, peer: Any, mask: Any = None, *patient: Any) -> Any:
        machine = Machine.running
        assert machine is not None
        machine.begin_receive(*_awaited(source, peer, mask))
        received = function(me, source, peer, mask, *patient)
        machine.end_receive()
        return received

    return receive


def _awaited(source: Any, peer: Any, mask: Any) -> tuple[np.ndarray, np.ndarray]:
    """The addresses of a block of messages, and who sends what is there."""
    lanes = np.True_ if mask is None else _data(mask)
    addresses, peers, lanes = np.broadcast_arrays(_data(source), _data(peer), lanes)
    return addresses[lanes], peers[lanes]
