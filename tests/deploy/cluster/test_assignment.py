"""Nodes for the processes of a run: every one gets resources and labels, where that is possible."""

import itertools
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deploy.cluster.placement import NODE_LABEL, ResourceRequest, assign, lacking, to_free
from headway.roles import Role
from tests.deploy.cluster.test_placement import node as node_of


def gpu_nodes(*gpus, pools=()):
    labels = [{"pool": pool} for pool in pools] or [{}] * len(gpus)
    return [
        node_of(f"n{index}", cpus=64.0, gpus=float(count), labels=own)
        for index, (count, own) in enumerate(zip(gpus, labels, strict=True))
    ]


def want(role, count, gpus, **labels):
    return ResourceRequest(role=role, count=count, resources={"GPU": gpus}, labels=labels)


HERE = {NODE_LABEL: "n0"}


@pytest.mark.parametrize(
    ("nodes", "engines", "gpus_of_engine"),
    [(2, 2, 4), (2, 4, 2), (3, 12, 1), (3, 16, 1), (4, 6, 4), (4, 12, 2), (4, 24, 1)],
)
def test_engines_go_to_whole_nodes_beside_a_learner_of_eight_ranks(nodes, engines, gpus_of_engine):
    wanted = [want(Role.ACTOR, engines, gpus_of_engine), want(Role.LEARNER, 8, 1, **HERE)]
    chosen = assign(wanted, gpu_nodes(*[8] * nodes))
    assert {chosen[Role.LEARNER, rank] for rank in range(8)} == {"n0"}
    engines_of = Counter(node for (role, _), node in chosen.items() if role == Role.ACTOR)
    assert sum(engines_of.values()) == engines
    assert "n0" not in engines_of
    assert max(engines_of.values()) * gpus_of_engine <= 8


def test_a_role_without_labels_leaves_their_nodes_to_those_with_labels():
    wanted = [want(Role.LEARNER, 8, 1), want(Role.ACTOR, 2, 4, pool="generate")]
    chosen = assign(wanted, gpu_nodes(8, 8, pools=("generate", "other")))
    assert {chosen[Role.ACTOR, number] for number in range(2)} == {"n0"}
    assert {chosen[Role.LEARNER, rank] for rank in range(8)} == {"n1"}


def test_a_split_that_leaves_room_for_the_other_role_is_found():
    wanted = [want(Role.LEARNER, 4, 3), want(Role.ACTOR, 4, 5)]
    chosen = assign(wanted, gpu_nodes(8, 8, 8, 8))
    assert all(len(set(nodes)) == 4 for nodes in by_role(chosen).values())


def test_processes_that_fit_one_by_one_but_not_together_are_refused_with_the_nodes():
    wanted = [want(Role.LEARNER, 4, 1, **HERE), want(Role.ACTOR, 4, 3)]
    [lack] = lacking(wanted, gpu_nodes(8, 8))
    assert lack.endswith(
        "together 16 GPU, which do not fit on the nodes that they may be on (n0: 8 GPU; n1: 8 GPU)"
    )
    assert lacking(wanted, gpu_nodes(8, 8, 3)) == []


def by_role(chosen):
    nodes = {}
    for (role, _), node in chosen.items():
        nodes.setdefault(role, []).append(node)
    return nodes


REQUESTS = st.lists(
    st.builds(
        lambda count, gpus, label: (count, gpus, label),
        st.integers(1, 3),
        st.sampled_from([0.3, 0.5, 0.6, 0.7, 1.0, 2.0, 3.0]),
        st.sampled_from([{}, {"pool": "x"}, HERE]),
    ),
    min_size=1,
    max_size=3,
)
NODES = st.lists(st.tuples(st.integers(0, 5), st.sampled_from(["x", "y"])), min_size=1, max_size=3)


