"""The state that the stages of an engine share."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from cswap.advisor.advisor import Advisor
from cswap.engine.order.looks import is_look, last_look
from cswap.engine.order.newest import Newest
from cswap.engine.order.plan_follower import PlanFollower
from cswap.engine.order.step_order import StepOrder
from cswap.engine.recomputer import Recomputer, computes_again
from cswap.engine.saved.aliases import AliasTable
from cswap.engine.saved.eligibility import OwnedStorages
from cswap.engine.saved.module_stack import ScopeStack
from cswap.engine.saved.observer import Observer
from cswap.engine.saved.operators import OperatorRules
from cswap.engine.saved.outliving import Outliving
from cswap.engine.saved.reclaim import Reclaimer
from cswap.engine.saved.results import Results
from cswap.engine.transfer.device_lanes import Lanes, disk_store, optional_int
from cswap.engine.unread_places import UnreadPlaces
from cswap.stats.counters import Counters

if TYPE_CHECKING:
    from collections.abc import Iterable

    from cswap.config import SwapConfig
    from cswap.devices.base import Device
    from cswap.engine.order.chooser import Chooser, Took
    from cswap.engine.saved.packed import Token
    from cswap.engine.transfer.device_lanes import Lane
    from cswap.engine.transfer.handle import Handle
    from cswap.schema.plan import Plan


class EngineState:
    """One engine's parts.

    Attributes:
        config: the options it was made with.
        scopes: where in the model the current thread is; written by module hooks.
        advisor: chooses codecs.
        follower: knows the plan.
        operators: the options' rules for operators.
        observer: notes the saved tensors, for the guard.
        counters: counts of everything done so far.
        disk: the disk tier, or None.
        lanes: the way out and back of each device.
        owned: storages of the model's parameters and buffers.
        lock: for the four that follow.
        aliases: handles by storage.
        order: positions in the step.
        newest: knows which tensors stay within the budget.
        reclaimer: releases the memory that nobody can ask for any more.
        outliving: tensors that the program holds itself.
        results: memory that was decoded or computed again, and waits for others.
        recomputer: computes tensors again.
        unread: knows the places whose tensors backward does not read.
        goal: decides instead of the advisor; None: the advisor decides.
        chooser: the same, in steps that it looks at; None: each place in the step keeps the choice
            that was made for its last tensor.
        took: gets the times of tensors that have left and come back; None: nobody wants to know.
        backward_is_next: a call of a model has begun a step, and backward has not asked for a
            tensor since.
        interrupted: an interrupt has ended our code somewhere: sums may be off by one tensor.
    """

    def __init__(
        self, config: SwapConfig, plan: Plan | None, device: Device | None, unseen: Iterable[int]
    ) -> None:
        """See `SwapEngine`."""
        self.config = config
        self.scopes = ScopeStack()
        self.counters = Counters()
        self.advisor = Advisor(config, plan, self.counters.fall_back)
        self.follower = PlanFollower(plan, unseen)
        self.operators = OperatorRules(config)
        self.observer = Observer()
        self.owned = OwnedStorages()
        self.results = Results(self.counters)
        self.recomputer = Recomputer(self.counters, self.advisor, self.owned, self.results)
        self.unread = UnreadPlaces(self.counters, self.advisor)
        self.unread.seeks = computes_again(config) and plan is None
        self.disk = disk_store(config)
        budget = None if plan is None else plan.budget_bytes
        self.reclaimer = Reclaimer(self.counters)
        self.lanes = Lanes(
            config,
            self.disk,
            self.counters,
            self.reclaimer,
            device,
            step_bytes=budget,
            relieve=self.relieve,
        )
        self.lock = threading.Lock()
        self.aliases = AliasTable()
        self.order = StepOrder()
        self.newest = Newest(optional_int(config.budget), config.keep_last)
        self.outliving = Outliving(config)
        self.interrupted = False
        self.backward_is_next = False
        self._begun = -1  # number of the step that has begun last
        self.goal: Chooser | None = None
        self.chooser: Chooser | None = None
        self.took: Took | None = None
        self.choose_by(None)

    def step_begins(self) -> None:
        """The first tensor of a step is being saved, or will be. A second time does nothing."""
        if self._begun == self.order.step:
            return
        self._begun = self.order.step
        self.follower.begin_step()
        self.counters.count_kept()
        exposed_s = self.counters.exposed_s + self.lanes.stalled_s
        self.advisor.begin_step(exposed_s, last_look(self._begun))

    def choose_by(self, goal: Chooser | None) -> None:
        """See `SwapEngine.choose_by`."""
        self.goal = self.chooser = goal
        self.took = None if goal is None else goal.took

    @property
    def looks(self) -> bool:
        """Whether each tensor of the step that has begun is looked at, and goes the general way."""
        if self.goal is not None:
            return self.chooser is not None
        return self.newest.looks or is_look(self.order.step)

    def watch(self, token: Token) -> None:
        """Release the token's handle after its death."""
        self.reclaimer.watch(token, self._release)

    def _release(self, handle: Handle, lane: Lane) -> None:
        with self.lock:
            self.aliases.discard(handle)
        lane.executor.release(handle)

    def tidy(self, *, in_step: bool = False) -> None:
        """Release the dead. After an interrupt, add up again. Args: see `Reclaimer.collect`."""
        try:
            if not in_step:
                self.lanes.pump()
            self.reclaimer.collect(in_step=in_step)
            if self.results.waiting:
                self.results.tidy()
            if self.interrupted or self.counters.interrupted:
                self._add_up_again()
                self.interrupted = False
        except BaseException:
            self.interrupted = True
            raise

    def relieve(self) -> None:
        """A device is out of memory, perhaps under one of our locks: let go of all that can go."""
        self.results.relieve()
        self.lanes.pump()
        for link in self.lanes.links:
            link.release_dead()

    def _add_up_again(self) -> None:
        self.lanes.drain()
        with self.reclaimer.paused():
            self.lanes.recount()
            on_device = self.reclaimer.device_bytes + self.results.nbytes
            on_device += sum(link.device_bytes for link in self.lanes.links)
            on_host = self.reclaimer.host_bytes + sum(link.host_bytes for link in self.lanes.links)
            self.counters.recount(device=on_device, host=on_host)
