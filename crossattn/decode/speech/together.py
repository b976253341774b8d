"""Scheduler that batches equal steps of many independent jobs, of any lengths.

A job is a generator: it yields a ``Step``, receives its result, and returns its own result at the end.
"""

from collections import defaultdict
from collections.abc import Callable, Generator, Hashable, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")


class Step(NamedTuple):
    """Request of a job: ``arrays`` are one row of a batch; steps of an equal ``group`` may share it."""

    group: Hashable
    arrays: tuple[Any, ...]


Job = Generator[Step, Any, T]


def together(
    jobs: Iterable[Job[T]], take: Callable[[Sequence[Step]], Sequence[Any]], max_jobs: int
) -> list[T]:
    """Runs the jobs and returns their results in order.

    The largest group goes first, so that jobs that are behind catch up. Groups are taken in powers of two,
    since each size is a program to compile.

    Args:
      jobs: generators, each begun when there is room for it.
      take: a function from steps of one group to their results.
      max_jobs: the most jobs at once, and the most steps in one call.
    """
    by_index: dict[int, T] = {}
    waiting: dict[int, tuple[Job[T], Step]] = {}
    coming = enumerate(jobs)

    def go_on(index: int, job: Job[T], result: Any) -> None:
        try:
            waiting[index] = job, job.send(result)
        except StopIteration as end:
            waiting.pop(index, None)
            by_index[index] = end.value

    while True:
        while len(waiting) < max_jobs and (new := next(coming, None)) is not None:
            go_on(*new, None)
        if not waiting:
            return [by_index[index] for index in sorted(by_index)]
        groups: dict[Hashable, list[int]] = defaultdict(list)
        for index, (_, step) in waiting.items():
            groups[step.group].append(index)
        group = max(groups.values(), key=len)
        chosen = group[: 1 << (len(group).bit_length() - 1)]
        results = take([waiting[index][1] for index in chosen])
        for index, result in zip(chosen, results, strict=True):
            go_on(index, waiting[index][0], result)
