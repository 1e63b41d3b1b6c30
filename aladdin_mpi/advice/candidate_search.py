"""Search for the best candidate by timed simulations on all cores: short ones, then long ones."""

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
from aladdin_mpi.advice.memory import least_models
from aladdin_mpi.advice.options import AdviceRequest
from aladdin_mpi.advice.timed_run import Processes, TimedRun
from aladdin_mpi.options.run import SimulateOptions

SHORT, LONG = 10, 30
"""Steps of every worker in the first and the last runs."""
TIMED_ROUNDS = 4
"""Least rounds of a run, for algorithms that exchange progress once per round."""
STEADY = {"aladdin-ahead": {"aladdin_ahead.sync_rounds": 0}}
"""Options of timed runs, by algorithm, without which their first steps are slower."""
CHECK = 5
"""Steps of every worker in a check on the whole cluster, if a smaller one represents it."""
CHECKED = 3
"""Number of best candidates that are checked on the whole cluster."""
FIRST_ROUNDS = 0.6
"""Share of the time budget for runs on the smaller cluster."""
AFTER = 100.0
"""Longest additional time for trying out changes, in seconds."""
FINALISTS = 4
SEEDS = 2
"""Runs of each finalist."""
NEAR = 0.75
"""Share of the best score above which variants with fewer servers are tried."""
JITTER = 0.01
"""Default jitter of steps: without any, workers would synchronise."""
FULL = 0.8
"""Share of time above which a link counts as saturated, as bursts leave gaps."""
NOTED = 0.05
"""Share of time above which waiting is mentioned."""
CANNOT_WIN = "cannot win"
NO_TIME = "no time"
TOO_LARGE = "needs more than --gpu-memory"
TIE = 0.01
"""Relative difference up to which candidates are equal, so that fewer servers win."""
ERROR = 0.05
"""Largest relative error of simulated time in the network lab (docs/design/measurements.md)."""


@dataclass
class CandidateResult:
    """A candidate and its runs.

    Attributes:
        bound: upper bound of its samples per second.
        share: its sample efficiency.
        short: the first run.
        long: runs that are long enough to be reliable.
        growth: correction if a smaller cluster represents the whole one: the rate on the whole
            one, over the prediction from an equally long run on the smaller one.
        why_not: reason why it has not been run.
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
        """The longest of its runs; None if it has not been run."""
        return self.long[0] if self.long else self.short

    @property
    def rate(self) -> float:
        """Samples per second, limited to the bound, which a fit to the metrics may exceed."""
        return min(self.bound, fmean(self._rates)) if self._rates else 0.0

    @property
    def score(self) -> float:
        """Effective throughput: samples per second times sample efficiency."""
        return self.rate * self.share.value

    @property
    def possible(self) -> float:
        """Upper bound of the score."""
        return self.bound * self.share.value

    @property
    def _rates(self) -> list[float]:
        """Samples per second of the long runs, or else of the short one."""
        runs = self.long or ([] if self.short is None else [self.short])
        return [each.rate * (self.growth or 1.0) for each in runs]

    @property
    def is_strained(self) -> bool:
        """Whether its links are saturated, or its workers wait for messages."""
        timed = self.timed
        return timed is None or timed.waiting > NOTED or timed.load >= FULL

    @property
    def between(self) -> tuple[float, float]:
        """The expected interval of samples per second, by the runs and the simulation's error."""
        rates = self._rates if self.long else [self.rate]
        error = ERROR if self.long else 2 * ERROR
        return min(rates) * (1 - error), min(self.bound, max(rates) * (1 + error))


TimedFuture = Future["TimedRun | str"]
Futures = dict[TimedFuture, CandidateResult]
TrialResult = float | str
"""Samples per second, or the reason why a trial has not been run."""


