# SPDX-License-Identifier: Apache-2.0
"""infiniswap.policy.whole_blocks."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from infiniswap.policy.whole_blocks import Block, Guess, WholeBlocks, WholeBlocksConfig
from infiniswap.units import MIB

PLENTY = 1024 * MIB
CONFIG = WholeBlocksConfig()


class Job:
    """Whose memory is blocks that were paged out whole.

    Args:
        memory_bytes: what it may have.
        uses: the share of a trial's pages that it uses.
    """

    def __init__(self, memory_bytes: int = PLENTY, uses: float = 1.0) -> None:
        self.policy = WholeBlocks(memory_bytes)
        self.uses = uses
        self.now_s = 0.0
        self.trials = self.wholes = 0
        self._next = 0

    def scan(self, blocks: int) -> None:
        """Faults in one block after the other, as often as nothing comes back; the use of trials is
        told at once."""
        for _ in range(blocks):
            self._next += 1
            for _ in range(CONFIG.faults_min):
                self.fault(self._next * CONFIG.block_bytes)
            self.tell()

    def fault(self, address: int, pid: int = 1) -> Guess | None:
        guess = self.policy.faulted(pid, address)
        if guess is not None and self.policy.begin(guess, CONFIG.pages_min, self.now_s):
            self.trials += guess.is_trial
            self.wholes += not guess.is_trial
        return guess

    def tell(self) -> None:
        for block in self.policy.trials():
            self.policy.tried(block, self.uses, self.now_s)

    def fail(self) -> None:
        """Trials are not used in time until the policy rests."""
        while not self.policy.rests(self.now_s):
            self.scan(1)
            self.now_s += CONFIG.trial_s
            self.tell()


def test_nothing_is_mapped_before_a_trial_was_right() -> None:
    job = Job(uses=0.0)
    job.scan(50)
    assert job.wholes == 0
    assert job.trials == CONFIG.trials_max  # at a time


def test_after_a_right_trial_all_come_back_whole_but_one_of_some() -> None:
    job = Job()
    job.scan(1)
    assert (job.trials, job.wholes) == (1, 0)
    job.scan(10 * CONFIG.trial_every)
    assert job.trials == 11
    assert job.wholes == 10 * (CONFIG.trial_every - 1)


def test_faults_here_and_there_bring_nothing_back() -> None:
    job = Job()
    places = random.Random(1)
    for _ in range(5000):
        job.fault(places.randrange(100_000 * CONFIG.block_bytes))
    assert job.trials == 0


def test_the_same_address_of_two_processes_is_two_blocks() -> None:
    job = Job()
    for _ in range(CONFIG.faults_min - 1):
        assert job.fault(0, pid=1) is None
        assert job.fault(0, pid=2) is None
    assert job.fault(0, pid=2) == Guess(Block(2, 0), is_trial=True)


def test_a_trial_that_is_under_way_is_not_asked_for_again() -> None:
    job = Job(uses=0.0)
    job.scan(1)
    again = [job.fault(CONFIG.block_bytes + at) for at in range(5 * CONFIG.faults_min)]
    assert set(again) == {None}


def test_wrong_trials_make_it_rest_longer_each_time_up_to_a_bound() -> None:
    job = Job(uses=CONFIG.right_share / 2)
    rests = []
    for _ in range(9):
        job.fail()
        began_s = job.now_s
        while job.policy.rests(job.now_s):
            job.now_s += 0.25
        rests.append(job.now_s - began_s)
    assert rests == [0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 32.0]
    assert job.wholes == 0


def test_a_right_trial_makes_the_next_rest_short_again() -> None:
    job = Job(uses=0.0)
    job.fail()
    job.now_s += CONFIG.rest_s_max
    job.fail()
    job.now_s += CONFIG.rest_s_max
    job.uses = 1.0
    job.scan(1)
    job.uses = 0.0
    job.fail()
    assert job.policy.rests(job.now_s + CONFIG.rest_s_min / 2)
    assert not job.policy.rests(job.now_s + CONFIG.rest_s_min)


def test_a_job_that_no_longer_uses_whole_blocks_stops_getting_them() -> None:
    job = Job()
    job.scan(100)
    job.uses = 0.0
    job.fail()
    wholes = job.wholes
    job.now_s += CONFIG.rest_s_min
    job.scan(1)
    assert job.wholes == wholes


def test_a_small_job_always_rests() -> None:
    small, large = (WholeBlocks(CONFIG.memory_min_bytes + more) for more in (-1, 0))
    assert (small.is_of_use, small.rests(0.0)) == (False, True)
    assert (large.is_of_use, large.rests(0.0)) == (True, False)


def test_faults_of_before_a_block_came_back_count_no_longer() -> None:
    policy = WholeBlocks(PLENTY)
    for _ in range(CONFIG.faults_min):
        guess = policy.faulted(1, 0)
    assert guess is not None
    assert policy.begin(guess, CONFIG.pages_min, 0.0)
    policy.tried(guess.block, 1.0, 0.0)
    for number in range(1, CONFIG.faults_kept):  # the old ones are forgotten meanwhile
        policy.faulted(1, number * CONFIG.block_bytes)
    found = [policy.faulted(1, 0) for _ in range(CONFIG.faults_min)]
    assert [each is None for each in found] == [True] * (CONFIG.faults_min - 1) + [False]


def test_a_block_with_few_pages_on_the_swap_device_is_not_worth_it() -> None:
    policy = WholeBlocks(PLENTY)
    guess = None
    for _ in range(CONFIG.faults_min):
        assert guess is None
        guess = policy.faulted(1, 0)
    assert guess is not None
    assert not policy.begin(guess, CONFIG.pages_min - 1, 0.0)
    assert list(policy.trials()) == []
    assert policy.faulted(1, 0) is None  # and it is not asked for at each fault
    assert policy.begin(guess, CONFIG.pages_min, 0.0)
    assert list(policy.trials()) == [guess.block]


@given(st.lists(st.tuples(st.integers(0, 3), st.floats(0, 1), st.floats(0, 0.2)), max_size=400))
def test_bounds_hold_whatever_a_job_does(steps: list[tuple[int, float, float]]) -> None:
    job = Job()
    for number, uses, pause_s in steps:
        job.uses = uses
        job.now_s += pause_s
        guess = job.fault(number * CONFIG.block_bytes + 1)
        assert len(list(job.policy.trials())) <= CONFIG.trials_max
        assert guess is None or guess.block.start == number * CONFIG.block_bytes
        job.tell()
        assert 0.0 <= job.policy._right <= 1.0
        assert sum(job.policy._faults.values()) <= CONFIG.faults_kept
        assert job.policy._rests_until_s <= job.now_s + CONFIG.rest_s_max
