"""A stage's lease: one gateway at a time, the next one when it fell silent, and never two in one epoch."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from threading import Thread

import pytest

from stage.lease import Lease, Owner, Refused, Tenure, claim_all
from stage.processes import has_ended, process_space
from stage.runner import Outdated, Runner
from stage.tenancy import Tenancy

LEASE_S = 5.0
ONE = Owner("one", "192.0.2.1", 17, grpc="192.0.2.1:50051")
TWO = Owner("two", "192.0.2.2", 18)


class Nearby:
    """A stage whose clock stands still."""

    def __init__(self) -> None:
        self.lease = Lease(LEASE_S)
        self.asked: list[str] = []

    async def claim(self, owner: Owner, ended: str) -> Tenure | None:
        self.asked.append(f"claim {owner.id}")
        return self.lease.claim(owner, 0.0, ended)

    async def release(self, owner: str) -> None:
        self.asked.append(f"release {owner}")
        self.lease.release(owner)


def taken() -> Lease:
    lease = Lease(LEASE_S)
    assert lease.claim(ONE, now=0.0) is None
    return lease


def test_another_one_is_refused_and_told_who_has_it_and_how_long() -> None:
    assert taken().claim(TWO, now=2.0) == Tenure(ONE, left_s=3.0, renewals=0)


def test_it_is_anybodys_when_its_time_is_over() -> None:
    lease = taken()
    assert lease.claim(TWO, now=4.9) is not None
    assert lease.claim(TWO, now=5.0) is None
    assert lease.is_of("two")
    assert not lease.is_of("one")


def test_a_renewal_moves_the_end_and_is_seen_by_who_waits() -> None:
    lease = taken()
    before = lease.claim(TWO, now=1.0)
    assert before is not None
    still = lease.claim(TWO, now=1.5)
    assert still is not None
    assert not before.lives_on(still)
    assert lease.renew("one", now=2.0)
    after = lease.claim(TWO, now=3.0)
    assert after == Tenure(ONE, left_s=4.0, renewals=1)
    assert before.lives_on(after)


def test_that_a_third_one_was_faster_is_seen_too() -> None:
    lease = taken()
    before = lease.claim(TWO, now=1.0)
    lease.release("one")
    assert lease.claim(Owner("three", "192.0.2.3", 19), now=1.5) is None
    after = lease.claim(TWO, now=2.0)
    assert before is not None
    assert after is not None
    assert before.lives_on(after)


def test_only_its_owner_renews_or_releases_it() -> None:
    lease = taken()
    assert not lease.renew("two", now=1.0)
    lease.release("two")
    assert lease.is_of("one")
    lease.release("one")
    assert not lease.renew("one", now=1.0)
    assert lease.tenure(now=1.0) is None
    assert lease.claim(TWO, now=1.0) is None


def test_who_slept_over_its_end_goes_on_unless_another_one_came() -> None:
    lease = taken()
    assert lease.has_run_out(now=60.0)
    assert lease.renew("one", now=60.0)
    assert not lease.has_run_out(now=60.0)
    assert lease.claim(TWO, now=70.0) is None
    assert not lease.renew("one", now=70.0)


def test_a_second_claim_of_its_owner_is_a_renewal() -> None:
    lease = taken()
    assert lease.claim(ONE, now=4.0) is None
    assert lease.tenure(now=8.0) == Tenure(ONE, left_s=1.0, renewals=1)


def test_one_whose_process_is_known_to_be_gone_is_not_waited_for() -> None:
    lease = taken()
    assert lease.claim(TWO, now=1.0, ended="three") is not None
    assert lease.claim(TWO, now=1.0, ended="one") is None
    assert lease.is_of("two")


def test_a_new_owner_ends_all_turns_of_the_one_before() -> None:
    runner = Runner()
    tenancy = Tenancy(LEASE_S, runner, now=lambda: 0.0)
    assert tenancy.claim(ONE) is None
    assert runner.rest(1, 0.0)
    assert tenancy.claim(ONE) is None
    assert runner.rest(2, 0.0), "the same owner goes on"
    tenancy.release("one")
    assert tenancy.claim(TWO) is None
    for late in (2, 3, 1000):
        with pytest.raises(Outdated):
            runner.rest(late, 0.0)
    assert runner.rest(runner.turn + 1, 0.0)


def test_the_call_that_waits_for_a_stages_death_comes_back_to_a_gateway_that_lost_it() -> None:
    tenancy = Tenancy(LEASE_S, Runner(), now=lambda: 0.0)
    assert tenancy.claim(ONE) is None
    successors: list[Owner] = []
    waiting = [
        Thread(target=lambda: successors.append(tenancy.wait()), daemon=True) for _ in range(2)
    ]
    for thread in waiting:
        thread.start()
    assert tenancy.claim(TWO) is not None
    assert all(thread.is_alive() for thread in waiting)
    tenancy.release("one")
    assert all(thread.is_alive() for thread in waiting), "nobody else has come yet"
    assert tenancy.claim(TWO) is None
    for thread in waiting:
        thread.join(5.0)
        assert not thread.is_alive()
    assert successors == [TWO, TWO]


def test_a_process_is_gone_only_where_that_can_be_known() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    assert not has_ended(child.pid, process_space())
    child.kill()
    assert child.stdin is not None
    child.stdin.close()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert has_ended(child.pid, process_space()), "also before its parent took notice"
    child.wait()
    assert has_ended(child.pid, process_space())
    assert not has_ended(child.pid, "another host's")


def test_leases_of_a_ring_are_taken_in_order_and_all_or_none() -> None:
    stages = [Nearby(), Nearby(), Nearby()]
    stages[2].lease.claim(ONE, now=0.0)
    held = asyncio.run(claim_all(stages, TWO))
    assert held == Refused(2, Tenure(ONE, LEASE_S, 0))
    assert [stage.asked for stage in stages] == [
        ["claim two", "release two"],
        ["claim two", "release two"],
        ["claim two"],
    ]
    stages[2].lease.release("one")
    assert asyncio.run(claim_all(stages, TWO)) is None
    assert all(stage.lease.is_of("two") for stage in stages)


def test_whom_the_first_stage_refuses_asks_no_other() -> None:
    stages = [Nearby(), Nearby()]
    stages[0].lease.claim(ONE, now=0.0)
    assert asyncio.run(claim_all(stages, TWO)) is not None
    assert stages[1].asked == []


def test_a_line_about_an_owner_says_where_he_serves() -> None:
    assert str(ONE) == "a gateway that serves at 192.0.2.1:50051 (host 192.0.2.1, pid 17)"
    assert str(TWO) == "a gateway (host 192.0.2.2, pid 18)"
