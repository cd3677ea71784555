"""Where the processes of a mesh are: their hosts, and with whom their devices share memory."""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from jaxtaxfree.heap.driver import DriverError
from jaxtaxfree.heap.errors import HeapError
from jaxtaxfree.heap.exchange import Alone, Late, Meeting, processes

PLACES = "places"  # the one step in which processes tell where they are


class Place(NamedTuple):
    """Where a process is.

    Attributes:
      host: the name of one start of a host, in no other place the same.
      domain: equal where devices of two processes may reach each other's memory: that of an NVLink domain of several
        hosts, otherwise the host.
      name: of the host, for people; no space is in any of the three.
    """

    host: str
    domain: str
    name: str


def spanning(owners: Sequence[int], world: int, places: Mapping[int, Place]) -> str | None:
    """What to say if a team, whoever's it is, is in several domains; None if each is in one.

    Args:
      owners: the process of each device of the mesh, those of a team next to each other.
      world: devices in a team.
      places: of the processes.
    """
    for first in range(0, len(owners), world):
        members: dict[str, list[int]] = {}
        for process in sorted(set(owners[first : first + world])):
            members.setdefault(places[process].domain, []).append(process)
        if len(members) > 1:
            found = "; ".join(f"{processes(some)} on {places[some[0]].name}" for some in members.values())
            return (
                f"the axis spans hosts ({found}), and kernels reach the memory of one host only, or of one NVLink "
                "domain: put only devices of one host on the axis"
            )
    return None


def agreed(places: Mapping[int, Place]) -> dict[int, Place]:
    """The places of these processes, with the host as domain where processes of one host find different ones.

    One may see what another one in a container does not.
    """
    domains: dict[str, set[str]] = {}
    for place in places.values():
        domains.setdefault(place.host, set()).add(place.domain)
    return {
        process: place._replace(domain=place.host) if len(domains[place.host]) > 1 else place
        for process, place in places.items()
    }


def next_meeting(exchange: Alone, members: Sequence[int]) -> Meeting:
    """The next attempt of these processes to tell each other where they are."""
    key = hashlib.sha256(repr(list(members)).encode()).hexdigest()[:16]
    return exchange.meeting(f"{PLACES}/{key}", "its place in the mesh", members)


def gathered(exchange: Alone, own: Callable[[], Place], members: Sequence[int]) -> dict[int, Place]:
    """The places of these processes, as all of them find them.

    Args:
      own: finds that of this one.

    Raises:
      HeapError: if one of them fails or does not come.
    """

    def decide(said: Mapping[int, str]) -> str:
        return json.dumps(agreed({process: Place(*json.loads(text)) for process, text in said.items()}))

    while True:
        meeting = next_meeting(exchange, members)
        try:
            decided = meeting.settle(PLACES, json.dumps(own()), decide)
        except Late:
            continue  # with the meeting at which the others will be if they try again
        except BaseException as error:
            meeting.fail(error, [PLACES])
            if isinstance(error, DriverError):
                raise HeapError(str(error)) from error
            raise
        return {int(process): Place(*place) for process, place in json.loads(decided).items()}
