"""The pulses of ranks: small processes beside them, by which a job knows its ranks alive.

`Heart` starts one for its rank. It is no thread of the rank, because an extension may hold Python's
lock for minutes while the rank is well, and because it can end a rank that cannot end itself. It
reads from a page of shared memory where its rank is, and exchanges a line of JSON with the pulse
of rank 0 over TCP in each beat. The job ends, and a rank that is left says why, when

* nothing was heard of a rank's pulse for the limit: its host is cut off or stands still;
* a rank was stopped, as by SIGSTOP, for the limit;
* a rank, or the process that started it, has ended, and the launcher has not ended the others;
* ranks wait for each other in different meetings, which is proven, or all are at different places
  of the program where they must be together, and none has moved.

Nothing here imports more than the standard library.
"""

from meshimpl.pulse.heart import Heart
from meshimpl.pulse.judgement import by_rank
from meshimpl.pulse.page import Wait

__all__ = ["Heart", "Wait", "by_rank"]
