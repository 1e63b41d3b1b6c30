"""Timed runs of the candidates, on all cores: short ones first, long ones of the best."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from math import inf
from statistics import fmean

from aladdin_mpi.advice import timed_run
from aladdin_mpi.advice.candidates import (
    EARLY,
    MANY,
    REFERENCE,
    Candidate,
    ClusterTraits,
    ReducedCluster,
    bound,
    ground,
    plain,
    smaller,
    variants,
)
from aladdin_mpi.advice.learning import SampleEfficiency
from aladdin_mpi.advice.options import AdviceRequest
from aladdin_mpi.advice.timed_run import Processes, TimedRun
from aladdin_mpi.options.run import SimulateOptions

SHORT, LONG = 10, 30
"""Steps of every worker in a first and in a last run."""
CHECK = 5
"""Steps of every worker in a run on the whole cluster, where a smaller one stands for it."""
CHECKED = 3
"""Of those that are first, how many are run on the whole cluster."""
FIRST_ROUNDS = 0.6
"""Share of the time in which runs on the smaller cluster have to end."""
AFTER = 100.0
"""Seconds at most, behind the others, for trying out changes."""
FINALISTS = 4
SEEDS = 2
"""Runs of each finalist."""
NEAR = 0.75
"""Share of the best from which a first run is followed by variants with fewer servers."""
JITTER = 0.01
"""Of steps, where the cluster does not say: workers with none fall into one rhythm."""
FULL = 0.8
"""Share of its time from which a link is taken to be full: bursts leave gaps."""
NOTED = 0.05
"""Share of time from which waiting is worth a word."""
CANNOT_WIN = "cannot win"
TIE = 0.01
"""Share by which two candidates may differ and count as equal: then fewer servers are better."""
ERROR = 0.05
"""Largest relative error of simulated time in the network lab (docs/design/measurements.md)."""


@dataclass
class CandidateResult:
    """A candidate and what is known of it.

    Attributes:
        bound: samples per second that it cannot be above.
        short: the first run.
        long: runs that are long enough to be believed.
        growth: where runs are on a smaller cluster that stands for the whole one: the rate on the
            whole one, over what it should be by a run as long on the smaller one.
        why_not: it has not been run, for this reason.
    """

    candidate: Candidate
    bound: float
    share: SampleEfficiency
    short: TimedRun | None = None
    long: list[TimedRun] = field(default_factory=list)
    growth: float | None = None
    why_not: str = ""

    @property
    def timed(self) -> TimedRun | None:
        """The best known of its runs."""
        return self.long[0] if self.long else self.short

    @property
    def rate(self) -> float:
        """Samples per second, at most what there can be: lines of metrics fall as they do."""
        return min(self.bound, fmean(self._rates)) if self._rates else 0.0

    @property
    def score(self) -> float:
        """What counts: samples per second, by what a sample teaches."""
        return self.rate * self.share.value

    @property
    def possible(self) -> float:
        """The largest score that it may have."""
        return self.bound * self.share.value

    @property
    def _rates(self) -> list[float]:
        """Of the runs that count."""
        runs = self.long or ([] if self.short is None else [self.short])
        return [each.rate * (self.growth or 1.0) for each in runs]

    @property
    def is_strained(self) -> bool:
        """Whether its links are full, or its workers wait for them."""
        timed = self.timed
        if timed is None:
            return True
        return timed.waiting > NOTED or (bool(timed.links) and timed.links[0].used >= FULL)

    @property
    def between(self) -> tuple[float, float]:
        """Samples per second, likely: by the runs, and by how far virtual time has been off."""
        rates = self._rates if self.long else [self.rate]
        error = ERROR if self.long else 2 * ERROR
        return min(rates) * (1 - error), min(self.bound, max(rates) * (1 + error))


TimedFuture = Future["TimedRun | str"]
Futures = dict[TimedFuture, CandidateResult]


class CandidateSearch:
    """Finds the best candidate.

    Args:
        ground: the request's.
        model: a model's name for timed runs.
        share: what a sample teaches with a candidate; 1 where that does not count.
        tell: called with a few words when something has been done, and what is left to do.
    """

    def __init__(
        self,
        request: AdviceRequest,
        ground: ClusterTraits,
        model: str,
        share: Callable[[Candidate], SampleEfficiency],
        tell: Callable[[str, int, int], None],
    ) -> None:
        self._request = request
        self._ground = ground
        self._model = model
        self._share = share
        self._tell = tell
        self._smaller = smaller(request, ground)
        seconds = request.seconds(ground.workers)
        self._last = time.monotonic() + seconds
        self._end = self._last - (0 if self._smaller is None else (1 - FIRST_ROUNDS) * seconds)
        self._after = self._last + min(seconds / 2, AFTER)
        self._unit = request.options.batch_size / ground.step
        self._done = self._asked = 0
        self._scale: dict[TimedFuture, Callable[[TimedRun], TimedRun]] = {}
        """For runs on a smaller cluster: their figures on the whole one."""
        self.entries: list[CandidateResult] = []

    @property
    def part(self) -> ClusterTraits | None:
        """The smaller cluster on which runs are; None: they are on the whole one."""
        return None if self._smaller is None else self._smaller.ground

    # -- runs ---------------------------------------------------------------------------
    def options(
        self, candidate: Candidate, steps: int, seed: int = 0, small: ReducedCluster | None = None
    ) -> SimulateOptions:
        """Of a timed run of ``candidate``, ``steps`` of each worker long, on ``small`` or all."""
        request, on = (small.request, small.ground) if small else (self._request, self._ground)
        batch, workers = request.options.batch_size, on.workers
        jitter = {} if ("jitter",) in request.cluster else {"jitter": JITTER}
        return request.simulated(
            {
                "compute": "timed",
                "model": self._model,
                "batch_size": batch,
                "samples": batch * workers * steps,
                "log_every": batch * workers // 2,
                "seed": request.options.seed + seed,
                "quiet": True,
                **jitter,
                **candidate.fields,
            }
        )

    def _submit(
        self,
        pool: Processes,
        entry: CandidateResult,
        steps: int,
        seed: int = 0,
        whole: bool = False,
    ) -> TimedFuture:
        """A run, on the smaller cluster if there is one; ``whole``: on the whole one anyway."""
        self._asked += 1
        candidate, small = entry.candidate, self._smaller
        part = None if small is None or whole else small.candidate(candidate)
        if small is None or part is None:
            steps = max(CHECK, steps // 2) if self._ground.workers > MANY else steps
            options = self.options(candidate, steps, seed)
            return pool.submit(timed_run.run, options.model_dump(mode="json"))
        options = self.options(part, steps, seed, small)
        future = pool.submit(timed_run.run, options.model_dump(mode="json"))
        self._scale[future] = partial(small.scaled, candidate)
        return future

    def _results(self, futures: Futures) -> Iterator[tuple[TimedFuture, TimedRun]]:
        """As they come, until the time is over; what is left then is given up."""
        left = set(futures)
        while left and (seconds := self._end - time.monotonic()) > 0:
            done, left = wait(left, timeout=seconds, return_when=FIRST_COMPLETED)
            for future in done:
                if future.cancelled():
                    continue
                self._done += 1
                entry, found = futures[future], future.result()
                if isinstance(found, str):
                    entry.why_not = found
                else:
                    yield future, self._scale[future](found) if future in self._scale else found
                self._tell(entry.candidate.describe(), self._done, self._asked)
        for future in left:
            future.cancel()
            if not futures[future].why_not and futures[future].timed is None:
                futures[future].why_not = "no time"

    # -- rounds ---------------------------------------------------------------------------
    def run(self, names: Sequence[str]) -> list[CandidateResult]:
        """All candidates that have been tried, the best first."""
        with closing(Processes(self._request.jobs)) as pool:
            self._first([plain(name, self._ground) for name in names], pool)
            self._second(pool)
            self._third(pool)
        if self._smaller is not None:
            self._end = self._last
            with closing(Processes(self._request.jobs)) as pool:  # some may be at what is given up
                self._check(self._smaller, pool)
        return self.ranking()

    def _entry(self, candidate: Candidate) -> CandidateResult:
        most = bound(candidate, self._ground) * self._unit
        self.entries.append(CandidateResult(candidate, most, self._share(candidate)))
        return self.entries[-1]

    def _first(self, candidates: Iterable[Candidate], pool: Processes) -> None:
        """Short runs, of those that may be best first; the others as long as they may win."""
        entries = [self._entry(candidate) for candidate in candidates]
        turns = {name: turn for turn, name in enumerate(EARLY)}
        entries.sort(key=lambda e: (-e.possible, turns.get(e.candidate.algorithm, len(turns))))
        futures = {self._submit(pool, entry, SHORT): entry for entry in entries}
        for future, timed in self._results(futures):
            futures[future].short = timed
            self._prune(futures)

    def _prune(self, futures: Futures) -> None:
        best = self.best * (1 - TIE)
        for future, entry in futures.items():
            if entry.candidate != REFERENCE and entry.possible < best and future.cancel():
                self._asked -= 1
                entry.why_not = CANNOT_WIN

    def _second(self, pool: Processes) -> None:
        """Other options, where they may win."""
        found = []
        for entry in self.ranking():
            is_near = entry.score >= NEAR * self.best
            for candidate in variants(entry.candidate.algorithm, self._ground):
                fewer = candidate.servers < entry.candidate.servers
                may_win = bound(candidate, self._ground) * self._unit * entry.share.value
                is_cheap = self._smaller is None or self._smaller.candidate(candidate) is not None
                if is_cheap and may_win >= self.best * (1 - TIE) and (is_near or not fewer):
                    found.append(candidate)
        self._first(found, pool)

    def _third(self, pool: Processes) -> None:
        """Long runs of the best, and of synchronous SGD to compare with."""
        ranking = [entry for entry in self.ranking() if entry.short is not None]
        finalists = ranking[:FINALISTS]
        futures = {
            self._submit(pool, entry, LONG, seed): entry
            for seed in range(SEEDS)
            for entry in finalists
        }
        for future, timed in self._results(futures):
            futures[future].long.append(timed)

    def _check(self, small: ReducedCluster, pool: Processes) -> None:
        """The best on the whole cluster too, for a few steps, as far as there is time for it.

        And for as many on the smaller one: from a start the rate is another than later. Those that
        cannot win are worth a line: the main ones before that, the others behind.
        """
        chosen = [entry for entry in self.ranking()[:CHECKED] if self._fits(entry, small)]
        chosen.sort(key=lambda entry: self._cost(entry, small))
        left = [entry for entry in self.entries if entry.why_not == CANNOT_WIN]
        left = [entry for entry in left if small.candidate(entry.candidate) is not None]
        main = [entry for entry in left if entry.candidate.algorithm in EARLY]
        brief = {self._submit(pool, entry, CHECK): entry for entry in chosen}
        rest = {self._submit(pool, entry, SHORT): entry for entry in main}
        whole = {self._submit(pool, entry, CHECK, whole=True): entry for entry in chosen}
        rest |= {self._submit(pool, entry, SHORT): entry for entry in left if entry not in main}
        expected: dict[int, float] = {}
        for future, timed in self._results({**brief, **whole, **rest}):
            if future in rest:
                rest[future].short, rest[future].why_not = timed, ""
            elif future in brief:
                expected[id(brief[future])] = timed.rate
            elif rate := expected.get(id(whole[future])):
                whole[future].growth = timed.rate / rate

    def _fits(self, entry: CandidateResult, small: ReducedCluster) -> bool:
        """Whether a run on the whole cluster will have ended in time."""
        if entry.timed is None or small.candidate(entry.candidate) is None:
            return False
        return self._cost(entry, small) < self._end - time.monotonic()

    def _cost(self, entry: CandidateResult, small: ReducedCluster) -> float:
        """Seconds of a processor that it takes on the whole cluster, about."""
        assert entry.timed is not None
        steps = LONG if entry.long else SHORT
        return entry.timed.cost * CHECK / steps * small.growth(entry.candidate)

    # -- what is known ------------------------------------------------------------------
    @property
    def best(self) -> float:
        """The largest score so far."""
        return max((entry.score for entry in self.entries), default=0.0)

    def ranking(self) -> list[CandidateResult]:
        """The best first; those that have not been run last.

        Of those that are as good as the best the one with the fewest servers is the first, since
        each takes a core and memory; but not one whose links are full: what adapts to that sends
        fewer bits and models, from which workers learn less.
        """
        found = sorted(self.entries, key=lambda entry: (-entry.score, -entry.possible))
        equal = [entry for entry in found if entry.score >= (1 - TIE) * self.best]
        equal.sort(key=lambda e: (e.is_strained, e.candidate.servers, len(e.candidate.options)))
        return [*equal, *found[len(equal) :]]

    def try_out(
        self,
        asked: Mapping[str, tuple[Candidate, AdviceRequest]],
        steps: int = LONG,
        growth: float | None = None,
    ) -> dict[str, float]:
        """Samples per second of candidates on other clusters, by name; without those too late.

        Args:
            asked: the candidates and the clusters, by name.
            steps: of every worker.
            growth: see :class:`CandidateResult`.
        """
        self._end = self._after
        found: dict[str, float] = {}
        with closing(Processes(self._request.jobs)) as pool:
            futures: Futures = {}
            names: dict[TimedFuture, str] = {}
            for name, (candidate, request) in asked.items():
                on = ground(request, self._ground.megabytes)
                changed = CandidateSearch(request, on, self._model, self._share, self._tell)
                entry = CandidateResult(candidate, inf, SampleEfficiency(1.0))
                # How a number of workers scales is not seen with a part of them.
                whole = on.workers != self._ground.workers
                future = changed._submit(pool, entry, steps, whole=whole)
                self._asked += 1
                self._scale |= changed._scale
                futures[future], names[future] = entry, name
            for future, timed in self._results(futures):
                grown = growth if growth and future in self._scale else 1.0
                found[names[future]] = timed.rate * grown
        return found
