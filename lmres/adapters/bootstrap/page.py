"""The writer's side of the progress page: where everything lies in the shared memory.

The reader's is ``lmres.rendezvous.edge.workers.progress``, and a test holds the two together. One writer (this
process; but for one word), native whole words, times of CLOCK_MONOTONIC in ns.

========= ==========================================================================================================
at        what
========= ==========================================================================================================
0         magic, version, pid of the writer
24        completed steps, time of the last one; then the time of the first one
48        events noted, time of the last one
64        the main thread's phase (its place in ``lmres.scout.sighting.PHASES``), and since when
80        time spent waiting for others, for input, for files
104       1 while phases and collectives are noted
112       process groups in the table below
120       written by the agent: the step at whose boundary to stand still, 0 for none
256       16 process groups: operations written to the ring, entered, known to be over, name, ranks, ring of 32
========= ==========================================================================================================

An operation in a ring bears its place in the ring at its beginning and, written last, at its end: where the two
differ it is not whole. Imported before anything of the user's: no imports that cost.
"""

from __future__ import annotations

import struct

PAGE_MAGIC = b"lmresPG\x02"
PAGE_VERSION = 2
PAGE_BYTES = 65536

HEAD = struct.Struct("8sQQ")  # magic, version, pid of the writer
COUNTERS = struct.Struct("@QQ")  # step, monotonic ns of the last one
COUNTERS_AT = 24
FIRST = struct.Struct("@Q")
FIRST_AT = 40
EVENT = struct.Struct("@QQ")  # count, ns
EVENT_AT = 48
EVENT_PHASE = struct.Struct("@QQQQ")  # the same, then the phase's code and since when
TIMES = struct.Struct("@QQQ")  # collective, loader, io
TIMES_AT = 80
ARMED = struct.Struct("@Q")
ARMED_AT = 104
GROUPS = struct.Struct("@Q")
GROUPS_AT = 112
PAUSE = struct.Struct("@Q")
PAUSE_AT = 120

MAX_GROUPS = 16
GROUP_AT = 256
GROUP_BYTES = 4080
GROUP = struct.Struct("@QQQ")  # written to the ring, entered, left
GROUP_TEXTS = struct.Struct("@64s512s")  # name, ranks
GROUP_TEXTS_AT = 24
RING_AT = 608
RING = 32
OP = struct.Struct("@QQQ32s40sQ")  # place in the ring from 1, number in the group (0: none), step, op, shape, place
