"""What clients do in a simulation: turns of a few sessions, drawn from a seed.

Decides only what is asked and when; nothing here knows a ring. The same plan plays on a fake ring and on a real one.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from coordinator.requests import Request, SamplingSpec, SessionId
from fakering.toys import ToyConstraint, random_toy


@dataclass(frozen=True, slots=True)
class PlannedJob:
    """A turn to play. With `follows`, its prompt is that job's prompt and answer, without the tokens of `cut`, then
    `prompt`; with `again`, just that job's prompt.
    """

    at_s: float
    prompt: tuple[int, ...]
    session: str | None = None
    follows: int | None = None
    again: bool = False
    cut: tuple[int, int] | None = None  # what a client that cuts its history leaves out
    max_new_tokens: int = 12
    seed: int | None = None  # None: greedy
    draft: bool = True
    reuse: bool = True
    anchor: int = 0  # as in Request, as far as the prompt reaches
    cancel_after_s: float | None = None
    pauses: tuple[tuple[float, float], ...] = ()  # when its client reads nothing, and for how long
    constraint: ToyConstraint | None = None
    # When it has finished, the session's next prompt is known to begin with so much of its own prompt and answer,
    # and with these tokens behind it. None: nothing is known.
    next_keeps: int | None = None
    next_adds: tuple[int, ...] = ()
    tenant: str = ""

    def request(
        self, before: Request | None, answer: Sequence[int], stop_tokens: frozenset[int]
    ) -> Request:
        """`before`, `answer`: of the job that it follows, which has ended."""
        history: tuple[int, ...] = () if before is None else before.prompt
        messages = [0] if before is None else [*before.boundaries, len(history)]
        if not self.again:
            history = (*history, *answer)
            messages.append(len(history))
        if self.cut is not None:
            first, last = self.cut
            history = history[:first] + history[last:]
            messages = [at for at in messages if at < first] + [len(history)]
        prompt = (*history, *self.prompt)
        sampling = SamplingSpec(temperature=0.0)
        if self.seed is not None:
            sampling = SamplingSpec(temperature=0.8, seed=self.seed)
        return Request(
            prompt=prompt,
            sampling=sampling,
            max_new_tokens=self.max_new_tokens,
            boundaries=tuple(sorted({at for at in messages if at < len(prompt)})),
            anchor=min(self.anchor, len(prompt)),
            stop_tokens=stop_tokens,
            session=SessionId(self.session) if self.session is not None else None,
            draft=self.draft,
            reuse=self.reuse,
            tenant=self.tenant,
            constraint=self.constraint,
        )


def random_plan(
    seed: int,
    jobs: int,
    vocab_size: int,
    *,
    head: int = 20,
    tenants: Sequence[str] = ("",),
    within_s: float = 1.0,
) -> tuple[PlannedJob, ...]:
    """Turns of a few sessions over one shared head: follow-ups, branches, retries, shortened histories, prompts without
    end and cancellations. With several tenants each job is one's of them, whatever it follows and whosever session it
    names.
    """
    dice = random.Random(seed)
    shared = tuple(dice.randrange(vocab_size) for _ in range(head))
    plan: list[PlannedJob] = []
    for index in range(jobs):
        follows = dice.randrange(index) if index and dice.random() < 0.6 else None
        again = follows is not None and dice.random() < 0.25
        fresh = tuple(dice.randrange(vocab_size) for _ in range(dice.randint(1, 12)))
        begins = shared[: dice.randint(0, head)] if follows is None else ()
        session = plan[follows].session if follows is not None else f"s{index}"
        job = PlannedJob(
            at_s=dice.uniform(0.0, within_s),
            prompt=() if again else (*begins, *fresh),
            session=session if dice.random() < 0.8 else None,
            follows=follows,
            again=again,
            max_new_tokens=dice.randint(1, 14),
            seed=dice.choice((None, None, dice.randrange(1 << 32))),
            draft=dice.random() < 0.8,
            tenant=dice.choice(tenants),
            anchor=len(begins) if follows is None else plan[follows].anchor,
        )
        plan.append(_with_moods(dice, job, vocab_size))
    return tuple(map(partial(_with_pauses, dice), plan))


def _with_pauses(dice: random.Random, job: PlannedJob) -> PlannedJob:
    if dice.random() < 0.75:
        return job
    return replace(job, pauses=((dice.uniform(0.0, 0.5), dice.uniform(0.0, 5.0)),))


def _with_moods(dice: random.Random, job: PlannedJob, vocab_size: int) -> PlannedJob:
    """What only some clients do."""
    if job.follows is not None and dice.random() < 0.2:
        first = dice.choice((0, dice.randint(0, 40)))
        job = replace(job, cut=(first, dice.choice((first + dice.randint(1, 30), 1 << 20))))
        job = replace(job, prompt=job.prompt or (dice.randrange(vocab_size),))
    if dice.random() < 0.2:
        job = replace(job, cancel_after_s=dice.uniform(0.0, 0.4))
    if dice.random() < 0.3:
        job = replace(job, constraint=random_toy(dice, vocab_size + 1))
    if dice.random() < 0.4:
        adds = tuple(dice.randrange(vocab_size) for _ in range(dice.randint(0, 20)))
        job = replace(job, next_keeps=dice.randint(0, 40), next_adds=adds)
    if dice.random() < 0.05:
        more = tuple(dice.randrange(vocab_size) for _ in range(dice.randint(30, 200)))
        job = replace(job, prompt=(*job.prompt, *more), max_new_tokens=200)
    if dice.random() < 0.05:
        job = replace(job, reuse=False)
    return job
