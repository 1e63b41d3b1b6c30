"""The end of a run: its accounts, summary.json, curves and table."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

import aladdin_mpi
from aladdin_mpi.control.exchange import gather
from aladdin_mpi.process import console
from aladdin_mpi.run.report import CURVES, draw_curves, table
from aladdin_mpi.run.rounding import rounded
from aladdin_mpi.run.run_folder import MODEL, write_summary

if TYPE_CHECKING:
    from aladdin_mpi.run.rank import Rank


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
    if rank.coordinator is None:
        return {}
    coordinator = rank.coordinator
    assert coordinator.metrics is not None and coordinator.progress is not None
    for figures in (each for total in totals for each in total.get("figures", ())):
        coordinator.own_figures.add(figures)
    coordinator.log_rest()
    coordinator.progress.close(coordinator.budget.drawn, coordinator.seconds)
    servers = rank.layout.servers
    summary = {**_about(rank), **_accounts(totals, servers), **rank.role.facts()}
    if own := coordinator.own_figures.last:
        summary["own"] = own
    # What workers reported ends with their last draw; this has their last wait too.
    all_waiting = sum(total.get("waiting", 0.0) for total in totals[servers:])
    whole = coordinator.worker_seconds
    summary["wait_fraction"] = all_waiting / whole if whole else 0.0
    measured: dict[str, float] = {}
    if coordinator.evaluator is not None and model is not None:
        coordinator.end_evaluations()
        measured = dict(coordinator.evaluator.measure(model))
        if not coordinator.metrics.has("eval", coordinator.budget.drawn):
            coordinator.take_variance(coordinator.budget.drawn, variance)
            coordinator.evaluated(coordinator.moment(), measured)
        summary |= measured
        _take_buffers(rank.module, coordinator.evaluator.module)
    elif rank.seen is not None:
        rank.seen.reestimate(rank.module)
    if rank.skips.are_possible:
        summary |= {
            "images_skipped": len(coordinator.skips.paths),
            "skipped": coordinator.skips.paths,
        }
    if model is not None:
        state = {name: each.cpu() for name, each in rank.module.state_dict().items()}
        torch.save(state, rank.run_dir / MODEL)
    coordinator.metrics.close()
    summary = rounded(summary)
    write_summary(rank.run_dir, summary)
    title = "{algorithm}, {model} on {dataset}, {workers} workers".format(**summary)
    draw_curves(coordinator.metrics.lines, rank.run_dir / CURVES, title)
    if not rank.options.quiet:
        shown = table(summary, {**measured, **coordinator.own_figures.last})
        console.say(f"{shown}\n  results in {rank.run_dir}", sys.stdout)
    return summary


def _take_buffers(module: nn.Module, other: nn.Module) -> None:
    """Make the buffers of ``module`` those of its copy."""
    for buffer, theirs in zip(module.buffers(), other.buffers(), strict=True):
        buffer.copy_(theirs)


def _about(rank: Rank) -> dict[str, Any]:
    options, coordinator = rank.options, rank.coordinator
    assert coordinator is not None
    seconds, samples = (
        coordinator.seconds,
        coordinator.budget.drawn - coordinator.budget.passed_over,
    )
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
        "bytes_sent_per_step": coordinator.bytes_sent_per_step,
        "messages_refused": coordinator.ledger.count("message refused"),
        "failures": (coordinator.failures.records if coordinator.failures else [])
        + coordinator.ledger.failures(),
        "samples_lost": coordinator.failures.samples if coordinator.failures else 0,
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
