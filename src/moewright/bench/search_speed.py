"""The speed of the planner, measured by whole searches of large models."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

from moewright.intake import catalogue
from moewright.search.search import search
from moewright.spec.workload import Workload

SEQ_LEN = 4096  # a published pretraining length
SEQUENCES_PER_DEVICE = 16  # so that each PP has micro-batches enough to be legal
CASES = (("Qwen3-235B-A22B", "256xH800"), ("DeepSeek-V3", "2048xH800"), ("Kimi-K2", "4096xH100"))

# What is counted, in words for whoever reads the figure.
COUNTING_RULE = (
    "layouts: distinct and legal ones; a lower bound of a group's step rules out all of it, or"
    " device bytes are worked\n"
    "out, and steps timed wherever layouts can fit and none that replays or moves less does;"
    " dispatchers, exchanges of context and overlapped"
    " sums tried for a\n"
    "layout are not counted again. The seconds hold all of the search, the full estimates of the"
    " plans shown as well."
)


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchRate:
    """One whole search and what it took, from reading nothing to the ranked plans."""

    model: str
    hardware: str
    layouts: int
    wall_s: float
    cpu_s: float

    @property
    def per_core_s(self) -> float:
        """Layouts that one core scores in a second."""
        return self.layouts / self.cpu_s


@dataclass(frozen=True, kw_only=True, slots=True)
class PeerPlanner:
    """A planner by others, and the layouts a second that it was measured at on two cores."""

    name: str
    layouts_per_s: str
    what: str


# Each planner's own search, or single evaluations, as measured on two cores shared with other jobs
# (docs/log/search_speed.md).
PEER_PLANNERS = (
    PeerPlanner(
        name="SimuMax",
        layouts_per_s="5",
        what="its own search, expert parallelism and pipeline only, no vpp",
    ),
    PeerPlanner(name="SimuMax, vpp", layouts_per_s="0.01-0.3", what="one evaluation"),
    PeerPlanner(name="Calculon", layouts_per_s="85", what="one evaluation, dense models only"),
    PeerPlanner(name="llm-analysis", layouts_per_s="600-2,500", what="one evaluation, no pipeline"),
    PeerPlanner(name="mbridge", layouts_per_s="4-8", what="memory only"),
    PeerPlanner(
        name="Galvatron", layouts_per_s="0.6", what="sub-searches of its own search, 8 devices"
    ),
)


def measure_search_rates() -> Iterator[SearchRate]:
    """Run the searches of CASES one by one, each from nothing, and yield what it took."""
    for model_name, hardware_text in CASES:
        model = catalogue.model(model_name)
        hardware = catalogue.hardware(hardware_text)
        workload = Workload(seq_len=SEQ_LEN, global_batch=SEQUENCES_PER_DEVICE * hardware.count)
        search.cache_clear()
        wall_started = time.perf_counter()
        cpu_started = time.process_time()
        result = search(model, workload, hardware, top=5)
        yield SearchRate(
            model=model_name,
            hardware=hardware_text,
            layouts=result.scored,
            wall_s=time.perf_counter() - wall_started,
            cpu_s=time.process_time() - cpu_started,
        )