class CandidateSearch:
    """Search for the best candidate.

    Args:
        ground: traits of the request's cluster.
        model: name of the model for timed runs.
        share: returns a candidate's sample efficiency; 1 if only time matters.
        report_progress: called with a description, and the numbers of completed and of all runs.
    """

    def __init__(
        self,
        request: AdviceRequest,
        ground: ClusterTraits,
        model: str,
        share: Callable[[Candidate], SampleEfficiency],
        report_progress: Callable[[str, int, int], None],
    ) -> None:
        self._request = request
        self._ground = ground
        self._gigabytes = ground.megabytes / 1e3
        self._model = model
        self._share = share
        self._report_progress = report_progress
        self._smaller = smaller(request, ground)
        seconds = request.seconds(ground.workers)
        self._last = time.monotonic() + seconds
        self._end = self._last - (0 if self._smaller is None else (1 - FIRST_ROUNDS) * seconds)
        self._after = self._last + min(seconds / 2, AFTER)
        self._unit = request.options.batch_size / ground.step
        self._completed = self._submitted = 0
        self._scale: dict[TimedFuture, Callable[[TimedRun], TimedRun]] = {}
        """Conversions of runs on a smaller cluster to the whole one."""
        self.entries: list[CandidateResult] = []

    @property
    def part(self) -> ClusterTraits | None:
        """The smaller cluster of the runs; None if they are on the whole one."""
        return None if self._smaller is None else self._smaller.ground

    # -- runs ---------------------------------------------------------------------------
    def options(
        self, candidate: Candidate, steps: int, seed: int = 0, small: ReducedCluster | None = None
    ) -> SimulateOptions:
        """Return the options of a timed run of ``steps`` steps per worker, on ``small`` or all."""
        request, on = (small.request, small.ground) if small else (self._request, self._ground)
        steps = max(steps, TIMED_ROUNDS * candidate.period)
        batch, workers = request.options.batch_size, on.workers
        jitter = {} if ("jitter",) in request.cluster else {"jitter": JITTER}
        # The first rounds are slower, and would be all of a short run.
        steady = STEADY.get(candidate.algorithm, {})
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
                **steady,
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
        """Submit a run on the smaller cluster, if any; on the whole one if ``whole``."""
        self._submitted += 1
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
        """Yield results as they arrive, until the time is over; cancel the remaining runs."""
        pending = set(futures)
        while pending and (seconds := self._end - time.monotonic()) > 0:
            completed, pending = wait(pending, timeout=seconds, return_when=FIRST_COMPLETED)
            for future in completed:
                if future.cancelled():
                    continue
                self._completed += 1
                entry, result = futures[future], future.result()
                if isinstance(result, str):
                    entry.why_not = result
                else:
                    yield future, self._scale[future](result) if future in self._scale else result
                self._report_progress(entry.candidate.describe(), self._completed, self._submitted)
        for future in pending:
            future.cancel()
            if not futures[future].why_not and futures[future].timed is None:
                futures[future].why_not = NO_TIME

    # -- rounds ---------------------------------------------------------------------------
    def run(self, names: Sequence[str]) -> list[CandidateResult]:
        """Run the search and return all candidates, the best first."""
        with closing(Processes(self._request.jobs)) as pool:
            self._first([plain(name, self._ground) for name in names], pool)
            self._second(pool)
            self._third(pool)
        if self._smaller is not None:
            self._end = self._last
            with closing(Processes(self._request.jobs)) as pool:  # others may run cancelled calls
                self._check(self._smaller, pool)
        return self.ranking()

    def _entry(self, candidate: Candidate) -> CandidateResult:
        most = bound(candidate, self._ground) * self._unit
        self.entries.append(CandidateResult(candidate, most, self._share(candidate)))
        return self.entries[-1]

    def _first(self, candidates: Iterable[Candidate], pool: Processes) -> None:
        """Make short runs in the order of the upper bounds; cancel those that cannot win."""
        entries = [self._entry(candidate) for candidate in candidates]
        for entry in entries:
            entry.why_not = "" if self._has_memory(entry.candidate) else TOO_LARGE
        entries = [entry for entry in entries if not entry.why_not]
        turns = {name: turn for turn, name in enumerate(EARLY)}
        entries.sort(key=lambda e: (-e.possible, turns.get(e.candidate.algorithm, len(turns))))
        futures = {self._submit(pool, entry, SHORT): entry for entry in entries}
        for future, timed in self._results(futures):
            futures[future].short = timed
            self._prune(futures)

    def _has_memory(self, candidate: Candidate) -> bool:
        """Return whether a GPU has the memory that a worker needs at least."""
        given = self._request.options.gpu_memory
        needed = least_models(candidate, self._ground.node) * self._gigabytes
        return given is None or needed <= given

    def _prune(self, futures: Futures) -> None:
        best = self.best * (1 - TIE)
        for future, entry in futures.items():
            if entry.candidate != REFERENCE and entry.possible < best and future.cancel():
                self._submitted -= 1
                entry.why_not = CANNOT_WIN

    def _second(self, pool: Processes) -> None:
        """Make short runs of variants that may win."""
        promising = []
        for entry in self.ranking():
            is_near = entry.score >= NEAR * self.best
            for candidate in variants(entry.candidate.algorithm, self._ground):
                fewer = candidate.servers < entry.candidate.servers
                may_win = bound(candidate, self._ground) * self._unit
                may_win *= self._share(candidate).value
                is_cheap = self._smaller is None or self._smaller.candidate(candidate) is not None
                if is_cheap and may_win >= self.best * (1 - TIE) and (is_near or not fewer):
                    promising.append(candidate)
        self._first(promising, pool)

    def _third(self, pool: Processes) -> None:
        """Make long runs of the best candidates."""
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
        """Check the best candidates by short runs on the whole cluster, if time permits.

        Equally short runs on the smaller cluster are the reference, as the rate differs at the
        start of a run. Candidates that cannot win follow, for the table: the main ones first.
        """
        chosen = [entry for entry in self.ranking()[:CHECKED] if self._fits(entry, small)]
        chosen.sort(key=lambda entry: self._cost(entry, small))
        losers = [entry for entry in self.entries if entry.why_not == CANNOT_WIN]
        losers = [entry for entry in losers if small.candidate(entry.candidate) is not None]
        main = [entry for entry in losers if entry.candidate.algorithm in EARLY]
        brief = {self._submit(pool, entry, CHECK): entry for entry in chosen}
        rest = {self._submit(pool, entry, SHORT): entry for entry in main}
        whole = {self._submit(pool, entry, CHECK, whole=True): entry for entry in chosen}
        rest |= {self._submit(pool, entry, SHORT): entry for entry in losers if entry not in main}
        expected: dict[int, float] = {}
        for future, timed in self._results({**brief, **whole, **rest}):
            if future in rest:
                rest[future].short, rest[future].why_not = timed, ""
            elif future in brief:
                expected[id(brief[future])] = timed.rate
            elif rate := expected.get(id(whole[future])):
                whole[future].growth = timed.rate / rate

    def _fits(self, entry: CandidateResult, small: ReducedCluster) -> bool:
        """Return whether a run on the whole cluster fits into the remaining time."""
        if entry.timed is None or small.candidate(entry.candidate) is None:
            return False
        return self._cost(entry, small) < self._end - time.monotonic()

    def _cost(self, entry: CandidateResult, small: ReducedCluster) -> float:
        """Return the approximate CPU seconds of a check on the whole cluster."""
        assert entry.timed is not None
        steps = LONG if entry.long else SHORT
        return entry.timed.cost * CHECK / steps * small.growth(entry.candidate)

    # -- results ------------------------------------------------------------------------
    @property
    def best(self) -> float:
        """The largest score so far."""
        return max((entry.score for entry in self.entries), default=0.0)

    def ranking(self) -> list[CandidateResult]:
        """Return the candidates, the best first; those that have not been run come last.

        Among candidates as good as the best, the one with the fewest servers comes first, since
        each server takes a core and memory. Candidates with saturated links come after the others:
        an algorithm that adapts to saturation sends fewer bits and models, which slows learning.
        """
        ranking = sorted(self.entries, key=lambda entry: (-entry.score, -entry.possible))
        equal = [entry for entry in ranking if entry.score >= (1 - TIE) * self.best]
        equal.sort(key=lambda e: (e.is_strained, e.candidate.servers, len(e.candidate.options)))
        return [*equal, *ranking[len(equal) :]]

    def try_out(
        self,
        trials: Mapping[str, tuple[Candidate, AdviceRequest]],
        steps: int = LONG,
        growth: float | None = None,
    ) -> dict[str, TrialResult]:
        """Return the results of trials on other clusters, by name.

        Args:
            trials: candidates and clusters, by name.
            steps: of every worker.
            growth: see :class:`CandidateResult`.
        """
        self._end = self._after
        results: dict[str, TrialResult] = {}
        with closing(Processes(self._request.jobs)) as pool:
            futures: Futures = {}
            names: dict[TimedFuture, str] = {}
            for name, (candidate, request) in trials.items():
                on = ground(request, self._ground.megabytes)
                changed = CandidateSearch(
                    request, on, self._model, self._share, self._report_progress
                )
                entry = CandidateResult(candidate, inf, SampleEfficiency(1.0))
                # A part of the cluster does not show the effect of the number of workers.
                whole = on.workers != self._ground.workers
                future = changed._submit(pool, entry, steps, whole=whole)
                self._submitted += 1
                self._scale |= changed._scale
                futures[future], names[future] = entry, name
            for future, timed in self._results(futures):
                grown = growth if growth and future in self._scale else 1.0
                results[names[future]] = timed.rate * grown
        return {name: results.get(name, futures[future].why_not) for future, name in names.items()}
