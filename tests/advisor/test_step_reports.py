"""What an engine reports of a step, and what a look makes of it."""

import sys
import threading

import pytest

from cswap.advisor.gains import Gain, Gains
from cswap.advisor.step_reports import MANY, StepReports

MIB = 1 << 20
BACKWARD = 3


class Step:
    """A step of tensors of 1 MiB of which each saves a half, with nodes that ask for them."""

    def __init__(self, n):
        self.n, self.gains, self.reports = n, Gains(), StepReports()
        for position in range(n):
            self.gains.note((position, MIB), Gain(1.0, MIB / 2))

    def reported(self, nodes, staying=frozenset()):
        """Nodes: lists of positions; those that stay are asked for unseen. The look at the step."""
        self.reports.wanted, held = True, 0
        for position in range(self.n):
            held += MIB if (position, MIB) in staying else MIB // 2
            self.reports.holds((position, MIB), held)
        for number, positions in enumerate(nodes):
            for position in positions:
                if (position, MIB) not in staying:
                    self.reports.asked((position, MIB), (BACKWARD, number))
        self.reports.begin_step(self.gains)
        return self.reports.look(self.gains, staying)


def one_by_one(n):
    return [[position] for position in reversed(range(n))]


def test_tensors_of_a_node_with_many_come_back_together_and_those_of_others_do_not():
    step = Step(MANY + 3)
    few = [list(range(MANY + 1, MANY + 3)), [MANY], list(range(MANY))]
    assert step.reported(few).returns == [*(MANY * [MANY - 1]), MANY, MANY + 1, MANY + 2]
    assert step.reported(one_by_one(MANY + 3)).returns == list(range(MANY + 3))


def test_what_is_known_of_a_node_stands_while_its_tensors_stay():
    step = Step(MANY)
    step.reported([list(range(MANY))])
    every = frozenset((position, MIB) for position in range(MANY))
    for staying in (every, every - {(0, MIB)}):
        look = step.reported(one_by_one(MANY), staying)
        assert look.returns == MANY * [MANY - 1]
        assert look.held == [MIB // 2 * (n + 1) for n in range(MANY)]


def test_a_look_differs_if_only_the_nodes_do():
    step = Step(MANY)
    alone, together = step.reported(one_by_one(MANY)), step.reported([list(range(MANY))])
    assert together.differs(alone)
    assert not together.differs(step.reported([list(range(MANY))]))


@pytest.fixture
def threads_switch_often():
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def test_one_thread_begins_a_step_while_another_is_in_backward(threads_switch_often):
    step, ends = Step(MANY), threading.Event()

    def backward():
        number = 0
        while not ends.is_set():
            number += 1
            if len(step.reports._asked) > MANY:
                continue  # a step has to begin first
            step.reports.asked((number % MANY, MIB), (BACKWARD, number))

    thread = threading.Thread(target=backward)
    thread.start()
    try:
        for _ in range(100):
            step.reports.wanted = True
            while not step.reports._asked:
                pass  # the other thread is about to note a tensor
            step.reports.begin_step(step.gains)
    finally:
        ends.set()
        thread.join()
    # Each node asked for one tensor, and none was noted with another's.
    assert [gain.returns_at for _, gain in step.gains.all()] == list(range(MANY))
