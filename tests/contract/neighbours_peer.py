"""A process with connections to neighbours, to be killed: arguments are its name and the members as JSON."""

import json
import sys
import threading

from lmres.rendezvous.edge.neighbours import Neighbours
from lmres.rendezvous.state import Member
from tests.contract.test_neighbours import RUN, member


def main() -> None:
    name, others = sys.argv[1], json.loads(sys.argv[2])
    mine = Neighbours(run=RUN, address="127.0.0.1", poke=lambda: None)
    me = member(name, mine.port)
    members: tuple[Member, ...] = (me, *(member(n, port) for n, port in others.items()))
    mine.start()
    mine.follow(me, members)
    print(mine.port, flush=True)
    threading.Event().wait(60)


if __name__ == "__main__":
    main()
