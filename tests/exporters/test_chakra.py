"""Chakra traces hold the plan's ledger and its timetable, and no rank waits for ever.

Traces are read by the wire format alone, and run by a small simulator: compute takes its time,
collectives what the plan prices, transfers nothing.
"""

from collections import Counter, defaultdict

import pytest

import moewright as mw
from moewright.cost.pipeline_rows import simulate_plan
from moewright.cost.time.collective_time import CollectiveModel, GroupSpan
from moewright.cost.time.op_time import DeviceRates
from moewright.exporters.chakra import astra_files, build_traces
from moewright.rules import grid
from moewright.spec.hardware import Collective
from moewright.spec.plan import TimePart

COMPUTE, SEND, RECEIVE, COLLECTIVE = 4, 5, 6, 7
OPS = {0: "all_reduce", 2: "all_gather", 5: "broadcast", 6: "all_to_all", 7: "reduce_scatter"}


def read_varint(data, at):
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
        shift += 7


def read_fields(data):
    at = 0
    while at < len(data):
        key, at = read_varint(data, at)
        value, at = read_varint(data, at)
        if key & 7 == 2:
            value, at = data[at : at + value], at + value
        yield key >> 3, value


def read_node(message):
    after, attributes = [], {}
    node = {"after": after, "attributes": attributes}
    for field, value in read_fields(message):
        if field == 5:
            at = 0
            while at < len(value):
                number, at = read_varint(value, at)
                after.append(number)
        elif field == 10:
            attribute = dict(read_fields(value))
            name = attribute.pop(1).decode()
            (content,) = attribute.values()
            attributes[name] = content.decode() if isinstance(content, bytes) else content
        else:
            node[field] = value
    return node


def read_trace(pieces):
    data = b"".join(pieces)
    messages, at = [], 0
    while at < len(data):
        length, at = read_varint(data, at)
        messages.append(data[at : at + length])
        at += length
    return [read_node(message) for message in messages[1:]]


@pytest.fixture(scope="module", params=["pp2,ep4,mbs2", "tp2,cp2,pp2,vpp2,ep2,mbs1", "ep8,zero=1"])
def plan(request):
    return mw.estimate("allenai/OLMoE-1B-7B-0924", request.param, on="8xH100", global_batch=16)


@pytest.fixture(scope="module")
def traces(plan):
    return [read_trace(pieces) for pieces in build_traces(plan)]


def test_the_collectives_of_every_rank_are_those_of_its_ledger(plan, traces):
    for rank, trace in enumerate(traces):
        ledger = plan.estimate.ledgers[grid.coordinate(plan.layout, rank, "pp")]
        expected = Counter()
        for row in ledger.comm:
            expected[row.op.value] += row.bytes
        moved = Counter()
        for node in trace:
            if node[3] == COLLECTIVE:
                moved[OPS[node["attributes"]["comm_type"]]] += node["attributes"]["comm_size"]
            if node[3] == SEND:
                moved["p2p"] += node["attributes"]["comm_size"]
        assert moved == expected


def test_every_send_has_its_receive(traces):
    ends = {SEND: Counter(), RECEIVE: Counter()}
    for rank, trace in enumerate(traces):
        for node in trace:
            if node[3] in ends:
                own = node["attributes"]
                assert own["comm_src" if node[3] == SEND else "comm_dst"] == rank
                key = (own["comm_src"], own["comm_dst"], own["comm_tag"], own["comm_size"])
                ends[node[3]][key] += 1
    assert ends[SEND] == ends[RECEIVE]
    assert set(ends[SEND].values()) <= {1}


def run_traces(plan, traces):
    """Return the seconds after which all nodes have ended."""
    collectives = CollectiveModel(plan.hardware, DeviceRates(plan.hardware).constants)
    groups = {str(number): ranks for number, ranks in groups_by_number(plan).items()}
    ends = [{} for _ in traces]
    arrived, sent = defaultdict(dict), {}
    places = [0] * len(traces)
    turns = [Counter() for _ in traces]
    progress = True
    while progress:
        progress = False
        for rank, trace in enumerate(traces):
            while places[rank] < len(trace):
                node = trace[places[rank]]
                ready = max((ends[rank][number] for number in node["after"]), default=0.0)
                own = node["attributes"]
                if node[3] == COMPUTE:
                    end = ready + node.get(7, 0) / 1e6
                elif node[3] == SEND:
                    sent[own["comm_src"], own["comm_dst"], own["comm_tag"]] = end = ready
                elif node[3] == RECEIVE:
                    end = sent.get((own["comm_src"], own["comm_dst"], own["comm_tag"]))
                    if end is None:
                        break
                    end = max(end, ready)
                else:
                    group = own["pg_name"]
                    call = group, turns[rank][group]
                    arrived[call][rank] = ready
                    if len(arrived[call]) < len(groups[group]):
                        break
                    span = span_of(plan, groups[group])
                    op = Collective(OPS[own["comm_type"]])
                    end = max(arrived[call].values()) + collectives.seconds(
                        op, span, own["comm_size"]
                    )
                    turns[rank][group] += 1
                ends[rank][node[1]] = end
                places[rank] += 1
                progress = True
    assert places == [len(trace) for trace in traces], "some ranks wait for ever"
    return max(max(rank_ends.values()) for rank_ends in ends)


def groups_by_number(plan):
    from moewright.exporters.chakra import _number_groups

    return {number: ranks for ranks, number in _number_groups(plan.layout).items()}


def span_of(plan, ranks):
    size = plan.hardware.fabric.domain_size
    domains = len({rank // size for rank in ranks})
    return GroupSpan(size=len(ranks), ranks_per_domain=len(ranks) // domains, domains=domains)


def test_running_the_traces_takes_the_timetable_and_what_follows_it(plan, traces):
    rows = simulate_plan(plan)
    constants = DeviceRates(plan.hardware).constants
    collectives = CollectiveModel(plan.hardware, constants)
    layout = plan.layout
    in_rows = ("tp", "tp_cp", "cp", "cp_a2a", "cp_kv", "etp", "ep", "etp_ep", "pp")
    tails = []
    for ledger in plan.estimate.ledgers:
        tail_s = 0.0
        for row in ledger.comm:
            if row.group not in in_rows or (row.group == "pp" and row.op is not Collective.P2P):
                span = collectives.span(layout, row.group)
                tail_s += row.calls * collectives.seconds(row.op, span, row.bytes / row.calls)
        tails.append(tail_s)
    update_s = sum(
        share.seconds for share in plan.estimate.shares if share.part is TimePart.OPTIMIZER
    )
    if layout.cp > 1:  # rings are sends and receives, which take no time here
        assert run_traces(plan, traces) <= rows.end_s + update_s + max(tails)
        return
    expected_s = rows.end_s + update_s + max(tails)
    assert run_traces(plan, traces) == pytest.approx(expected_s, rel=2e-3)


def test_the_network_has_the_plans_levels():
    plan = mw.estimate("allenai/OLMoE-1B-7B-0924", "ep8", on="16xH100")
    network = astra_files(plan)["network.yml"]
    assert "npus_count: [8, 2]" in network
