"""A state machine drives an engine on a device that lags.

Whatever is done in whatever order: what comes back is what was saved, in the end nothing is held.
"""

from __future__ import annotations

from unittest import mock

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from cswap.config import SwapConfig
from cswap.engine.engine import SwapEngine
from cswap.engine.link import link_way
from cswap.engine.saved import reclaim
from tests.devices.sim import SimDevice

CODECS = ("raw", "zvc", "expk", "auto")


class Saved:
    """A packed tensor, and what it has to come back as."""

    def __init__(self, engine, tensor):
        self.packed = engine.pack(tensor)
        self.expected = tensor.detach().clone(memory_format=torch.preserve_format)
        self.strides = tensor.stride()


class EngineMachine(RuleBasedStateMachine):
    tensors, saved = Bundle("tensors"), Bundle("saved")

    @initialize(
        seed=st.integers(0, 1 << 16),
        codec=st.sampled_from(CODECS),
        keep_last=st.sampled_from([0, 2]),
        parts=st.booleans(),
    )
    def begin(self, seed, codec, keep_last, parts):
        self.small = mock.patch.object(link_way, "PART_ALIGN", 64)
        self.small.start()
        self.device = SimDevice(seed, part_bytes=512 if parts else None)
        config = SwapConfig(codec=codec, keep_last=keep_last, min_bytes=0)
        self.engine = SwapEngine(config, device=self.device)
        # The device is for one thread: handles are released by the engine's calls alone.
        reclaim._reclaimers.discard(self.engine._state.reclaimer)

    @staticmethod
    def make_one(n, zeros, seed):
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(n, generator=generator)
        return x * (torch.rand(n, generator=generator) >= zeros)

    @rule(target=tensors, n=st.integers(1, 700), zeros=st.floats(0, 1), seed=st.integers(0, 99))
    def make(self, n, zeros, seed):
        return self.make_one(n, zeros, seed)

    @rule(target=saved, n=st.integers(1, 700), zeros=st.floats(0, 1), seed=st.integers(0, 99))
    def save_what_nobody_else_holds(self, n, zeros, seed):
        return Saved(self.engine, self.make_one(n, zeros, seed))

    @rule(target=saved, x=tensors)
    def save(self, x):
        return Saved(self.engine, x)

    @rule(target=saved, x=tensors, start=st.integers(0, 50), step=st.integers(1, 3))
    def save_a_view(self, x, start, step):
        return Saved(self.engine, x[min(start, x.numel() - 1) :: step])

    @rule(item=saved)
    def ask(self, item):
        back = self.engine.unpack(item.packed)
        assert torch.equal(back, item.expected)
        assert back.stride() == item.strides

    @rule(item=consumes(saved))
    def drop(self, item):
        item.packed = None

    @rule(x=consumes(tensors))
    def forget(self, x):
        """The user lets go of a tensor; what was saved of it stays."""

    @rule(steps=st.integers(4, 40))
    def time_passes(self, steps):
        self.device.cuda.run_some(steps)

    @rule()
    def a_step_begins(self):
        self.engine.begin_step()

    @rule()
    def everything_settles(self):
        self.engine.synchronize()

    @invariant()
    def accounts_are_not_negative(self):
        if hasattr(self, "engine"):
            stats = self.engine.stats
            assert stats.device_bytes >= 0
            assert stats.host_bytes >= 0
            assert stats.fallbacks == 0

    def teardown(self):
        if not hasattr(self, "engine"):
            return
        self.small.stop()
        for name in ("tensors", "saved"):
            for reference in self.bundles.get(name, []):
                item = self.names_to_values.get(reference.name)
                if isinstance(item, Saved):
                    item.packed = None
        self.device.drain()
        self.engine.stats  # noqa: B018 - buries the dead
        self.device.drain()
        stats = self.engine.stats
        assert (stats.device_bytes, stats.host_bytes) == (0, 0)
        assert not self.device.cuda.faults


EngineMachine.TestCase.settings = settings(
    max_examples=2 * settings().max_examples, stateful_step_count=30, deadline=None
)
TestEngine = EngineMachine.TestCase
