"""The liveness watch: a small process next to each rank, its pulse, reports to the others.

`RankReporter` starts the pulse of its rank. The pulse is no thread of the rank, because an
extension may hold Python's lock for minutes while the rank is well. A process can also end a rank
that cannot end itself. The pulse reads the state of its rank from shared memory. In each beat it
exchanges a line of JSON with the pulse of rank 0 over TCP. The job ends, and a rank that is left
reports why:

* Nothing was heard of a rank's pulse for the limit: its host is cut off or frozen.
* A rank was stopped, as by SIGSTOP, for the limit.
* A rank, or the process that started it, has ended, and the launcher has not ended the others.
* Ranks wait for each other in different meetings or calls of mesh functions, which is proven.
* All ranks are at different places of the program where they must be together, and none has moved.

Neither the launchers nor Horovod's stall limits nor keep-alive of connections can replace it. A
launcher sees that a rank has ended, but not that it is stopped or cut off. Horovod's coordinator
waits inside MPI for a rank that is stopped, so its stall limits never run out. Where they do, a
rank that computes for an hour is taken for a lost one. The kernel of a host whose processes are
frozen keeps its connections alive.

A rank that writes or computes alone for an hour is waited for. The pulse imports the standard
library alone.
"""

from meshimpl.pulse.judgement import by_rank, named
from meshimpl.pulse.rank import at, reporter
from meshimpl.pulse.state import Meeting
