"""What every predictor does: read cases, answer each on a line of its own.

It imports the standard library alone, so that a rival's environment need lend it nothing.
"""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

Case = Mapping[str, Any]

_LIMIT_S = 60  # CPU seconds for one case
_REASON_LENGTH = 90


def answer_cases(refuse: Callable[[Case], str], predict: Callable[[Case], float]) -> None:
    """Write the seconds of a step of every case on standard input, or why there are none.

    `refuse` returns what the rival cannot express, and "" where it can express all. A prediction
    that fails, or that takes longer than the limit, is refused with that reason.
    """
    signal.signal(signal.SIGVTALRM, _stop)
    for line in sys.stdin:
        case = json.loads(line)
        answer: dict[str, Any] = {"id": case["id"], "refused": refuse(case)}
        if not answer["refused"]:
            started = time.process_time()
            signal.setitimer(signal.ITIMER_VIRTUAL, _LIMIT_S)
            try:
                answer["step_s"] = predict(case)
            except Exception as error:  # the failure of a rival is its answer
                answer["refused"] = f"fails: {type(error).__name__}: {error}"[:_REASON_LENGTH]
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
            answer["cpu_s"] = time.process_time() - started
        print(json.dumps(answer), flush=True)


def _stop(signum: int, frame: object) -> NoReturn:
    raise TimeoutError(f"takes more than {_LIMIT_S} s")
