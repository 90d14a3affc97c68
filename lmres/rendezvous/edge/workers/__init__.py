"""Worker processes: started, watched, held, stopped and cleaned up by us, under torch's own agent loop.

torch starts a worker, polls its exit code ten times a second and acts on what it sees. Here that code is held back
until the recovery plan says what it means. The parts:

- ``patch``: the one place where torch is changed; it hands the start of a worker to ``monitor``.
- ``process``: a ``Popen`` whose ``poll`` answers only when a gate lets it.
- ``progress``: the page in which a worker notes what it does: its steps, its phase, its collectives.
- ``stacks``: where its main thread is, without its help.
- ``monitor``: one thread that sees exits and reports as they happen.
- ``stop``: SIGTERM, the grace, SIGKILL; whole process tree, bounded.
- ``guardian`` and ``guardian_main``: a tiny process that cleans up when the agent itself is killed or frozen.
- ``proctree``: which processes are a worker's, and killing them without hitting a stranger.

Nothing is imported here: each part is imported by its own name, so that the small ones stay small.
"""