def fit_on_cards(amounts, cards):
    """Try every card for every share, after whole ones; `cards` has what is left of each."""
    if not amounts:
        return True
    amount, *others = amounts
    if amount >= 1:
        return len(cards) >= amount and fit_on_cards(others, cards[int(amount) :])
    return any(
        fit_on_cards(others, [*cards[:number], round(left - amount, 6), *cards[number + 1 :]])
        for number, left in enumerate(cards)
        if left >= amount
    )


@pytest.mark.parametrize(
    ("gpus", "shares", "fits"),
    [
        (2, {Role.ACTOR: (3, 0.6)}, False),
        (3, {Role.ACTOR: (3, 0.6)}, True),
        (1, {Role.LEARNER: (1, 0.5), Role.ACTOR: (1, 0.5)}, True),
        (2, {Role.LEARNER: (2, 0.3), Role.ACTOR: (2, 0.7)}, True),
        (2, {Role.LEARNER: (1, 0.5), Role.ACTOR: (2, 0.6)}, False),
        (2, {Role.LEARNER: (1, 0.1), Role.ACTOR: (1, 2)}, False),
        (1, {Role.ACTOR: (3, 0.3)}, True),
        (1.5, {Role.LEARNER: (1, 0.5), Role.ACTOR: (1, 1)}, True),
    ],
)
def test_a_share_of_a_gpu_lies_on_one_card(gpus, shares, fits):
    wanted = [want(role, count, amount) for role, (count, amount) in shares.items()]
    assert (lacking(wanted, gpu_nodes(gpus)) == []) is fits


@given(REQUESTS, NODES)
def test_every_placement_that_exists_is_found_and_holds(requests, nodes):
    wanted = [
        ResourceRequest(role=role, count=count, resources={"GPU": gpus}, labels=labels)
        for role, (count, gpus, labels) in zip(Role, requests, strict=False)
    ]
    there = gpu_nodes(*(gpus for gpus, _ in nodes), pools=[pool for _, pool in nodes])
    processes = [(request, n) for request in wanted for n in range(request.count)]

    def holds(places):
        used = {node.node_id: [] for node in there}
        for (request, _), node in zip(processes, places, strict=True):
            if not request.labels.items() <= node.labels.items():
                return False
            used[node.node_id].append(request.resources["GPU"])
        return all(
            fit_on_cards(
                sorted(used[node.node_id], reverse=True), [1.0] * int(node.resources["GPU"])
            )
            for node in there
        )

    chosen = assign(wanted, there)
    if chosen is None:
        assert lacking(wanted, there)
        assert not any(map(holds, itertools.product(there, repeat=len(processes))))
    else:
        of_id = {node.node_id: node for node in there}
        assert chosen.keys() == {(request.role, n) for request, n in processes}
        assert holds([of_id[chosen[request.role, n]] for request, n in processes])


@pytest.mark.parametrize(
    ("wanted", "free", "expected"),
    [
        ([want(Role.LEARNER, 1, 1)], (0, 0, 0), [7]),
        ([want(Role.LEARNER, 1, 1)], (0, 1, 0), []),
        ([want(Role.LEARNER, 1, 1), want(Role.REWARD_MODEL, 1, 1)], (0, 0, 0), [7, 5]),
        ([want(Role.LEARNER, 1, 1), want(Role.REWARD_MODEL, 1, 1)], (1, 0, 0), [7]),
        ([want(Role.LEARNER, 1, 2)], (0, 0, 0), [7, 5, 3]),
        ([want(Role.LEARNER, 1, 3)], (0, 0, 0), []),
        ([want(Role.LEARNER, 1, 1, pool="other")], (0, 0, 0), []),
        ([], (0, 0, 0), []),
    ],
)
def test_the_fewest_processes_end_that_make_room_for_others(wanted, free, expected):
    held = {7: "n2", 5: "n1", 3: "n1", 2: "lost"}
    assert to_free(wanted, gpu_nodes(*free), held, {"GPU": 1.0}) == expected
