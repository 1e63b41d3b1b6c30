"""The end of a run: its accounts, summary.json, curves and table."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

import aladdin_mpi
from aladdin_mpi import console
from aladdin_mpi.training.exchange import gather
from aladdin_mpi.training.report import CURVES, draw_curves, table
from aladdin_mpi.training.rounding import rounded
from aladdin_mpi.training.run_folder import MODEL, write_summary

if TYPE_CHECKING:
    from aladdin_mpi.training.rank import Rank


class AccountsError(RuntimeError):
    """Gradients computed and gradients applied do not agree."""


def summarise(
    rank: Rank, model: Tensor | None, waiting: float, variance: float | None
) -> dict[str, Any]:
    """Gather the accounts; at rank 0 evaluate, write and print. Returns the summary there.

    ``waiting`` are the seconds that this rank waited in training, ``variance`` is that among the
    workers' models at its end.
    """
    mine = {**rank.role.counts(), "waiting": waiting, "figures": rank.figures.late}
    totals = [total or {} for total in gather(rank.transport, mine)]
    if rank.keeper is None:
        return {}
    keeper = rank.keeper
    assert keeper.metrics is not None and keeper.progress is not None
    for figures in (each for total in totals for each in total.get("figures", ())):
        keeper.own_figures.add(figures)
    keeper.log_rest()
    keeper.progress.close(keeper.budget.drawn, keeper.seconds)
    servers = rank.layout.servers
    summary = {**_about(rank), **_accounts(totals, servers), **rank.role.facts()}
    if own := keeper.own_figures.last:
        summary["own"] = own
    # What workers reported ends with their last draw; this has their last wait too.
    all_waiting = sum(total.get("waiting", 0.0) for total in totals[servers:])
    whole = keeper.worker_seconds
    summary["wait_fraction"] = all_waiting / whole if whole else 0.0
    measured: dict[str, float] = {}
    if keeper.evaluator is not None and model is not None:
        keeper.end_evaluations()
        measured = dict(keeper.evaluator.measure(model))
        if not keeper.metrics.has("eval", keeper.budget.drawn):
            keeper.take_variance(keeper.budget.drawn, variance)
            keeper.evaluated(keeper.moment(), measured)
        summary |= measured
        _take_buffers(rank.module, keeper.evaluator.module)
    elif rank.seen is not None:
        rank.seen.reestimate(rank.module)
    if rank.skips.are_possible:
        summary |= {"images_skipped": len(keeper.skips.paths), "skipped": keeper.skips.paths}
    if model is not None:
        state = {name: each.cpu() for name, each in rank.module.state_dict().items()}
        torch.save(state, rank.run_dir / MODEL)
    keeper.metrics.close()
    summary = rounded(summary)
    write_summary(rank.run_dir, summary)
    title = "{algorithm}, {model} on {dataset}, {workers} workers".format(**summary)
    draw_curves(keeper.metrics.lines, rank.run_dir / CURVES, title)
    if not rank.options.quiet:
        shown = table(summary, {**measured, **keeper.own_figures.last})
        console.say(f"{shown}\n  results in {rank.run_dir}", sys.stdout)
    return summary


def _take_buffers(module: nn.Module, other: nn.Module) -> None:
    """Make the buffers of ``module`` those of its copy."""
    for buffer, theirs in zip(module.buffers(), other.buffers(), strict=True):
        buffer.copy_(theirs)


def _about(rank: Rank) -> dict[str, Any]:
    options, keeper = rank.options, rank.keeper
    assert keeper is not None
    seconds, samples = keeper.seconds, keeper.budget.drawn - keeper.budget.passed_over
    return {
        "algorithm": options.algorithm,
        "engine": rank.transport.engine,
        "workers": rank.worker_count,
        "servers": rank.layout.servers,
        "model": options.model,
        "dataset": options.dataset,
        "seed": options.seed,
        "parameters": rank.replica.numel,
        "samples": samples,
        "epochs": samples / rank.plan.epoch,
        "steps": samples / rank.plan.step,
        "seconds": seconds,
        "samples_per_second": samples / seconds if seconds else 0.0,
        "test_accuracy": None,
        "test_loss": None,
        "bytes_sent_per_step": keeper.bytes_sent_per_step,
        "messages_refused": keeper.ledger.count("message refused"),
        "failures": (keeper.losses.records if keeper.losses else []) + keeper.ledger.failures(),
        "samples_lost": keeper.losses.samples if keeper.losses else 0,
        "version": aladdin_mpi.__version__,
    }


def _accounts(totals: list[dict[str, Any]], servers: int) -> dict[str, int]:
    """Gradients computed by all workers, and applied by every server alike.

    Of a worker that has failed those count which every server has got.

    Raises:
        AccountsError: one was lost, or counted twice.
    """
    living = sum(total.get("computed", 0) for total in totals)
    computed = living + min((total.get("from_failed", 0) for total in totals[:servers]), default=0)
    accounts = {
        "gradients_computed": computed,
        "gradients_applied": computed,
        "gradients_coalesced": sum(total.get("coalesced", 0) for total in totals),
        "gradients_dropped": 0,
        "gradients_refused": sum(total.get("refused", 0) for total in totals),
    }
    for rank in range(servers):
        applied, dropped = totals[rank]["applied"], totals[rank]["dropped"]
        from_failed = totals[rank].get("from_failed", 0)
        if applied + dropped - from_failed != living:
            raise AccountsError(
                f"server {rank} applied {applied} gradients and dropped {dropped}, but "
                f"{living + from_failed} were computed"
            )
        accounts["gradients_applied"] = computed - dropped
        accounts["gradients_dropped"] = dropped
    return accounts
