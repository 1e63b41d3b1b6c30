"""The summary of a run: accounting, summary.json, curves and table."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from torch import Tensor

import aladdin_mpi
from aladdin_mpi.control.exchange import gather
from aladdin_mpi.exchange.server_algorithm import ServerAlgorithm
from aladdin_mpi.hooks.evaluation import Evaluations
from aladdin_mpi.hooks.recorder import rounded
from aladdin_mpi.hooks.skip_reports import SkipReports
from aladdin_mpi.hooks.training_log import TrainingLog
from aladdin_mpi.hooks.user_metrics import UserMetrics
from aladdin_mpi.options.run import SUMMARY
from aladdin_mpi.process import console, files
from aladdin_mpi.process.files import shown, write_whole
from aladdin_mpi.run import trained_model
from aladdin_mpi.run.report import CURVES, draw_curves, table
from aladdin_mpi.session.context import Context
from aladdin_mpi.session.coordinator import Coordinator
from aladdin_mpi.worker.role import Role, TrainingWorker


class AccountsError(RuntimeError):
    """Gradients computed and gradients applied do not agree."""


def summarise(
    context: Context,
    role: Role,
    coordinator: Coordinator | None,
    log: TrainingLog | None,
    evaluations: Evaluations,
    user_metrics: UserMetrics,
    skips: SkipReports,
    folder: Path,
    model: Tensor | None,
    waiting: float,
) -> dict[str, Any]:
    """Gather the counters; at rank 0 evaluate, write into ``folder`` and print.

    ``model`` is the flat trained model, None with timed computing; ``waiting`` is this rank's time
    waiting during training, in seconds. Returns the summary at rank 0, an empty dict elsewhere.
    """
    counts = role.counts()
    if isinstance(role, TrainingWorker) and not role.worker.is_first_member:
        # The first member counts the island's gradients.
        counts = {name: counts[name] for name in ("refused", "left_out")}
    mine = {
        **counts,
        "waiting": waiting,
        "figures": user_metrics.late,
    }
    if isinstance(role, ServerAlgorithm):  # gradients received from each worker
        mine |= {"given": role.server.given, "from_former": role.server.from_former}
    totals = [total or {} for total in gather(context.transport, mine)]
    means = user_metrics.means
    joined = trained_model.join(context)
    if coordinator is None or log is None:
        return {}
    servers = context.servers
    _assign_failed(totals[:servers], [not totals[rank] for rank in context.leaders])
    for figures in (each for total in totals for each in total.get("figures", ())):
        means.add(figures)
    log.complete(coordinator)
    accounts = _accounts(totals, servers)
    if lost := coordinator.failures.gradients:
        accounts["gradients_computed"] += lost
        accounts["gradients_lost"] = lost
    left_out = coordinator.left_out + sum(total.get("left_out", 0) for total in totals)
    summary = {**_about(context, coordinator, left_out), **accounts, **role.facts()}
    if own := means.last:
        summary["own"] = own
    # Workers' reports end with their last lease; this total includes the wait after it.
    all_waiting = sum(total.get("waiting", 0.0) for total in totals[servers:])
    whole = coordinator.worker_seconds
    summary["wait_fraction"] = all_waiting / whole if whole else 0.0
    measured = evaluations.measure(coordinator, model)
    summary |= measured
    if skips.are_possible:
        paths = skips.paths
        summary |= {"images_skipped": len(paths), "skipped": paths}
    trained_model.write(context, joined, folder)
    log.metrics.close()
    # Include ranks that failed during the evaluation: their gradients were applied before.
    with context.transport.atomic():
        coordinator.failures.close([])
        summary |= _failures(coordinator)
    summary = rounded(summary)
    write_whole(folder / SUMMARY, files.written(summary, indent=2) + "\n")
    title = "{algorithm}, {model} on {dataset}, {workers} workers".format(**summary)
    draw_curves(log.metrics.lines, folder / CURVES, title, summary["failures"])
    if not context.options.quiet:
        lines = table(summary, {**measured, **means.last})
        console.say(f"{lines}\n  results in {shown(folder)}", sys.stdout)
    return summary


def _about(context: Context, coordinator: Coordinator, left_out: int) -> dict[str, Any]:
    options, plan, seconds = context.options, coordinator.plan, coordinator.seconds
    samples = coordinator.budget.drawn - coordinator.budget.passed_over - left_out
    return {
        "algorithm": options.algorithm,
        "engine": context.transport.engine,
        "workers": context.workers,
        "servers": context.servers,
        "model": options.model,
        "dataset": options.dataset,
        "seed": options.seed,
        "parameters": context.whole.numel,
        "samples": samples,
        "epochs": samples / plan.epoch,
        "steps": samples / plan.step,
        "seconds": seconds,
        "samples_per_second": samples / seconds if seconds else 0.0,
        "test_accuracy": None,
        "test_loss": None,
        "bytes_sent_per_step": coordinator.bytes_sent_per_step,
        "messages_refused": coordinator.ledger.count("message refused"),
        **_failures(coordinator),
        "version": aladdin_mpi.__version__,
    }


def _failures(coordinator: Coordinator) -> dict[str, Any]:
    failures = coordinator.failures
    return {
        "failures": failures.records + coordinator.ledger.failures(),
        "samples_lost": failures.samples,
    }


def _assign_failed(servers: list[dict[str, Any]], has_failed: list[bool]) -> None:
    """Count in each server's account the gradients of workers that have failed.

    A server may not know of a failure yet when it sends its account.
    """
    for account in filter(None, servers):
        given = zip(account["given"], has_failed, strict=True)
        account["from_failed"] = account["from_former"] + sum(n for n, failed in given if failed)


def _accounts(totals: list[dict[str, Any]], servers: int) -> dict[str, int]:
    """Return the numbers of gradients computed by workers and applied by servers.

    For a failed worker, only gradients that every server has received count.

    Raises:
        AccountsError: a gradient was lost, or counted twice.
    """
    surviving = sum(total.get("computed", 0) for total in totals)
    from_failed = [total["from_failed"] for total in totals[:servers] if total]
    computed = surviving + min(from_failed, default=0)
    accounts = {
        "gradients_computed": computed,
        "gradients_applied": computed,
        "gradients_coalesced": sum(total.get("coalesced", 0) for total in totals),
        "gradients_dropped": 0,
        "gradients_refused": sum(total.get("refused", 0) for total in totals),
    }
    for rank, total in enumerate(totals[:servers]):
        if not total:
            continue
        applied, dropped = total["applied"], total["dropped"]
        known = surviving + total["from_failed"]
        if applied + dropped != known:
            raise AccountsError(
                f"server {rank} applied {applied} gradients and dropped {dropped}, but {known} "
                "were computed. This is a bug: please report it, with config.toml of the run "
                "folder."
            )
        accounts["gradients_applied"] = computed - dropped
        accounts["gradients_dropped"] = dropped
    return accounts
