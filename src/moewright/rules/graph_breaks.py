"""Where a layer stops for a number of the device: a CUDA graph, or torch.compile's, ends there.

The sizes that a dropless dispatcher agrees on with the other ranks are read by the host in every
pass of a layer with experts, the passes that recompute repeats included.
"""

from __future__ import annotations

from moewright.rules.job import Job
from moewright.rules.routing import knows_sent_rows
from moewright.rules.saved.recompute import layer_recompute
from moewright.rules.timetable.stages import chunk_layers
from moewright.spec.layout import Recompute
from moewright.spec.workload import RouterAssignment, RouterForce

_REPEATING = frozenset((Recompute.FULL, Recompute.MOE))


def count_graph_breaks(job: Job, pp_rank: int) -> int:
    """Return the passes of a step in which a layer of a pipeline rank waits for the device.

    A pass is the forward of a layer with experts for a micro-batch, or its repetition in backward.
    It counts once, however many numbers the host reads in it.
    """
    passes = 0
    for chunk in job.rank_chunks(pp_rank):
        for place, layer in enumerate(chunk_layers(job.model, chunk)):
            # Layers without experts read nothing: their sizes are those of the batch.
            if job.model.has_mlp(layer) and job.model.has_experts(layer):
                passes += _count_breaking_passes(job, place)
    return job.micro_batches * passes


def _count_breaking_passes(job: Job, place: int) -> int:
    """Return 1 where the forward of a layer waits, 2 where its repetition does too, else 0."""
    if _reads_sizes(job):
        return 1 + (not _REPEATING.isdisjoint(layer_recompute(job.layout, place)))
    return int(_reads_convergence(job))


def _reads_sizes(job: Job) -> bool:
    """Return whether the host reads how many rows it sends, receives or computes."""
    if job.layout.has_fixed_rows:
        return False
    # A library counts its rows on the device, whoever chose the experts, and the host reads them.
    return job.layout.dispatcher.facts.is_library or not knows_sent_rows(job)


def _reads_convergence(job: Job) -> bool:
    """Return whether the host reads when Sinkhorn's scales have converged.

    A repeated forward takes the experts of the first one.
    """
    router = job.workload.router
    return (
        router.assignment is RouterAssignment.SINKHORN
        and not router.sinkhorn_iterations
        and router.force is RouterForce.NONE
        and not job.workload.routes.replay_routes
    )
