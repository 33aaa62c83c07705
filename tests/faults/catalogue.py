"""Which cells each fault has, and how they are drawn."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from faults import file_faults, memory_faults, process_faults, server_faults
from faults.cells import LAYOUTS, Copies, Launcher, Moment, Try
from faults.program import Program, Surroundings

# A fault returns whether it could be done; whether it bit is seen afterwards.
Fault = Callable[[Program, random.Random], bool]


@dataclass(frozen=True, kw_only=True, slots=True)
class Cells:
    """The cells of a fault.

    One `before_start` is there when the command is given, where the moment is a start. One that
    need not be `noticed` has bitten wherever it could be done.
    """

    moments: Sequence[Moment] = tuple(Moment)
    launchers: Sequence[Launcher] = (Launcher.OWN, Launcher.OWN, Launcher.OWN, Launcher.TORCHRUN)
    copies: Sequence[Copies] = (Copies.NONE, Copies.NONE, Copies.FOLDER, Copies.BUCKET)
    surroundings: Surroundings = Surroundings.PLAIN
    before_start: bool = False
    noticed: bool = True


STARTS = (Moment.START, Moment.RESTORE)
_BEFORE_END = tuple(moment for moment in Moment if moment not in (Moment.LAST_STEP, Moment.END))
_IN_STEPS = (Moment.STEP,)
_OWN = (Launcher.OWN,)
_ANYWHERE = Cells()
# Of two checkpoints, so that one is left.
_LATE = Cells(moments=(Moment.RESTORE, Moment.STEP, Moment.LAST_STEP))
_ALONE = Cells(launchers=_OWN, copies=(Copies.NONE,))
_SERVER = Cells(moments=_BEFORE_END, copies=(Copies.BUCKET,), before_start=True)
_MEMORY = replace(_ALONE, moments=_IN_STEPS, surroundings=Surroundings.ADDRESSES)
CELLS: Mapping[Fault, Cells] = {
    process_faults.kill_rank: _ANYWHERE,
    process_faults.kill_all_ranks: _ANYWHERE,
    process_faults.stop_rank: _ANYWHERE,
    process_faults.slow_rank: replace(_ANYWHERE, noticed=False),
    process_faults.kill_launcher: _ANYWHERE,
    process_faults.ask_to_stop: _ANYWHERE,
    process_faults.close_terminal: _ANYWHERE,
    process_faults.start_twice: replace(_ALONE, before_start=True, noticed=False),
    process_faults.turn_clock: replace(_ALONE, moments=STARTS, before_start=True, noticed=False),
    process_faults.cut_network: replace(
        _ALONE, moments=_BEFORE_END, surroundings=Surroundings.NETWORK
    ),
    file_faults.flip_payload: _LATE,
    file_faults.cut_payload: _LATE,
    file_faults.delete_payload: _LATE,
    file_faults.swap_payloads: _LATE,
    file_faults.flip_index: _LATE,
    file_faults.cut_index: _LATE,
    file_faults.damage_plan: _LATE,
    file_faults.damage_journal: _LATE,
    file_faults.damage_ledger: _LATE,
    file_faults.tear_steps: replace(_ALONE, moments=_IN_STEPS),
    file_faults.fill_disk: replace(_ALONE, moments=_IN_STEPS, surroundings=Surroundings.DISK),
    file_faults.make_read_only: replace(_ALONE, moments=_IN_STEPS),
    memory_faults.starve_rank: _ANYWHERE,
    memory_faults.run_out_of_memory: _ANYWHERE,
    memory_faults.flip_weight: _MEMORY,
    memory_faults.flip_moment: _MEMORY,
    memory_faults.flip_gradient: _MEMORY,
    server_faults.refuse_credentials: replace(_SERVER, moments=STARTS),
    server_faults.remove_bucket: _SERVER,
    server_faults.silence_server: _SERVER,
}
FAULTS: dict[str, Fault] = {fault.__name__: fault for fault in CELLS}


def draw(seed: int, number: int) -> Try:
    """Draw a cell; the same number of a seed is the same cell."""
    rng = random.Random(f"{seed} {number}")
    fault = rng.choice(sorted(FAULTS))
    cells = CELLS[FAULTS[fault]]
    # State of ZeRO-2 and 3 lies in torch's own tensors, whose addresses are not noted.
    layouts = [
        (world_size, layout)
        for world_size, layout in LAYOUTS
        if cells is not _MEMORY or not layout.endswith(("zero2", "zero3"))
    ]
    world_size, layout = rng.choice(layouts)
    launcher = rng.choice(cells.launchers)
    is_own = launcher is Launcher.OWN
    return Try(
        fault=fault,
        layout=layout,
        world_size=world_size,
        moment=rng.choice(cells.moments),
        launcher=launcher,
        is_elastic=is_own and rng.random() < 0.3,
        copies=rng.choice(cells.copies),
        peer_every=rng.choice((0, 1, 3)) if is_own and cells is not _MEMORY else 0,
    )
